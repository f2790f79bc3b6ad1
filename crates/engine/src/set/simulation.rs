// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control plane of a large world in one thread, over loopback links. The process sets are the
//! real ones; only the transfers are left out. Deterministic: every round polls the ranks from the
//! last to the first and back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{CollectiveOperation, Communicator, OperationToken};
use farandole_config::Config;
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_negotiation::{
    CollectiveCall, MemorySite, RequestSignature, control_parents, control_peers,
};
use farandole_transport::{Link, loopback};
use farandole_world::{
    Generation, HostHash, ProcessSetId, Rank, TaskId, TaskPlacement, World, assign_ranks,
};

use super::{FinishedRequest, PendingEntry, ProcessSet, ProcessSetContext};
use crate::timeline::OperationTracer;
use crate::{EngineSettings, Error, ProcessSetOptions, RequestHandle, Result, SilentObserver};

/// Capacity of a link in bytes, before it is rounded up to pages.
const LINK_CAPACITY_BYTES: usize = 1 << 12;
/// Number of rounds after which a step counts as stuck.
const MAX_ROUNDS_PER_STEP: usize = 1000;

/// Communicator that completes every operation at once.
struct InstantCommunicator {
    member: usize,
    size: usize,
    submitted: Vec<OperationToken>,
}

impl Communicator for InstantCommunicator {
    fn member_count(&self) -> usize {
        self.size
    }

    fn member_index(&self) -> usize {
        self.member
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        _operation: CollectiveOperation,
    ) -> farandole_collectives::Result<()> {
        self.submitted.push(token);
        Ok(())
    }

    fn make_progress(
        &mut self,
        completed: &mut Vec<OperationToken>,
    ) -> farandole_collectives::Result<bool> {
        completed.append(&mut self.submitted);
        Ok(!completed.is_empty())
    }

    fn pending_count(&self) -> usize {
        self.submitted.len()
    }
}

/// Number of control messages of one step, sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlTraffic {
    /// Messages at rank 0, the coordinator.
    pub coordinator: u64,
    /// Messages at the rank with the most.
    pub busiest: u64,
    /// Messages sent by all ranks.
    pub total: u64,
    /// Number of times that all ranks were polled.
    pub rounds: usize,
}

/// A world of `hosts` times `local` ranks.
pub struct SimulatedControlPlane {
    sets: Vec<ProcessSet>,
    input: HostMemory,
    finished: Vec<FinishedRequest>,
    now: Instant,
}

impl SimulatedControlPlane {
    /// Creates the simulated world.
    ///
    /// # Errors
    /// `Start` if there are too few descriptors or mappings, or no ranks.
    pub fn new(hosts: u32, local: u32) -> Result<Self> {
        let refuse = |reason: String| Error::Start { reason };
        let places: Vec<TaskPlacement> = (0..hosts * local)
            .map(|task| TaskPlacement {
                task: TaskId(task),
                host: HostHash((task / local).to_string()),
            })
            .collect();
        let mut world =
            assign_ranks(Generation(0), &places).map_err(|error| refuse(error.to_string()))?;
        let members: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
        let config =
            Config::read(|_| None, &BTreeMap::new()).map_err(|error| refuse(error.to_string()))?;
        let settings = Arc::new(EngineSettings::from(&config));
        // One shared single-rank world: a full world for each rank would need a seat for every pair
        // of ranks.
        let alone = ProcessSetContext {
            world: Arc::new(World::single_rank_world(HostHash(String::new()))),
            settings,
            devices: Arc::default(),
            observer: Arc::new(SilentObserver),
            tracer: Arc::new(OperationTracer::new(false)),
        };
        let parents = control_parents(&world, &members).0;
        let mut links: Vec<Vec<Link>> = members.iter().map(|_| Vec::new()).collect();
        for (child, parent) in parents.iter().enumerate() {
            if let Some(parent) = *parent {
                let (up, down) = loopback::link_pair(
                    members[child],
                    members[parent as usize],
                    LINK_CAPACITY_BYTES,
                )
                .map_err(|error| refuse(error.to_string()))?;
                links[child].push(up);
                links[parent as usize].push(down);
            }
        }
        let mut sets = Vec::with_capacity(members.len());
        for (member, control) in links.into_iter().enumerate() {
            world.rank = members[member];
            debug_assert_eq!(control.len(), control_peers(&world, &members).len());
            let communicator = Box::new(InstantCommunicator {
                member,
                size: members.len(),
                submitted: Vec::new(),
            });
            let options = ProcessSetOptions {
                id: ProcessSetId::GLOBAL,
                members: members.clone(),
                control,
                communicator,
            };
            let shared = ProcessSetContext { world: Arc::new(world), ..alone.clone() };
            let mut set = ProcessSet::new(0, options, shared)?;
            let shared = std::mem::replace(&mut set.options, alone.clone());
            world = Arc::try_unwrap(shared.world).unwrap_or_else(|shared| (*shared).clone());
            sets.push(set);
        }
        let input = HostMemory::new(4);
        Ok(Self { sets, input, finished: Vec::new(), now: Instant::now() })
    }

    /// Submits this many allreduces on every rank, and returns when all have completed.
    ///
    /// # Errors
    /// `Start` if they do not complete, or if a rank fails.
    pub fn run_allreduce_step(&mut self, tensors: usize) -> Result<ControlTraffic> {
        let failed = |reason: String| Error::Start { reason };
        let before: Vec<u64> = self.sets.iter().map(frame_count).collect();
        let sent: u64 = self.sets.iter().map(|set| set.statistics.frames_sent).sum();
        let names: Vec<Arc<str>> =
            (0..tensors).map(|k| Arc::from(format!("gradient.{k}"))).collect();
        for set in &mut self.sets {
            for name in &names {
                let (entry, signature) = allreduce_request(name, &self.input, self.now);
                set.enqueue_entry(entry, signature, &mut self.finished)
                    .map_err(|cause| failed(cause.to_string()))?;
            }
        }
        let (ranks, mut completed, mut rounds) = (self.sets.len(), 0, 0);
        while completed < ranks * tensors {
            if rounds == MAX_ROUNDS_PER_STEP {
                return Err(failed(format!(
                    "{completed} of {} allreduces completed",
                    ranks * tensors
                )));
            }
            rounds += 1;
            for rank in (0..ranks).rev().chain(0..ranks) {
                self.sets[rank]
                    .poll(self.now, &mut self.finished)
                    .map_err(|cause| failed(cause.to_string()))?;
                completed +=
                    self.finished.iter().filter(|finished| finished.result.is_ok()).count();
                self.finished.clear();
            }
        }
        let traffic: Vec<u64> =
            self.sets.iter().zip(&before).map(|(set, before)| frame_count(set) - before).collect();
        Ok(ControlTraffic {
            coordinator: traffic.first().copied().unwrap_or_default(),
            busiest: traffic.iter().copied().max().unwrap_or_default(),
            total: self.sets.iter().map(|set| set.statistics.frames_sent).sum::<u64>() - sent,
            rounds,
        })
    }

    /// Measures the mean time of a step of this many tensors, with all ranks in this one thread.
    ///
    /// # Errors
    /// Like [`SimulatedControlPlane::run_allreduce_step`].
    pub fn measure_mean_step_time(&mut self, tensors: usize, steps: u32) -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..steps {
            self.run_allreduce_step(tensors)?;
        }
        Ok(start.elapsed() / steps.max(1))
    }
}

fn frame_count(set: &ProcessSet) -> u64 {
    set.statistics.frames_sent + set.statistics.frames_received
}

/// Returns an allreduce as the submission table holds it.
pub(crate) fn allreduce_request(
    name: &Arc<str>,
    input: &HostMemory,
    since: Instant,
) -> (PendingEntry, RequestSignature) {
    let one = 1f64.to_bits();
    let call = CollectiveCall::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one };
    let entry = PendingEntry {
        handle: RequestHandle(1),
        name: Arc::clone(name),
        operation: call.operation_name(),
        change_text: None,
        group: 0,
        rows: Vec::new(),
        input: input.as_buffer(),
        output: Some(input.as_buffer()),
        ready: None,
        since,
        missing: None,
    };
    let signature = RequestSignature {
        call,
        dtype: DataType::F32,
        shape: vec![1],
        site: MemorySite::Host,
        group: 0,
        group_size: 0,
    };
    (entry, signature)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of messages at a rank whose host has `local` ranks, in a world of
    /// `hosts`: one up and one down for every other local rank and for every child host.
    fn expected(hosts: u32, local: u32) -> u64 {
        2 * u64::from(local - 1 + hosts.ilog2())
    }

    #[test]
    fn messages_per_rank_grow_with_the_logarithm_of_the_hosts_up_to_4096_ranks() {
        for (hosts, local) in [(1, 8), (8, 8), (64, 8), (512, 8)] {
            let mut plane = SimulatedControlPlane::new(hosts, local).unwrap();
            for step in 0..2 {
                let traffic = plane.run_allreduce_step(5).unwrap();
                assert_eq!(
                    traffic.coordinator,
                    expected(hosts, local),
                    "{hosts} hosts, step {step}"
                );
                assert_eq!(traffic.busiest, traffic.coordinator);
                assert_eq!(traffic.total, 2 * u64::from(hosts * local - 1));
            }
            assert_eq!(plane.sets[0].statistics.cache_hits, 5);
        }
    }
}
