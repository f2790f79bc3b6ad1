// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The registry of process sets by their number.

use std::sync::Arc;

use farandole_negotiation::FastHashMap;
use farandole_world::{ProcessSetId, Rank};
use parking_lot::RwLock;

use crate::{Error, Result};

/// A process set with this rank in it.
#[derive(Clone, Debug)]
pub(crate) struct SetMembership {
    /// Identifies the set inside the engine: numbers of process sets are reused, keys are not.
    pub(crate) key: usize,
    pub(crate) ranks: Arc<[Rank]>,
}

/// The process set of each number; `None` for a set without this rank. The lock is taken alone, or
/// before the progress lock.
#[derive(Default)]
pub(crate) struct ProcessSetRegistry(RwLock<RegistryState>);

#[derive(Default)]
struct RegistryState {
    next: usize,
    sets: FastHashMap<u64, Option<SetMembership>>,
}

impl ProcessSetRegistry {
    /// Adds a set under an unused number and returns its key.
    pub(crate) fn add_set(&self, set: ProcessSetId, ranks: Arc<[Rank]>) -> Result<usize> {
        let mut state = self.0.write();
        let key = state.next;
        let place = state.vacant_entry(set)?;
        *place = Some(SetMembership { key, ranks });
        state.next += 1;
        Ok(key)
    }

    /// Adds a set without this rank.
    pub(crate) fn reserve_nonmember_set(&self, set: ProcessSetId) -> Result<()> {
        self.0.write().vacant_entry(set).map(drop)
    }

    /// Removes a set and returns this rank's membership, if any.
    pub(crate) fn remove_set(&self, set: ProcessSetId) -> Result<Option<SetMembership>> {
        self.0.write().sets.remove(&set.0.into()).ok_or(Error::UnknownSet { set })
    }

    /// Returns the membership of this rank in a set, or an error if it is not a member.
    pub(crate) fn find_membership(&self, set: ProcessSetId, me: Rank) -> Result<SetMembership> {
        match self.0.read().sets.get(&set.0.into()) {
            Some(Some(member)) => Ok(member.clone()),
            Some(None) => Err(Error::NotAMember { rank: me, set }),
            None => Err(Error::UnknownSet { set }),
        }
    }
}

impl RegistryState {
    fn vacant_entry(&mut self, set: ProcessSetId) -> Result<&mut Option<SetMembership>> {
        if self.sets.contains_key(&set.0.into()) {
            return Err(Error::Start { reason: format!("process set {set} is given twice") });
        }
        Ok(self.sets.entry(set.0.into()).or_default())
    }
}
