// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Member sets: process sets that only their members know.
//!
//! The other process sets (`sets`) need all ranks of the world for each change. A member set needs
//! its members alone, so ranks can create member sets in any order, several at a time. One member
//! reserves the channel and tells it to the others, by any way that it has to them.
//!
//! Each process numbers its member sets itself. They end with the session: no later world
//! continues them, and `process_sets` does not list them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use farandole_engine::ProcessSetOptions;
use farandole_world::{ProcessSetId, World};

use crate::init_options::sorted_ranks;
use crate::registrar_rendezvous::Interrupted;
use crate::{Result, Session};

/// First number and first channel of member sets. The sets that all ranks know count from 1 and
/// would have to reach it.
const FIRST_MEMBER_SET: u32 = 1 << 31;

/// Counters of the member sets of this process.
#[derive(Default)]
pub(crate) struct MemberSetCounters {
    channels: AtomicU32,
    sets: AtomicU32,
}

impl MemberSetCounters {
    /// Returns a channel that no rank of the world has reserved. A set uses it and the next one.
    fn next_channel(&self, world: &World) -> u32 {
        let size = u32::try_from(world.size()).unwrap_or(u32::MAX);
        let count = self.channels.fetch_add(1, Ordering::Relaxed);
        // After billions of channels, the last one is returned again, and the mesh refuses it.
        count
            .saturating_mul(size)
            .saturating_add(world.rank.0)
            .saturating_mul(2)
            .saturating_add(FIRST_MEMBER_SET)
            .min(u32::MAX - 1)
    }

    fn next_set(&self) -> ProcessSetId {
        ProcessSetId(FIRST_MEMBER_SET.saturating_add(self.sets.fetch_add(1, Ordering::Relaxed)))
    }
}

impl Session {
    /// Returns an unused channel for [`add_member_set`](Self::add_member_set).
    ///
    /// # Errors
    /// `Forked`.
    pub fn reserve_set_channel(&self) -> Result<u32> {
        self.check_not_forked()?;
        Ok(self.sets.member_counters.next_channel(self.world()))
    }

    /// Creates a member set of these ranks, in any order, and returns its number in this process.
    /// Every member must call it with the same ranks and the channel that one of them has
    /// reserved. The call waits until the members are linked. Meanwhile, it calls `interrupted`
    /// every quarter of a second.
    ///
    /// # Errors
    /// `InvalidRanks`, `Interrupted`; `Transport` if the members are not linked by the deadline;
    /// `Engine` if this rank is no member.
    pub fn add_member_set(
        &self,
        ranks: &[u32],
        channel: u32,
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<ProcessSetId> {
        self.check_not_forked()?;
        let members = sorted_ranks("a member set", ranks, self.world().size())?;
        let (control, communicator) =
            self.open_set_links(&members, channel, deadline, interrupted)?;
        let id = self.sets.member_counters.next_set();
        self.engine().add_set(ProcessSetOptions { id, members, control, communicator })?;
        Ok(id)
    }
}
