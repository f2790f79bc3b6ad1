// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets by their number.

use std::sync::Arc;

use farandole_world::{ProcessSetId, Rank};
use parking_lot::RwLock;

use crate::hash::Map;
use crate::{Error, Result};

/// A process set this rank is in.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// Names the set inside the engine; numbers of process sets are used again, keys are not.
    pub(crate) key: usize,
    pub(crate) ranks: Arc<[Rank]>,
}

/// The set of each number. The lock is taken alone, or before the progress lock.
#[derive(Default)]
pub(crate) struct Registry(RwLock<State>);

#[derive(Default)]
struct State {
    next: usize,
    sets: Map<u64, Option<Member>>,
}

impl Registry {
    /// Enters a set under a number that is free; the key of it.
    pub(crate) fn add(&self, set: ProcessSetId, ranks: Arc<[Rank]>) -> Result<usize> {
        let mut state = self.0.write();
        let key = state.next;
        let place = state.free(set)?;
        *place = Some(Member { key, ranks });
        state.next += 1;
        Ok(key)
    }

    /// Enters a set that this rank is not in.
    pub(crate) fn add_foreign(&self, set: ProcessSetId) -> Result<()> {
        self.0.write().free(set).map(drop)
    }

    /// Forgets a set; what this rank had of it.
    pub(crate) fn remove(&self, set: ProcessSetId) -> Result<Option<Member>> {
        self.0.write().sets.remove(&set.0.into()).ok_or(Error::UnknownSet { set })
    }

    /// A set this rank must be in.
    pub(crate) fn member(&self, set: ProcessSetId, me: Rank) -> Result<Member> {
        match self.0.read().sets.get(&set.0.into()) {
            Some(Some(member)) => Ok(member.clone()),
            Some(None) => Err(Error::NotAMember { rank: me, set }),
            None => Err(Error::UnknownSet { set }),
        }
    }
}

impl State {
    fn free(&mut self, set: ProcessSetId) -> Result<&mut Option<Member>> {
        if self.sets.contains_key(&set.0.into()) {
            return Err(Error::Start { reason: format!("process set {set} is given twice") });
        }
        Ok(self.sets.entry(set.0.into()).or_default())
    }
}
