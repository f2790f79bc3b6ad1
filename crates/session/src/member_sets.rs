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

use std::time::Instant;

use farandole_engine::ProcessSetOptions;
use farandole_world::ProcessSetId;

use crate::init_options::checked_sorted_ranks;
use crate::registrar_rendezvous::InterruptCheck;
use crate::{Result, Session};

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
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ProcessSetId> {
        self.check_not_forked()?;
        let members = checked_sorted_ranks("a member set", ranks, self.world().size())?;
        let (control, communicator) =
            self.open_set_links(&members, channel, deadline, interrupted)?;
        let id = self.sets.member_counters.next_member_set_id();
        self.engine().add_set(ProcessSetOptions { id, members, control, communicator })?;
        Ok(id)
    }
}
