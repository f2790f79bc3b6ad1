// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The time of an allreduce.

use std::collections::HashMap;
use std::time::Duration;

use farandole_collectives::program::Plan;
use farandole_collectives::{Algorithm, Crossover};
use farandole_config::Config;

use crate::events::{Scene, run};
use crate::{Cluster, Error, Result};

/// Bytes of a partial sum for each byte of `float32`.
const WIDTH: usize = 1;
/// Messages up to which every rank is simulated where one host could stand for all.
const EACH: u64 = 60_000;
/// Messages up to which every rank is simulated.
const MOST: u64 = 3_000_000;

/// An allreduce of `float32` in host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allreduce {
    /// Bytes of the tensor.
    pub bytes: u64,
    /// From the start on all ranks to the end on the last.
    pub time: Duration,
    /// The algorithm; `None` for one rank.
    pub algorithm: Option<Algorithm>,
    /// Bytes that a host sends to others; the mean where they differ.
    pub sent_by_host: u64,
    /// Messages between hosts.
    pub messages: u64,
    /// Whether one host was simulated for all.
    pub folded: bool,
}

impl Allreduce {
    /// Returns the bytes of the tensor per second.
    pub fn rate(&self) -> f64 {
        crate::events::float(self.bytes) / self.time.as_secs_f64().max(1e-12)
    }
}

/// Allreduces on one cluster.
pub struct Collective<'a> {
    cluster: &'a Cluster,
    places: Vec<u32>,
    capacity: usize,
    crossover: Crossover,
    known: HashMap<u64, Allreduce>,
}

impl<'a> Collective<'a> {
    /// With the rings and algorithms that a job with these settings has.
    ///
    /// # Errors
    /// `Cluster`; `Config` when the setting of algorithms cannot be read.
    pub fn new(cluster: &'a Cluster, config: &Config) -> Result<Self> {
        let world = cluster.world()?;
        Ok(Self {
            cluster,
            places: cluster.places(),
            capacity: farandole_session::ring_bytes(&world, config),
            crossover: farandole_session::crossover(config)?,
            known: HashMap::new(),
        })
    }

    /// Returns the cluster.
    pub fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    /// Returns the bytes of a ring between two ranks.
    pub fn ring_bytes(&self) -> usize {
        self.capacity
    }

    /// Returns the schedule of an allreduce.
    ///
    /// # Errors
    /// `Cluster` when rings are too small for it.
    pub fn plan(&self, bytes: u64) -> Result<Plan> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let too_small = || Error::Cluster {
            what: "the bytes of a ring",
            expected: "enough for a chunk",
            value: self.capacity.to_string(),
        };
        Plan::new(&self.places, bytes, WIDTH, self.capacity, &self.crossover).ok_or_else(too_small)
    }

    /// Simulates an allreduce.
    ///
    /// # Errors
    /// `Messages` when there are too many for hosts that are not alike.
    pub fn simulate(&mut self, bytes: u64) -> Result<Allreduce> {
        if let Some(known) = self.known.get(&bytes) {
            return Ok(*known);
        }
        let plan = self.plan(bytes)?;
        let folded = plan.folds() && plan.messages() > EACH;
        let found = if folded {
            self.simulate_one_host(bytes, &plan)
        } else {
            self.simulate_each(bytes, &plan)
        }?;
        self.known.insert(bytes, found);
        Ok(found)
    }

    /// Every rank, message by message.
    ///
    /// # Errors
    /// `Messages`.
    pub fn simulate_each(&self, bytes: u64, plan: &Plan) -> Result<Allreduce> {
        let messages = plan.messages();
        if messages > MOST {
            return Err(Error::Messages { bytes, messages, most: MOST });
        }
        let scene = Scene {
            cluster: self.cluster,
            programs: (0..plan.members()).map(|member| plan.program(member)).collect(),
            places: self.places.clone(),
            slow_from: self.cluster.hosts - self.cluster.stragglers,
            folded: false,
        };
        let outcome = run(&scene)?;
        Ok(Allreduce {
            bytes,
            time: Duration::from_secs_f64(outcome.seconds),
            algorithm: plan.algorithm(),
            sent_by_host: outcome.sent / u64::from(self.cluster.hosts.max(1)),
            messages: outcome.messages,
            folded: false,
        })
    }

    /// One host, which stands for all: the slowest, if there are stragglers.
    ///
    /// # Errors
    /// `Stuck`.
    pub fn simulate_one_host(&self, bytes: u64, plan: &Plan) -> Result<Allreduce> {
        let members = plan.folded_members();
        let scene = Scene {
            cluster: self.cluster,
            programs: (0..members).map(|member| plan.folded(member)).collect(),
            places: vec![0; members],
            slow_from: u32::from(self.cluster.stragglers == 0),
            folded: true,
        };
        let outcome = run(&scene)?;
        Ok(Allreduce {
            bytes,
            time: Duration::from_secs_f64(outcome.seconds),
            algorithm: plan.algorithm(),
            sent_by_host: outcome.sent,
            messages: outcome.messages * u64::from(self.cluster.hosts),
            folded: true,
        })
    }
}
