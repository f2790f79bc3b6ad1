// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The place of every rank.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{CrossRank, Generation, HostHash, LocalRank, Rank, TaskId};

/// One rank's place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
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
    /// The rank that looks.
    pub rank: Rank,
    /// Every rank's place, by rank.
    pub seats: Vec<Seat>,
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
        /// Ranks in the world.
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
    /// Returns a world of one, for a process without a launcher.
    pub fn alone(host: HostHash) -> Self {
        let seat = Seat {
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

    /// Returns the looking rank's place.
    pub fn seat(&self) -> &Seat {
        &self.seats[self.rank.index()]
    }

    /// Returns the same world seen from `rank`.
    ///
    /// # Errors
    /// `RankOutOfRange` when the world has no such rank.
    pub fn seen_from(&self, rank: Rank) -> Result<Self, Error> {
        if rank.index() >= self.size() {
            return Err(Error::RankOutOfRange { rank, size: self.size() });
        }
        Ok(Self { rank, ..self.clone() })
    }

    /// Returns the ranks on the looking rank's host, ascending.
    pub fn local_ranks(&self) -> Vec<Rank> {
        self.ranks_of(&self.seat().host)
    }

    /// Returns the ranks on `host`, ascending.
    pub fn ranks_of(&self, host: &HostHash) -> Vec<Rank> {
        (0u32..)
            .map(Rank)
            .zip(&self.seats)
            .filter(|(_, seat)| seat.host == *host)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Hosts in the order of their lowest rank.
    pub fn hosts(&self) -> Vec<HostHash> {
        let mut hosts: Vec<HostHash> = Vec::new();
        for seat in &self.seats {
            if !hosts.contains(&seat.host) {
                hosts.push(seat.host.clone());
            }
        }
        hosts
    }

    /// Returns the ranks on the looking rank's machine: on its host, and on other containers there.
    pub fn ranks_of_machine(&self) -> usize {
        let own = self.seat().host.machine();
        self.seats.iter().filter(|seat| seat.host.machine() == own).count()
    }

    /// Returns the machine of every rank, by number, in the order of their lowest ranks.
    pub fn machines(&self) -> Vec<u32> {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let hosts = self.seats.iter().map(|seat| &seat.host);
        hosts
            .map(|host| {
                let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
                *numbers.entry(host.machine()).or_insert(next)
            })
            .collect()
    }

    /// Returns whether every host has the same number of ranks.
    pub fn is_homogeneous(&self) -> bool {
        self.seats.iter().all(|seat| seat.local_size == self.seats[0].local_size)
    }
}
