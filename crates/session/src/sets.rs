// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets of a session: all ranks change them together, in one order.
//!
//! A change is agreed on by an operation over all ranks that fails when they do not ask for the same. Members of a new
//! set then open links of their own; a second agreement tells everybody whether all could. So numbers and members are
//! equal on all ranks at any time, and what one rank cannot do no rank has.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use farandole_collectives::Crossover;
use farandole_config::Config;
use farandole_engine::{Change, Handle, Request, SetOptions, control_peers};
use farandole_world::{ProcessSetId, Rank, World};
use parking_lot::{Mutex, RwLock};

use crate::meeting::{Interrupted, SLICE};
use crate::wishes::ascending;
use crate::{Error, Result, Session, links};

/// Name of the agreement on a change.
const CHANGE: &str = "farandole.process_set";
/// Name of the agreement on how it went.
const OUTCOME: &str = "farandole.process_set.outcome";

/// Locks, in the order in which they may be taken: `changes`, then `table`.
pub(crate) struct Sets {
    dynamic: bool,
    memory: u64,
    crossover: Crossover,
    patience: Duration,
    table: RwLock<Table>,
    changes: Mutex<Changes>,
}

/// Equal on all ranks.
struct Table {
    sets: BTreeMap<ProcessSetId, Vec<Rank>>,
    /// Numbers to be used again, oldest first.
    free: VecDeque<ProcessSetId>,
    next: u32,
}

/// What is being changed; one change at a time.
struct Changes {
    /// The next channels of the mesh, equal on all ranks.
    channel: u32,
    /// Asked for and interrupted.
    pending: Option<(Change, Handle)>,
}

impl Table {
    fn number(&mut self) -> ProcessSetId {
        self.free.pop_front().unwrap_or_else(|| {
            self.next += 1;
            ProcessSetId(self.next)
        })
    }

    /// Refuses ranks that have a set.
    fn check(&self, what: &str, ranks: &[Rank]) -> Result<()> {
        match self.sets.iter().find(|(_, members)| *members == ranks) {
            None => Ok(()),
            Some((set, _)) => {
                Err(Error::SetExists { what: what.to_owned(), set: *set, ranks: ranks.to_vec() })
            }
        }
    }
}

impl Sets {
    pub(crate) fn new(world: &World, config: &Config) -> Self {
        let all = (0u32..).take(world.size()).map(Rank).collect();
        let sets = BTreeMap::from([(ProcessSetId::GLOBAL, all)]);
        Self {
            dynamic: config.dynamic_process_sets,
            memory: links::budget(world, config),
            // A value that is none was refused when the world formed.
            crossover: links::crossover(config).unwrap_or_default(),
            patience: config.start_timeout,
            table: RwLock::new(Table { sets, free: VecDeque::new(), next: 0 }),
            changes: Mutex::new(Changes { channel: links::DATA + 1, pending: None }),
        }
    }
}

impl Session {
    /// Every process set with its ranks, also those this rank is not in.
    pub fn process_sets(&self) -> BTreeMap<ProcessSetId, Vec<Rank>> {
        self.sets.table.read().sets.clone()
    }

    /// Makes a process set of these ranks, in any order; its number. Every rank of the world calls it, members or not,
    /// with the same ranks, and waits until all have. `interrupted` is asked every quarter of a second while others are
    /// waited for; after an interruption the same call goes on waiting.
    ///
    /// # Errors
    /// `Fixed`, `Ranks`, `SetExists`, `Unfinished`, `Interrupted`; `Engine` with a mismatch when other ranks ask for
    /// another change, or one of them cannot open its links.
    pub fn add_process_set(&self, ranks: &[u32], interrupted: &mut Interrupted<'_>) -> Result<ProcessSetId> {
        self.check_changeable()?;
        let what = "a process set";
        let ranks = ascending(what, ranks, self.world().size())?;
        let mut changes = self.sets.changes.lock();
        let change = Change::Add(ranks.clone());
        if changes.pending.is_none() {
            self.sets.table.read().check(what, &ranks)?;
        }
        self.agree(CHANGE, change, &mut changes.pending, interrupted)?;
        self.open_set(ranks, &mut changes.channel, Instant::now() + self.sets.patience, interrupted)
    }

    /// Ends a process set; every rank of the world calls it, and waits until all have. What is in flight in it fails.
    ///
    /// # Errors
    /// `Fixed`, `NoSuchSet`, `Unfinished`, `Interrupted`; `Engine` with a mismatch when other ranks ask for another
    /// change.
    pub fn remove_process_set(&self, set: ProcessSetId, interrupted: &mut Interrupted<'_>) -> Result<()> {
        self.check_changeable()?;
        let mut changes = self.sets.changes.lock();
        if set == ProcessSetId::GLOBAL || !self.sets.table.read().sets.contains_key(&set) {
            return Err(Error::NoSuchSet(set));
        }
        self.agree(CHANGE, Change::Remove(set), &mut changes.pending, interrupted)?;
        self.engine().remove_set(set)?;
        let mut table = self.sets.table.write();
        table.sets.remove(&set);
        table.free.push_back(set);
        Ok(())
    }

    /// Agrees on the process sets given at the start, and makes them.
    pub(crate) fn begin_sets(
        &self,
        wishes: &[Vec<u32>],
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
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
        let begin = Change::Begin { sets: wishes.len(), dynamic: self.sets.dynamic };
        self.agree("process_sets", begin, &mut None, &mut ask).map_err(late)?;
        // What was given is compared as it is, then judged: so all ranks come to the same judgement.
        for (index, ranks) in wishes.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let given = ranks.iter().copied().map(Rank).collect();
            self.agree(&what, Change::Add(given), &mut None, &mut ask).map_err(late)?;
        }
        for (index, ranks) in wishes.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let ranks = ascending(&what, ranks, self.world().size())?;
            self.sets.table.read().check(&what, &ranks)?;
            self.open_set(ranks, &mut changes.channel, deadline, &mut ask).map_err(late)?;
        }
        Ok(())
    }

    fn check_changeable(&self) -> Result<()> {
        self.check_process()?;
        if self.sets.dynamic { Ok(()) } else { Err(Error::Fixed) }
    }

    /// Waits until all ranks ask for this change. What was interrupted before is asked for already.
    fn agree(
        &self,
        name: &str,
        change: Change,
        pending: &mut Option<(Change, Handle)>,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<()> {
        let handle = match pending.take() {
            None => self.engine().submit_attended(Request::change(name, change.clone()))?,
            Some((asked, handle)) if asked == change => handle,
            Some(other) => {
                let text = format!("{:?}", other.0);
                *pending = Some(other);
                return Err(Error::Unfinished { pending: text });
            }
        };
        while self.engine().wait(handle, SLICE)?.is_none() {
            if interrupted() {
                *pending = Some((change, handle));
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// All ranks have agreed on a set of these ranks: makes it if all members can.
    fn open_set(
        &self,
        ranks: Vec<Rank>,
        channel: &mut u32,
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<ProcessSetId> {
        let first = *channel;
        *channel += 2;
        let member = ranks.contains(&self.world().rank);
        let opened = member.then(|| self.open_links(&ranks, first, deadline, interrupted)).transpose();
        // From here to the outcome only others' deadlines and deaths are waited for.
        let outcome = Change::Outcome(opened.as_ref().err().map(ToString::to_string));
        let agreed = self.agree(OUTCOME, outcome, &mut None, &mut || false);
        let parts = opened?;
        agreed?;
        let id = self.sets.table.write().number();
        match parts {
            Some((control, communicator)) => {
                let members = ranks.clone();
                self.engine().add_set(SetOptions { id, members, control, communicator })?;
            }
            None => self.engine().add_foreign_set(id)?,
        }
        self.sets.table.write().sets.insert(id, ranks);
        Ok(id)
    }

    fn open_links(
        &self,
        ranks: &[Rank],
        channel: u32,
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<(Vec<farandole_transport::Link>, Box<dyn farandole_collectives::Communicator>)> {
        let world = self.world();
        let fallen = || self.rest.mesh().map(farandole_transport::Mesh::fallbacks).unwrap_or_default();
        let known = fallen().len();
        let mut open = |channel, peers: &[Rank], capacity| match self.rest.mesh() {
            Some(mesh) => mesh.open_until(channel, peers, capacity, deadline, interrupted),
            None => Ok(Vec::new()),
        };
        let control = open(channel, &control_peers(world, ranks), links::CONTROL_CAPACITY)?;
        let others: Vec<Rank> = ranks.iter().copied().filter(|rank| *rank != world.rank).collect();
        let data = open(channel + 1, &others, links::set_capacity(world, self.sets.memory))?;
        if let Some(warning) = links::fallbacks(&fallen().split_off(known)) {
            let ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
            tracing::warn!("in the process set of ranks {ranks:?}: {warning}");
        }
        Ok((control, Box::new(links::communicator(world, ranks, data, self.sets.crossover.clone())?)))
    }
}
