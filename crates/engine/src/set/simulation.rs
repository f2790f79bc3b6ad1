// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control plane of a large world in one thread, over loopback links: the sets are the real
//! ones, only the transfers are left out. Deterministic: every round polls the ranks from the last
//! to the first and back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::{Communicator, DataType, Memory, Operation, ReduceOp, Token};
use farandole_config::Config;
use farandole_transport::{Link, loopback};
use farandole_world::{Generation, HostHash, ProcessSetId, Rank, TaskId, TaskPlace, World, assign};

use super::{Entry, Finished, ProcessSet, Shared};
use crate::signature::{Call, Signature};
use crate::timeline::Tracer;
use crate::tree::{self, control_peers};
use crate::{Error, Handle, Result, SetOptions, Settings, Silent};

/// Bytes of a link, before pages.
const CAPACITY: usize = 1 << 12;
/// Rounds after which a step is taken to be stuck.
const ROUNDS: usize = 1000;

/// Completes every operation at once.
struct Nothing {
    member: usize,
    size: usize,
    submitted: Vec<Token>,
}

impl Communicator for Nothing {
    fn size(&self) -> usize {
        self.size
    }

    fn member(&self) -> usize {
        self.member
    }

    fn submit(&mut self, token: Token, _operation: Operation) -> farandole_collectives::Result<()> {
        self.submitted.push(token);
        Ok(())
    }

    fn progress(&mut self, completed: &mut Vec<Token>) -> farandole_collectives::Result<bool> {
        completed.append(&mut self.submitted);
        Ok(!completed.is_empty())
    }

    fn pending(&self) -> usize {
        self.submitted.len()
    }
}

/// Control messages of one step, sent and received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// At rank 0, the coordinator.
    pub coordinator: u64,
    /// At the rank that has most.
    pub busiest: u64,
    /// Messages sent by all ranks.
    pub total: u64,
    /// Times all ranks were polled.
    pub rounds: usize,
}

/// A world of `hosts` times `local` ranks.
pub struct ControlPlane {
    sets: Vec<ProcessSet>,
    input: Memory,
    finished: Vec<Finished>,
    now: Instant,
}

impl ControlPlane {
    /// Sets the world up.
    ///
    /// # Errors
    /// `Start` when it cannot be: too few descriptors or mappings, or no rank at all.
    pub fn new(hosts: u32, local: u32) -> Result<Self> {
        let refuse = |reason: String| Error::Start { reason };
        let places: Vec<TaskPlace> = (0..hosts * local)
            .map(|task| TaskPlace {
                task: TaskId(task),
                host: HostHash((task / local).to_string()),
            })
            .collect();
        let mut world =
            assign(Generation(0), &places).map_err(|error| refuse(error.to_string()))?;
        let members: Vec<Rank> = (0u32..).take(world.size()).map(Rank).collect();
        let config =
            Config::read(|_| None, &BTreeMap::new()).map_err(|error| refuse(error.to_string()))?;
        let settings = Arc::new(Settings::from(&config));
        // A world for each rank would be a seat for every pair of ranks.
        let alone = Shared {
            world: Arc::new(World::alone(HostHash(String::new()))),
            settings,
            devices: Arc::default(),
            observer: Arc::new(Silent),
            tracer: Arc::new(Tracer::new(false)),
        };
        let parents = tree::parents(&world, &members).0;
        let mut links: Vec<Vec<Link>> = members.iter().map(|_| Vec::new()).collect();
        for (child, parent) in parents.iter().enumerate() {
            if let Some(parent) = *parent {
                let (up, down) = loopback::pair(members[child], members[parent as usize], CAPACITY)
                    .map_err(|error| refuse(error.to_string()))?;
                links[child].push(up);
                links[parent as usize].push(down);
            }
        }
        let mut sets = Vec::with_capacity(members.len());
        for (member, control) in links.into_iter().enumerate() {
            world.rank = members[member];
            debug_assert_eq!(control.len(), control_peers(&world, &members).len());
            let communicator =
                Box::new(Nothing { member, size: members.len(), submitted: Vec::new() });
            let options = SetOptions {
                id: ProcessSetId::GLOBAL,
                members: members.clone(),
                control,
                communicator,
            };
            let shared = Shared { world: Arc::new(world), ..alone.clone() };
            let mut set = ProcessSet::new(0, options, shared)?;
            let shared = std::mem::replace(&mut set.options, alone.clone());
            world = Arc::try_unwrap(shared.world).unwrap_or_else(|shared| (*shared).clone());
            sets.push(set);
        }
        let input = Memory::new(4);
        Ok(Self { sets, input, finished: Vec::new(), now: Instant::now() })
    }

    /// Every rank submits this many allreduces; returns when all have completed.
    ///
    /// # Errors
    /// `Start` when they do not, or a rank fails.
    pub fn step(&mut self, tensors: usize) -> Result<Traffic> {
        let failed = |reason: String| Error::Start { reason };
        let before: Vec<u64> = self.sets.iter().map(frames).collect();
        let sent: u64 = self.sets.iter().map(|set| set.statistics.frames_sent).sum();
        let names: Vec<Arc<str>> =
            (0..tensors).map(|k| Arc::from(format!("gradient.{k}"))).collect();
        for set in &mut self.sets {
            for name in &names {
                let (entry, signature) = request(name, &self.input, self.now);
                set.enqueue(entry, signature, &mut self.finished)
                    .map_err(|cause| failed(cause.to_string()))?;
            }
        }
        let (ranks, mut completed, mut rounds) = (self.sets.len(), 0, 0);
        while completed < ranks * tensors {
            if rounds == ROUNDS {
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
            self.sets.iter().zip(&before).map(|(set, before)| frames(set) - before).collect();
        Ok(Traffic {
            coordinator: traffic.first().copied().unwrap_or_default(),
            busiest: traffic.iter().copied().max().unwrap_or_default(),
            total: self.sets.iter().map(|set| set.statistics.frames_sent).sum::<u64>() - sent,
            rounds,
        })
    }

    /// Measures a step of this many tensors, with all ranks in this one thread.
    ///
    /// # Errors
    /// Like [`ControlPlane::step`].
    pub fn time(&mut self, tensors: usize, steps: u32) -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..steps {
            self.step(tensors)?;
        }
        Ok(start.elapsed() / steps.max(1))
    }
}

fn frames(set: &ProcessSet) -> u64 {
    set.statistics.frames_sent + set.statistics.frames_received
}

/// An allreduce as it lies on the desk.
pub(crate) fn request(name: &Arc<str>, input: &Memory, since: Instant) -> (Entry, Signature) {
    let one = 1f64.to_bits();
    let call = Call::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one };
    let entry = Entry {
        handle: Handle(1),
        name: Arc::clone(name),
        operation: call.name(),
        matter: None,
        group: 0,
        rows: Vec::new(),
        input: input.buffer(),
        output: Some(input.buffer()),
        ready: None,
        since,
        missing: None,
    };
    let signature = Signature {
        call,
        dtype: DataType::F32,
        shape: vec![1],
        site: crate::signature::Site::Host,
        group: 0,
        group_size: 0,
    };
    (entry, signature)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages at a rank whose host has `local` ranks in a world of `hosts`: one up and one down
    /// for every other local rank, and for every host that hangs under its own.
    fn expected(hosts: u32, local: u32) -> u64 {
        2 * u64::from(local - 1 + hosts.ilog2())
    }

    #[test]
    fn messages_per_rank_grow_with_the_logarithm_of_the_hosts_up_to_4096_ranks() {
        for (hosts, local) in [(1, 8), (8, 8), (64, 8), (512, 8)] {
            let mut plane = ControlPlane::new(hosts, local).unwrap();
            for step in 0..2 {
                let traffic = plane.step(5).unwrap();
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
