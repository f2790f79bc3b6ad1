// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets of a session: all ranks change them together, in one order.
//!
//! All ranks agree on a change with one operation, which fails if their requests differ. The
//! members of a new set then open its links. In a second agreement, every rank learns whether all
//! members succeeded. So numbers and members are equal on all ranks at any time, and a set exists
//! on all ranks or on none.
//!
//! In an elastic job, sets continue in the next world (`carried_sets`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use farandole_engine::{
    CollectiveRequest, ProcessSetChange, ProcessSetOptions, RequestHandle, control_peers,
};
use farandole_world::{ProcessSetId, Rank};

use crate::carried_sets::{CarriedProcessSets, exchange_carried_sets};
use crate::init_options::checked_sorted_ranks;
use crate::registrar_rendezvous::{INTERRUPT_POLL_INTERVAL, InterruptCheck};
use crate::{Error, Result, Session, rank_links, rejoin};

/// Name of the agreement on a change.
const SET_CHANGE_NAME: &str = "farandole.process_set";
/// Name of the agreement on the outcome.
const SET_OUTCOME_NAME: &str = "farandole.process_set.outcome";

impl Session {
    /// Returns every process set with its ranks, including sets without this rank.
    pub fn process_sets(&self) -> BTreeMap<ProcessSetId, Vec<Rank>> {
        self.sets.table.read().sets.clone()
    }

    /// Returns the sets that this world continues from the previous one, if `init` requested them
    /// when the job began; `None` if this world started with new sets.
    pub fn carried_sets(&self) -> Option<BTreeSet<ProcessSetId>> {
        let table = self.sets.table.read();
        table.carried_ids.as_ref().map(|_| table.from_init.clone())
    }

    /// Returns the sets of this world, for the next one.
    pub(crate) fn export_process_sets(&self) -> CarriedProcessSets {
        let (world, table) = (self.world(), self.sets.table.read());
        let members = |ranks: &Vec<Rank>| {
            ranks
                .iter()
                .filter_map(|rank| world.seats.get(rank.index()))
                .map(|seat| seat.task)
                .collect()
        };
        let sets = table.sets.iter().filter(|(set, _)| **set != ProcessSetId::GLOBAL);
        CarriedProcessSets {
            dynamic: table.dynamic,
            last_id: table.last_id,
            sets: sets.map(|(set, ranks)| (*set, members(ranks))).collect(),
            from_init: table.from_init.clone(),
        }
    }

    /// Creates a process set of these ranks, in any order, and returns its number. Every rank of
    /// the world must call it with the same ranks, also if it is no member; the call waits for all
    /// ranks. Meanwhile, it calls `interrupted` every quarter of a second. After an interruption,
    /// the same call continues the wait. If the set continues from the previous world, its number
    /// is returned at once.
    ///
    /// # Errors
    /// `FixedProcessSets`, `InvalidRanks`, `SetExists`, `PendingChange`, `Interrupted`; `Engine`
    /// with a mismatch when other ranks request another change, or one of them cannot open its
    /// links.
    pub fn add_process_set(
        &self,
        ranks: &[u32],
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ProcessSetId> {
        self.check_sets_dynamic()?;
        let what = "a process set";
        let ranks = checked_sorted_ranks(what, ranks, self.world().size())?;
        let mut changes = self.sets.changes.lock();
        if let Some(set) = self.sets.table.read().find_carried_set(&ranks) {
            return Ok(set);
        }
        let change = ProcessSetChange::Add(ranks.clone());
        if changes.pending.is_none() {
            self.sets.table.read().check_ranks_without_set(what, &ranks)?;
        }
        self.agree_on_change(SET_CHANGE_NAME, change, &mut changes.pending, interrupted)?;
        self.create_set(
            None,
            ranks,
            &mut changes.channel,
            Instant::now() + self.sets.open_timeout,
            interrupted,
        )
    }

    /// Removes a process set. Every rank of the world must call it, and the call waits for all
    /// ranks. Operations in flight in the set fail.
    ///
    /// # Errors
    /// `FixedProcessSets`, `NoSuchSet`, `PendingChange`, `Interrupted`; `Engine` with a mismatch
    /// when other ranks request another change.
    pub fn remove_process_set(
        &self,
        set: ProcessSetId,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<()> {
        self.check_sets_dynamic()?;
        let mut changes = self.sets.changes.lock();
        if set == ProcessSetId::GLOBAL || !self.sets.table.read().sets.contains_key(&set) {
            return Err(Error::NoSuchSet(set));
        }
        self.agree_on_change(
            SET_CHANGE_NAME,
            ProcessSetChange::Remove(set),
            &mut changes.pending,
            interrupted,
        )?;
        self.engine().remove_set(set)?;
        let mut table = self.sets.table.write();
        table.sets.remove(&set);
        table.from_init.remove(&set);
        if let Some(carried) = &mut table.carried_ids {
            carried.remove(&set);
        }
        // At the end of the queue, so that a number is reused as late as possible.
        table.free_ids.push_back(set);
        Ok(())
    }

    /// Agrees on the initial process sets, and creates them.
    pub(crate) fn create_initial_sets(
        &self,
        requested_sets: &[Vec<u32>],
        deadline: Instant,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<()> {
        let started = Instant::now();
        let mut ask = || interrupted() || Instant::now() >= deadline;
        let late = |error| match error {
            Error::Interrupted if Instant::now() >= deadline => {
                Error::Timeout { size: self.world().size(), elapsed: started.elapsed() }
            }
            other => other,
        };
        let mut changes = self.sets.changes.lock();
        if let Some(carried) =
            self.agree_on_carried_sets(requested_sets, deadline, &mut ask).map_err(late)?
        {
            return self
                .restore_sets(&carried, &mut changes.channel, deadline, &mut ask)
                .map_err(late);
        }
        let begin = ProcessSetChange::Begin {
            sets: requested_sets.len(),
            dynamic: self.sets.table.read().dynamic,
        };
        self.agree_on_change("process_sets", begin, &mut None, &mut ask).map_err(late)?;
        // The ranks first agree on the unchecked arguments, then check them: so all ranks come to
        // the same result.
        for (index, ranks) in requested_sets.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let given = ranks.iter().copied().map(Rank).collect();
            self.agree_on_change(&what, ProcessSetChange::Add(given), &mut None, &mut ask)
                .map_err(late)?;
        }
        for (index, ranks) in requested_sets.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let ranks = checked_sorted_ranks(&what, ranks, self.world().size())?;
            self.sets.table.read().check_ranks_without_set(&what, &ranks)?;
            let set = self
                .create_set(None, ranks, &mut changes.channel, deadline, &mut ask)
                .map_err(late)?;
            self.sets.table.write().from_init.insert(set);
        }
        Ok(())
    }

    /// Agrees on the sets of the previous world; `None` if the job is not elastic or this world is
    /// its first.
    fn agree_on_carried_sets(
        &self,
        requested_sets: &[Vec<u32>],
        deadline: Instant,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<Option<CarriedProcessSets>> {
        let Some(client) = self.client().filter(|_| self.sets.elastic) else { return Ok(None) };
        // The first world has no predecessor, so the exchange would only cost a round of calls.
        if self.world().generation.0 <= 1 {
            return Ok(None);
        }
        // A caller that passes sets to `init` replaces the previous ones.
        let own = rejoin::previous_process_sets().filter(|_| requested_sets.is_empty());
        exchange_carried_sets(client, self.world(), own.as_ref(), deadline, interrupted)
    }

    /// Restores the remaining sets of the previous world, under their numbers.
    fn restore_sets(
        &self,
        carried: &CarriedProcessSets,
        channel: &mut u32,
        deadline: Instant,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<()> {
        let sets = carried.remaining_ranks_in_world(self.world());
        let begin = ProcessSetChange::Begin { sets: sets.len(), dynamic: carried.dynamic };
        self.agree_on_change("process_sets", begin, &mut None, interrupted)?;
        for (set, ranks) in &sets {
            self.create_set(Some(*set), ranks.clone(), channel, deadline, interrupted)?;
        }
        let mut table = self.sets.table.write();
        table.dynamic = carried.dynamic;
        table.last_id = carried.last_id;
        table.free_ids = carried.unused_set_ids(&sets);
        table.from_init =
            carried.from_init.iter().filter(|set| sets.contains_key(set)).copied().collect();
        table.carried_ids = Some(sets.into_keys().collect());
        Ok(())
    }

    fn check_sets_dynamic(&self) -> Result<()> {
        self.check_not_forked()?;
        if self.sets.table.read().dynamic { Ok(()) } else { Err(Error::FixedProcessSets) }
    }

    /// Waits until all ranks request this change. An interrupted request is continued, not
    /// repeated.
    fn agree_on_change(
        &self,
        name: &str,
        change: ProcessSetChange,
        pending: &mut Option<(ProcessSetChange, RequestHandle)>,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<()> {
        let handle = match pending.take() {
            None => self
                .engine()
                .submit_before_wait(CollectiveRequest::process_set_change(name, change.clone()))?,
            Some((asked, handle)) if asked == change => handle,
            Some(other) => {
                let text = format!("{:?}", other.0);
                *pending = Some(other);
                return Err(Error::PendingChange { pending: text });
            }
        };
        while self.engine().wait(handle, INTERRUPT_POLL_INTERVAL)?.is_none() {
            if interrupted() {
                // The other ranks may have agreed already, so the request cannot be withdrawn.
                *pending = Some((change, handle));
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Creates a set of these ranks, after all ranks have agreed on it, if all members can open its
    /// links. It gets this number or the next free one.
    fn create_set(
        &self,
        number: Option<ProcessSetId>,
        ranks: Vec<Rank>,
        channel: &mut u32,
        deadline: Instant,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<ProcessSetId> {
        let first = *channel;
        // On all ranks, also on ranks that are no members: the numbers must stay equal. The engine
        // and the communicator use one channel each.
        *channel += 2;
        let member = ranks.contains(&self.world().rank);
        let opened =
            member.then(|| self.open_set_links(&ranks, first, deadline, interrupted)).transpose();
        // Not interruptible: the wait ends when the other ranks report, reach their deadlines, or
        // die.
        let outcome = ProcessSetChange::Outcome(opened.as_ref().err().map(ToString::to_string));
        let agreed = self.agree_on_change(SET_OUTCOME_NAME, outcome, &mut None, &mut || false);
        // The own error first: it says more than the agreement, which only repeats it for the other
        // ranks.
        let parts = opened?;
        agreed?;
        let id = number.unwrap_or_else(|| self.sets.table.write().next_id());
        match parts {
            Some((control, communicator)) => {
                let members = ranks.clone();
                self.engine().add_set(ProcessSetOptions { id, members, control, communicator })?;
            }
            // The engine of a rank that is no member refuses operations of the set with a clear
            // error.
            None => self.engine().reserve_nonmember_set(id)?,
        }
        self.sets.table.write().sets.insert(id, ranks);
        Ok(id)
    }

    pub(crate) fn open_set_links(
        &self,
        ranks: &[Rank],
        channel: u32,
        deadline: Instant,
        interrupted: &mut InterruptCheck<'_>,
    ) -> Result<(Vec<farandole_transport::Link>, Box<dyn farandole_collectives::Communicator>)>
    {
        let world = self.world();
        let fallen = || {
            self.mesh_parker
                .mesh()
                .map(farandole_transport::Mesh::tcp_fallbacks)
                .unwrap_or_default()
        };
        let known = fallen().len();
        let (mut control, mut data) = (Vec::new(), Vec::new());
        if let Some(mesh) = self.mesh_parker.mesh() {
            let neighbours = control_peers(world, ranks);
            control = mesh.open_links_until(
                channel,
                &neighbours,
                rank_links::CONTROL_RING_BYTES,
                deadline,
                interrupted,
            )?;
            let wanted = rank_links::DataLinks {
                world,
                members: ranks,
                channel: channel + 1,
                capacity: rank_links::process_set_ring_bytes(world, self.sets.memory_budget),
                max_eager_peers: self.sets.links_at_start,
                deadline,
            };
            data = wanted.open_links(mesh, interrupted)?;
        }
        if let Some(warning) = rank_links::tcp_fallback_warning(&fallen().split_off(known)) {
            let ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
            tracing::warn!("in the process set of ranks {ranks:?}: {warning}");
        }
        Ok((
            control,
            Box::new(rank_links::build_communicator(
                world,
                ranks,
                data,
                self.sets.crossover.clone(),
            )?),
        ))
    }
}
