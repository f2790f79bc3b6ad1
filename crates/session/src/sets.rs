// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets of a session: all ranks change them together, in one order.
//!
//! A change is agreed on by an operation over all ranks that fails when they do not ask for the
//! same. Members of a new set then open their own links; in a second agreement all learn whether
//! all could. So numbers and members are equal on all ranks at any time, and what one rank cannot
//! do no rank has.
//!
//! In an elastic job sets continue in the next world (`carried`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use farandole_collectives::Crossover;
use farandole_config::Config;
use farandole_engine::{Change, Handle, Request, SetOptions, control_peers};
use farandole_world::{ProcessSetId, Rank, World};
use parking_lot::{Mutex, RwLock};

use crate::carried::{Carried, agreed};
use crate::meeting::{Interrupted, SLICE};
use crate::wishes::ascending;
use crate::{Error, Result, Session, links, rejoin};

/// Name of the agreement on a change.
const CHANGE: &str = "farandole.process_set";
/// Name of the agreement on how it went.
const OUTCOME: &str = "farandole.process_set.outcome";

/// Locks, in the order in which they may be taken: `changes`, then `table`.
pub(crate) struct Sets {
    elastic: bool,
    memory: u64,
    crossover: Crossover,
    links_at_start: u64,
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
    /// Whether sets may be added and removed.
    dynamic: bool,
    /// The sets that `init` was asked for, and that still exist.
    given: BTreeSet<ProcessSetId>,
    /// The sets of the world before, if this one has taken them over.
    carried: Option<BTreeSet<ProcessSetId>>,
}

/// The change in progress; one at a time.
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

    /// The set of these ranks that comes from the world before.
    fn known(&self, ranks: &[Rank]) -> Option<ProcessSetId> {
        let carried = self.carried.iter().flatten();
        carried.copied().find(|set| self.sets.get(set).is_some_and(|members| members == ranks))
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
            elastic: config.elastic,
            memory: links::budget(world, config),
            // A value that is none was refused when the world formed.
            crossover: links::crossover(config).unwrap_or_default(),
            links_at_start: config.links_at_start,
            patience: config.start_timeout,
            table: RwLock::new(Table {
                sets,
                free: VecDeque::new(),
                next: 0,
                dynamic: config.dynamic_process_sets,
                given: BTreeSet::new(),
                carried: None,
            }),
            changes: Mutex::new(Changes { channel: links::DATA + 1, pending: None }),
        }
    }
}

impl Session {
    /// Every process set with its ranks, also those this rank is not in.
    pub fn process_sets(&self) -> BTreeMap<ProcessSetId, Vec<Rank>> {
        self.sets.table.read().sets.clone()
    }

    /// Returns the sets that this world has taken over from the world before, of those that `init`
    /// was asked for when the job began; `None` if it has started with those that `init` was asked
    /// for.
    pub fn carried_sets(&self) -> Option<BTreeSet<ProcessSetId>> {
        let table = self.sets.table.read();
        table.carried.as_ref().map(|_| table.given.clone())
    }

    /// The sets of this world, for the next one.
    pub(crate) fn carried(&self) -> Carried {
        let (world, table) = (self.world(), self.sets.table.read());
        let members = |ranks: &Vec<Rank>| {
            ranks
                .iter()
                .filter_map(|rank| world.seats.get(rank.index()))
                .map(|seat| seat.task)
                .collect()
        };
        let sets = table.sets.iter().filter(|(set, _)| **set != ProcessSetId::GLOBAL);
        Carried {
            dynamic: table.dynamic,
            next: table.next,
            sets: sets.map(|(set, ranks)| (*set, members(ranks))).collect(),
            given: table.given.clone(),
        }
    }

    /// Makes a process set of these ranks, in any order; its number. Every rank of the world calls
    /// it, members or not, with the same ranks, and waits until all have. `interrupted` is asked
    /// every quarter of a second while others are waited for; after an interruption the same call
    /// continues the wait. A set of these ranks that comes from the world before is that set, at
    /// once.
    ///
    /// # Errors
    /// `Fixed`, `Ranks`, `SetExists`, `Unfinished`, `Interrupted`; `Engine` with a mismatch when
    /// other ranks ask for another change, or one of them cannot open its links.
    pub fn add_process_set(
        &self,
        ranks: &[u32],
        interrupted: &mut Interrupted<'_>,
    ) -> Result<ProcessSetId> {
        self.check_changeable()?;
        let what = "a process set";
        let ranks = ascending(what, ranks, self.world().size())?;
        let mut changes = self.sets.changes.lock();
        if let Some(set) = self.sets.table.read().known(&ranks) {
            return Ok(set);
        }
        let change = Change::Add(ranks.clone());
        if changes.pending.is_none() {
            self.sets.table.read().check(what, &ranks)?;
        }
        self.agree(CHANGE, change, &mut changes.pending, interrupted)?;
        self.open_set(
            None,
            ranks,
            &mut changes.channel,
            Instant::now() + self.sets.patience,
            interrupted,
        )
    }

    /// Ends a process set; every rank of the world calls it, and waits until all have. What is in
    /// flight in it fails.
    ///
    /// # Errors
    /// `Fixed`, `NoSuchSet`, `Unfinished`, `Interrupted`; `Engine` with a mismatch when other ranks
    /// ask for another change.
    pub fn remove_process_set(
        &self,
        set: ProcessSetId,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<()> {
        self.check_changeable()?;
        let mut changes = self.sets.changes.lock();
        if set == ProcessSetId::GLOBAL || !self.sets.table.read().sets.contains_key(&set) {
            return Err(Error::NoSuchSet(set));
        }
        self.agree(CHANGE, Change::Remove(set), &mut changes.pending, interrupted)?;
        self.engine().remove_set(set)?;
        let mut table = self.sets.table.write();
        table.sets.remove(&set);
        table.given.remove(&set);
        if let Some(carried) = &mut table.carried {
            carried.remove(&set);
        }
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
        if let Some(carried) = self.agreed_sets(wishes, deadline, &mut ask).map_err(late)? {
            return self
                .take_over(&carried, &mut changes.channel, deadline, &mut ask)
                .map_err(late);
        }
        let begin = Change::Begin { sets: wishes.len(), dynamic: self.sets.table.read().dynamic };
        self.agree("process_sets", begin, &mut None, &mut ask).map_err(late)?;
        // What was given is compared as it is, then judged: so all ranks come to the same
        // judgement.
        for (index, ranks) in wishes.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let given = ranks.iter().copied().map(Rank).collect();
            self.agree(&what, Change::Add(given), &mut None, &mut ask).map_err(late)?;
        }
        for (index, ranks) in wishes.iter().enumerate() {
            let what = format!("process_sets[{index}]");
            let ranks = ascending(&what, ranks, self.world().size())?;
            self.sets.table.read().check(&what, &ranks)?;
            let set = self
                .open_set(None, ranks, &mut changes.channel, deadline, &mut ask)
                .map_err(late)?;
            self.sets.table.write().given.insert(set);
        }
        Ok(())
    }

    /// The sets of the world before, if this one is not the job's first and not the first of all
    /// its ranks.
    fn agreed_sets(
        &self,
        wishes: &[Vec<u32>],
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<Option<Carried>> {
        let Some(client) = self.client().filter(|_| self.sets.elastic) else { return Ok(None) };
        if self.world().generation.0 <= 1 {
            return Ok(None);
        }
        // A caller that asks for sets begins again.
        let own = rejoin::left_sets().filter(|_| wishes.is_empty());
        agreed(client, self.world(), own.as_ref(), deadline, interrupted)
    }

    /// Makes what is left of the sets of the world before, under their numbers.
    fn take_over(
        &self,
        carried: &Carried,
        channel: &mut u32,
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<()> {
        let sets = carried.ranks(self.world());
        let begin = Change::Begin { sets: sets.len(), dynamic: carried.dynamic };
        self.agree("process_sets", begin, &mut None, interrupted)?;
        for (set, ranks) in &sets {
            self.open_set(Some(*set), ranks.clone(), channel, deadline, interrupted)?;
        }
        let mut table = self.sets.table.write();
        table.dynamic = carried.dynamic;
        table.next = carried.next;
        table.free = carried.free(&sets);
        table.given = carried.given.iter().filter(|set| sets.contains_key(set)).copied().collect();
        table.carried = Some(sets.into_keys().collect());
        Ok(())
    }

    fn check_changeable(&self) -> Result<()> {
        self.check_process()?;
        if self.sets.table.read().dynamic { Ok(()) } else { Err(Error::Fixed) }
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

    /// All ranks have agreed on a set of these ranks: makes it if all members can, under this
    /// number or the next one.
    fn open_set(
        &self,
        number: Option<ProcessSetId>,
        ranks: Vec<Rank>,
        channel: &mut u32,
        deadline: Instant,
        interrupted: &mut Interrupted<'_>,
    ) -> Result<ProcessSetId> {
        let first = *channel;
        *channel += 2;
        let member = ranks.contains(&self.world().rank);
        let opened =
            member.then(|| self.open_links(&ranks, first, deadline, interrupted)).transpose();
        // From here to the outcome only others' deadlines and deaths are waited for.
        let outcome = Change::Outcome(opened.as_ref().err().map(ToString::to_string));
        let agreed = self.agree(OUTCOME, outcome, &mut None, &mut || false);
        let parts = opened?;
        agreed?;
        let id = number.unwrap_or_else(|| self.sets.table.write().number());
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
    ) -> Result<(Vec<farandole_transport::Link>, Box<dyn farandole_collectives::Communicator>)>
    {
        let world = self.world();
        let fallen =
            || self.rest.mesh().map(farandole_transport::Mesh::fallbacks).unwrap_or_default();
        let known = fallen().len();
        let (mut control, mut data) = (Vec::new(), Vec::new());
        if let Some(mesh) = self.rest.mesh() {
            let neighbours = control_peers(world, ranks);
            control = mesh.open_until(
                channel,
                &neighbours,
                links::CONTROL_CAPACITY,
                deadline,
                interrupted,
            )?;
            let wanted = links::Data {
                world,
                members: ranks,
                channel: channel + 1,
                capacity: links::set_capacity(world, self.sets.memory),
                most: self.sets.links_at_start,
                deadline,
            };
            data = wanted.open(mesh, interrupted)?;
        }
        if let Some(warning) = links::fallbacks(&fallen().split_off(known)) {
            let ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
            tracing::warn!("in the process set of ranks {ranks:?}: {warning}");
        }
        Ok((
            control,
            Box::new(links::communicator(world, ranks, data, self.sets.crossover.clone())?),
        ))
    }
}
