// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The placement of every rank.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{CrossRank, Generation, HostHash, LocalRank, Rank, TaskId};

/// The placement of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlacement {
    /// The task that got this rank.
    pub task: TaskId,
    /// Its memory domain.
    pub host: HostHash,
    /// Position among the ranks of the host.
    pub local_rank: LocalRank,
    /// Number of ranks on the host.
    pub local_size: u32,
    /// Position among the hosts that have this local rank.
    pub cross_rank: CrossRank,
    /// Number of hosts that have this local rank.
    pub cross_size: u32,
}

/// All ranks of one generation, seen from one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct World {
    /// Number of this world in the job.
    pub generation: Generation,
    /// The rank of the process that has this value.
    pub rank: Rank,
    /// The placement of every rank, by rank.
    pub seats: Vec<RankPlacement>,
}

/// The error of a proposed world.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The rank is not in the world.
    #[error("rank {rank} is not in a world of size {size}")]
    RankOutOfRange {
        /// The rank asked for.
        rank: Rank,
        /// Number of ranks in the world.
        size: usize,
    },
    /// Two registrations claim one task.
    #[error("task registered twice: {task}")]
    DuplicateTask {
        /// The task.
        task: TaskId,
    },
}

impl World {
    /// Returns a world of one rank, for a process without a launcher.
    pub fn single_rank_world(host: HostHash) -> Self {
        let seat = RankPlacement {
            task: TaskId(0),
            host,
            local_rank: LocalRank(0),
            local_size: 1,
            cross_rank: CrossRank(0),
            cross_size: 1,
        };
        Self { generation: Generation(0), rank: Rank(0), seats: vec![seat] }
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.seats.len()
    }

    /// Returns the placement of this process's rank.
    pub fn own_placement(&self) -> &RankPlacement {
        &self.seats[self.rank.index()]
    }

    /// Returns the same world seen from `rank`.
    ///
    /// # Errors
    /// `RankOutOfRange` if the world has no such rank.
    pub fn seen_from(&self, rank: Rank) -> Result<Self, Error> {
        if rank.index() >= self.size() {
            return Err(Error::RankOutOfRange { rank, size: self.size() });
        }
        Ok(Self { rank, ..self.clone() })
    }

    /// Returns the ranks on this process's host, ascending.
    pub fn local_ranks(&self) -> Vec<Rank> {
        self.ranks_on_host(&self.own_placement().host)
    }

    /// Returns the ranks on `host`, ascending.
    pub fn ranks_on_host(&self, host: &HostHash) -> Vec<Rank> {
        (0u32..)
            .map(Rank)
            .zip(&self.seats)
            .filter(|(_, seat)| seat.host == *host)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Returns the hosts in the order of their lowest ranks.
    pub fn host_hashes(&self) -> Vec<HostHash> {
        let mut hosts: Vec<HostHash> = Vec::new();
        for seat in &self.seats {
            if !hosts.contains(&seat.host) {
                hosts.push(seat.host.clone());
            }
        }
        hosts
    }

    /// Returns the number of ranks on this process's machine: on its host, and in other containers
    /// there.
    pub fn machine_rank_count(&self) -> usize {
        let own = self.own_placement().host.machine_name();
        self.seats.iter().filter(|seat| seat.host.machine_name() == own).count()
    }

    /// Returns the machine number of every rank. Machines are numbered in the order of their lowest
    /// ranks.
    pub fn machine_numbers(&self) -> Vec<u32> {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let hosts = self.seats.iter().map(|seat| &seat.host);
        hosts
            .map(|host| {
                let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
                *numbers.entry(host.machine_name()).or_insert(next)
            })
            .collect()
    }

    /// Returns whether every host has the same number of ranks.
    pub fn is_homogeneous(&self) -> bool {
        self.seats.iter().all(|seat| seat.local_size == self.seats[0].local_size)
    }
}
