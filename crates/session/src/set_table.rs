// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The process sets of a session, and their locks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use farandole_collectives::CrossoverTable;
use farandole_config::Config;
use farandole_engine::{ProcessSetChange, RequestHandle};
use farandole_world::{ProcessSetId, Rank, World};
use parking_lot::{Mutex, RwLock};

use crate::{Error, Result, rank_links};

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
    pub(crate) fn next_channel(&self, world: &World) -> u32 {
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

    pub(crate) fn next_member_set_id(&self) -> ProcessSetId {
        ProcessSetId(FIRST_MEMBER_SET.saturating_add(self.sets.fetch_add(1, Ordering::Relaxed)))
    }
}

/// Process sets and their locks. Lock order: `changes`, then `table`.
pub(crate) struct SessionProcessSets {
    pub(crate) elastic: bool,
    pub(crate) memory_budget: u64,
    pub(crate) crossover: CrossoverTable,
    pub(crate) links_at_start: u64,
    pub(crate) open_timeout: Duration,
    pub(crate) table: RwLock<ProcessSetTable>,
    pub(crate) changes: Mutex<SetChangeState>,
    pub(crate) member_counters: MemberSetCounters,
}

/// The sets of a world, equal on all ranks.
pub(crate) struct ProcessSetTable {
    pub(crate) sets: BTreeMap<ProcessSetId, Vec<Rank>>,
    /// Numbers to reuse, oldest first.
    pub(crate) free_ids: VecDeque<ProcessSetId>,
    pub(crate) last_id: u32,
    /// Whether sets may be added and removed.
    pub(crate) dynamic: bool,
    /// The sets that `init` was asked for and that still exist.
    pub(crate) from_init: BTreeSet<ProcessSetId>,
    /// The sets of the previous world, if this world continues them.
    pub(crate) carried_ids: Option<BTreeSet<ProcessSetId>>,
}

/// The change in progress; one at a time.
pub(crate) struct SetChangeState {
    /// The next free channel of the mesh, equal on all ranks.
    pub(crate) channel: u32,
    /// A change that was requested and then interrupted.
    pub(crate) pending: Option<(ProcessSetChange, RequestHandle)>,
}

impl ProcessSetTable {
    pub(crate) fn next_id(&mut self) -> ProcessSetId {
        // Oldest first, and equal on all ranks, because all change the table in the same order.
        self.free_ids.pop_front().unwrap_or_else(|| {
            self.last_id += 1;
            ProcessSetId(self.last_id)
        })
    }

    /// Returns the set of these ranks that continues from the previous world.
    pub(crate) fn find_carried_set(&self, ranks: &[Rank]) -> Option<ProcessSetId> {
        let carried = self.carried_ids.iter().flatten();
        carried.copied().find(|set| self.sets.get(set).is_some_and(|members| members == ranks))
    }

    /// Rejects ranks that already have a set.
    pub(crate) fn check_ranks_without_set(&self, what: &str, ranks: &[Rank]) -> Result<()> {
        match self.sets.iter().find(|(_, members)| *members == ranks) {
            None => Ok(()),
            Some((set, _)) => {
                Err(Error::SetExists { what: what.to_owned(), set: *set, ranks: ranks.to_vec() })
            }
        }
    }
}

impl SessionProcessSets {
    pub(crate) fn new(world: &World, config: &Config) -> Self {
        let all = (0u32..).take(world.size()).map(Rank).collect();
        let sets = BTreeMap::from([(ProcessSetId::GLOBAL, all)]);
        Self {
            elastic: config.elastic,
            memory_budget: rank_links::shared_memory_budget(world, config),
            // An invalid value was rejected when the world formed.
            crossover: rank_links::read_crossover_rules(config).unwrap_or_default(),
            links_at_start: config.links_at_start,
            open_timeout: config.start_timeout,
            table: RwLock::new(ProcessSetTable {
                sets,
                free_ids: VecDeque::new(),
                last_id: 0,
                dynamic: config.dynamic_process_sets,
                from_init: BTreeSet::new(),
                carried_ids: None,
            }),
            changes: Mutex::new(SetChangeState {
                channel: rank_links::DATA_CHANNEL + 1,
                pending: None,
            }),
            member_counters: MemberSetCounters::default(),
        }
    }
}
