// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The time of an allreduce.

use std::collections::HashMap;
use std::time::Duration;

use farandole_collectives::simulation::{AllreducePlan, MemberAction, SimulatedAllreduce};
use farandole_collectives::{AllreduceAlgorithm, CrossoverTable};
use farandole_config::Config;

use crate::events::{SimulationInput, SimulationOutcome, run_simulation};
use crate::{Error, Result, SimulatedCluster};

/// Messages up to which every rank is simulated where one host could stand for all.
const MAX_MESSAGES_BEFORE_FOLDING: u64 = 60_000;
/// Messages up to which every rank is simulated.
const MAX_SIMULATED_MESSAGES: u64 = 3_000_000;

/// An allreduce of `float32` in host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllreduceEstimate {
    /// Bytes of the tensor.
    pub bytes: u64,
    /// From the start on all ranks to the end on the last.
    pub time: Duration,
    /// The algorithm; `None` for one rank.
    pub algorithm: Option<AllreduceAlgorithm>,
    /// Bytes that a host sends to others; the mean where they differ, if all were simulated.
    pub sent_by_host: u64,
    /// Messages between hosts.
    pub messages: u64,
    /// Whether one host was simulated for all.
    pub folded: bool,
}

impl AllreduceEstimate {
    /// Returns the bytes of the tensor per second.
    pub fn tensor_bytes_per_second(&self) -> f64 {
        // An allreduce of one rank takes no time.
        crate::events::bytes_to_f64(self.bytes) / self.time.as_secs_f64().max(1e-12)
    }
}

/// Allreduces on one cluster.
pub struct AllreduceSimulator<'a> {
    cluster: &'a SimulatedCluster,
    rank_hosts: Vec<u32>,
    capacity: usize,
    crossover: CrossoverTable,
    known_estimates: HashMap<u64, AllreduceEstimate>,
}

impl<'a> AllreduceSimulator<'a> {
    /// Returns a simulator with the rings and algorithms of a job with these settings.
    ///
    /// # Errors
    /// `Cluster`; `Config` when the setting of algorithms cannot be read.
    pub fn new(cluster: &'a SimulatedCluster, config: &Config) -> Result<Self> {
        let world = cluster.formed_world()?;
        Ok(Self {
            cluster,
            rank_hosts: cluster.rank_hosts(),
            capacity: farandole_session::world_ring_bytes(&world, config),
            crossover: farandole_session::read_crossover_rules(config)?,
            known_estimates: HashMap::new(),
        })
    }

    /// Returns the cluster.
    pub fn cluster(&self) -> &'a SimulatedCluster {
        self.cluster
    }

    /// Returns the bytes of a ring between two ranks.
    pub fn shared_memory_ring_bytes(&self) -> usize {
        self.capacity
    }

    /// Returns the schedule of an allreduce.
    ///
    /// # Errors
    /// `Cluster` when rings are too small for it.
    pub fn allreduce_plan(&self, bytes: u64) -> Result<AllreducePlan> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let too_small = || Error::Cluster {
            what: "the bytes of a ring",
            expected: "enough for a chunk",
            value: self.capacity.to_string(),
        };
        let latency = self.cluster.latency;
        AllreducePlan::new(&self.rank_hosts, bytes, self.capacity, &self.crossover, latency)
            .ok_or_else(too_small)
    }

    /// Simulates an allreduce.
    ///
    /// # Errors
    /// `Messages` when there are too many for hosts that are not alike.
    pub fn simulate(&mut self, bytes: u64) -> Result<AllreduceEstimate> {
        // The steps of a model repeat the same sizes.
        if let Some(known) = self.known_estimates.get(&bytes) {
            return Ok(*known);
        }
        let plan = self.allreduce_plan(bytes)?;
        let folded =
            plan.has_equivalent_hosts() && plan.message_count() > MAX_MESSAGES_BEFORE_FOLDING;
        let found = if folded {
            self.simulate_one_host(bytes, &plan)
        } else {
            self.simulate_every_rank(bytes, &plan)
        }?;
        self.known_estimates.insert(bytes, found);
        Ok(found)
    }

    /// Simulates every rank, message by message.
    ///
    /// # Errors
    /// `Messages`.
    pub fn simulate_every_rank(
        &self,
        bytes: u64,
        plan: &AllreducePlan,
    ) -> Result<AllreduceEstimate> {
        let messages = plan.message_count();
        if messages > MAX_SIMULATED_MESSAGES {
            return Err(Error::Messages { bytes, messages, most: MAX_SIMULATED_MESSAGES });
        }
        let outcome = self.run(plan.start_on_all_members()?, false, |_, _| {})?;
        Ok(AllreduceEstimate {
            bytes,
            time: Duration::from_secs_f64(outcome.seconds),
            algorithm: plan.chosen_algorithm(),
            sent_by_host: outcome.sent / u64::from(self.cluster.hosts.max(1)),
            messages: outcome.messages,
            folded: false,
        })
    }

    /// Simulates the last host, which stands for all: a slow one, if there are stragglers.
    ///
    /// # Errors
    /// `Stuck`.
    pub fn simulate_one_host(&self, bytes: u64, plan: &AllreducePlan) -> Result<AllreduceEstimate> {
        let outcome = self.run(plan.start_on_last_host()?, true, |_, _| {})?;
        Ok(AllreduceEstimate {
            bytes,
            time: Duration::from_secs_f64(outcome.seconds),
            algorithm: plan.chosen_algorithm(),
            sent_by_host: outcome.sent,
            // All hosts of a plan that can be folded send equally many messages.
            messages: outcome.messages * u64::from(self.cluster.hosts),
            folded: true,
        })
    }

    /// Returns the actions of every rank, in the order in which it takes them on this cluster.
    pub(crate) fn record_actions_of_every_rank(
        &self,
        plan: &AllreducePlan,
    ) -> Result<Vec<Vec<MemberAction>>> {
        let mut actions = vec![Vec::new(); plan.member_count()];
        self.run(plan.start_on_all_members()?, false, |rank, polled| {
            actions[rank as usize].extend_from_slice(polled);
        })?;
        Ok(actions)
    }

    fn run(
        &self,
        allreduce: SimulatedAllreduce,
        folded: bool,
        see: impl FnMut(u32, &[MemberAction]),
    ) -> Result<SimulationOutcome> {
        let (cluster, rank_hosts) = (self.cluster, &self.rank_hosts[..]);
        run_simulation(&mut SimulationInput { cluster, allreduce, rank_hosts, folded }, see)
    }
}
