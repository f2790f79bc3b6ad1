// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Communicator over links: every member has one link to every other member, of any kind.
//!
//! Some links may open at their first use. **No deadlock** with such links: an operation requests
//! all links that it uses before it moves any byte
//! ([`CollectiveJob::used_links`](peers::CollectiveJob::used_links)). A link opens when both ends
//! have requested it, regardless of the members' next actions. Consider the first operation that is
//! not finished on all members. All members have begun it, so both ends of each of its links have
//! requested the link, and the links open. Then the proofs of the algorithms hold.

mod adasum;
mod allgather;
mod alltoall;
mod barrier;
mod broadcast;
mod chunk_sizes;
mod copy_path;
#[cfg(test)]
mod copy_tests;
mod direct_allreduce;
mod doubling_allreduce;
mod greeting;
mod halving_allreduce;
mod hierarchy_allreduce;
mod in_place_allreduce;
mod latency_measurement;
mod member_exchange;
mod members_by_host;
mod message;
mod message_position;
mod operand_checks;
mod peer_links;
mod pipelined_allreduce;
#[cfg(test)]
mod polled;
mod reducescatter;
pub mod simulation;
mod single_member;

use std::collections::VecDeque;

use farandole_kernels::{
    BlockReducer, DataType, GatherList, InstructionSet, ReduceOp, ReductionSpec,
};
use farandole_transport::Link;
use farandole_world::Rank;

use crate::{
    AllreduceAlgorithm, CollectiveOperation, Communicator, CrossoverTable, Error, OperationToken,
    Result, TensorSegment,
};
use latency_measurement::MeasuringAllreduceJob;
use peer_links::{CollectiveJob, PeerLinks};
use reducescatter::across_hosts::{HostReducescatterJob, is_joining_hosts_faster};
use single_member::SingleMemberAllreduceJob;

/// Most passes in one call of `make_progress`, so that the caller can check its deadline.
const MAX_PASSES_PER_CALL: usize = 64;

/// Communicator that runs operations over links, one after the other.
pub struct HostCommunicator {
    peers: PeerLinks,
    crossover: CrossoverTable,
    queue: VecDeque<(OperationToken, JobStart)>,
    running: Option<RunningOperation>,
    /// First failure, which every later call returns.
    failure: Option<Error>,
}

struct RunningOperation {
    /// Token of the operation; `None` for the greeting.
    token: Option<OperationToken>,
    job: Box<dyn CollectiveJob>,
    done: bool,
}

/// Creates the job of an operation that passed its checks. Called when its turn comes, because a
/// job needs the agreed capacity.
type JobStart =
    Box<dyn FnOnce(&mut PeerLinks, &CrossoverTable) -> Result<Box<dyn CollectiveJob>> + Send>;

impl HostCommunicator {
    /// Returns a communicator of `rank` and the peers of `links`, all on one host, with members in
    /// rank order. Every member must create its communicator at the same point of the streams of
    /// all links. The first operation begins with a greeting that compares the communicators. Links
    /// that open at their first use carry no greeting, so the other links must connect all members.
    ///
    /// # Errors
    /// `Shape` when two links lead to the same rank, a link leads to `rank`, or the size of a ring
    /// is not a multiple of `MESSAGE_ALIGNMENT`.
    pub fn new(rank: Rank, links: Vec<Link>) -> Result<Self> {
        Ok(Self::from_peer_links(PeerLinks::new(rank, links, None)?))
    }

    /// Like [`new`](Self::new), for members on several hosts. `hosts` has a number for every
    /// member, in member order; members with equal numbers share memory. The members of a host
    /// should follow each other.
    ///
    /// # Errors
    /// Errors of `new`, and `Shape` when there are not as many hosts as members.
    pub fn across_hosts(rank: Rank, links: Vec<Link>, hosts: &[u32]) -> Result<Self> {
        Ok(Self::from_peer_links(PeerLinks::new(rank, links, Some(hosts))?))
    }

    fn from_peer_links(peers: PeerLinks) -> Self {
        Self {
            peers,
            crossover: CrossoverTable::default(),
            queue: VecDeque::new(),
            running: None,
            failure: None,
        }
        .start_greeting()
    }

    /// Replaces the crossover table, which selects the algorithms. The table must be the same on
    /// every member.
    #[must_use]
    pub fn with_crossover(self, crossover: CrossoverTable) -> Self {
        // The greeting compares the tables, so it is created again.
        Self { crossover, ..self }.start_greeting()
    }

    fn start_greeting(mut self) -> Self {
        self.running = (self.peers.member_count() > 1).then(|| {
            let job = Box::new(greeting::GreetingJob::new(&self.peers, &self.crossover));
            RunningOperation { token: None, job, done: false }
        });
        self
    }

    fn make_reducer(
        &self,
        dtype: DataType,
        op: ReduceOp,
        prescale: f64,
        postscale: f64,
    ) -> Result<BlockReducer> {
        let reduction =
            ReductionSpec { dtype, op, members: self.peers.member_count(), prescale, postscale };
        let path = InstructionSet::best_available();
        Ok(BlockReducer::with_order(reduction, path, self.peers.orders.clone())?)
    }

    fn advance_queue(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        let Some(running) = &mut self.running else {
            let Some((token, start)) = self.queue.pop_front() else { return Ok(false) };
            let job = start(&mut self.peers, &self.crossover)?;
            // All at once, because links of one operation then open side by side.
            if self.peers.on_demand {
                let links = job.used_links(&self.peers);
                self.peers.request_links(&links);
            }
            self.running = Some(RunningOperation { token: Some(token), job, done: false });
            return Ok(true);
        };
        let mut any = false;
        if !running.done {
            let moved = running.job.poll(&mut self.peers)?;
            any = moved.any || moved.done;
            running.done = moved.done;
            if !any {
                // If a socket did not take all bytes, only a later call sends the rest, and peers
                // may wait only for these bytes.
                self.peers.flush_links();
            }
        }
        // Peers wait for these bytes, and this member may make no further call for a long time.
        if running.done && self.peers.flush_links() {
            completed.extend(running.token);
            self.running = None;
            any = true;
        }
        Ok(any)
    }
}

fn boxed(job: impl CollectiveJob + 'static) -> Result<Box<dyn CollectiveJob>> {
    Ok(Box::new(job))
}

/// Creates the job of an allreduce by the algorithm that the table chooses.
fn start_chosen_allreduce(
    peers: &mut PeerLinks,
    crossover: &CrossoverTable,
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
) -> Result<Box<dyn CollectiveJob>> {
    let (shape, bytes, capacity) = (peers.shape, inputs.len(), peers.capacity);
    if peers.latency.is_none() && crossover.depends_on_latency(shape, bytes, capacity) {
        let crossover = crossover.clone();
        let start = move |peers: &mut PeerLinks| {
            start_chosen_allreduce(peers, &crossover, reducer, inputs, outputs)
        };
        return boxed(MeasuringAllreduceJob::new(peers, start)?);
    }
    let algorithm = crossover.choose_algorithm(shape, bytes, capacity, peers.latency);
    if algorithm == AllreduceAlgorithm::Pipeline
        && in_place_allreduce::is_in_place_candidate(peers, &outputs)
    {
        return boxed(in_place_allreduce::InPlaceAllreduceJob::new(
            peers, reducer, inputs, outputs,
        ));
    }
    start_allreduce(algorithm, peers, reducer, inputs, outputs)
}

/// Creates the job of an allreduce over links.
fn start_allreduce(
    algorithm: AllreduceAlgorithm,
    peers: &mut PeerLinks,
    reducer: BlockReducer,
    inputs: GatherList,
    outputs: GatherList,
) -> Result<Box<dyn CollectiveJob>> {
    match algorithm {
        AllreduceAlgorithm::Direct => {
            boxed(direct_allreduce::DirectAllreduceJob::new(peers, reducer, inputs, outputs))
        }
        AllreduceAlgorithm::Doubling => {
            boxed(doubling_allreduce::DoublingAllreduceJob::new(peers, reducer, &inputs, outputs))
        }
        AllreduceAlgorithm::Pipeline => {
            boxed(pipelined_allreduce::PipelinedAllreduceJob::new(peers, reducer, inputs, outputs)?)
        }
        AllreduceAlgorithm::Hierarchy => boxed(hierarchy_allreduce::HierarchicalAllreduceJob::new(
            peers, reducer, inputs, outputs,
        )?),
        AllreduceAlgorithm::Halving => {
            boxed(halving_allreduce::HalvingAllreduceJob::new(peers, reducer, inputs, outputs)?)
        }
    }
}

impl Communicator for HostCommunicator {
    fn member_count(&self) -> usize {
        self.peers.member_count()
    }

    fn member_index(&self) -> usize {
        self.peers.member
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let alone = self.peers.member_count() == 1;
        let start: JobStart = match operation {
            CollectiveOperation::Allreduce { dtype, op, prescale, postscale, segments } => {
                operand_checks::check_allreduce(dtype, &segments)?;
                let tensors: Vec<usize> =
                    segments.iter().map(|segment| segment.input.len()).collect();
                let (inputs, outputs) = gather_lists(segments);
                let is_adasum = op == ReduceOp::Adasum;
                let reducer = if is_adasum {
                    operand_checks::check_adasum(dtype)?;
                    // This reducer converts and scales one vector.
                    let op = ReduceOp::Sum;
                    BlockReducer::new(ReductionSpec { dtype, op, members: 1, prescale, postscale })?
                } else {
                    self.make_reducer(dtype, op, prescale, postscale)?
                };
                match (alone, is_adasum) {
                    (true, _) => Box::new(move |_, _| {
                        boxed(SingleMemberAllreduceJob::new(reducer, inputs, outputs))
                    }),
                    (_, true) => Box::new(move |peers, _| {
                        boxed(adasum::AdasumJob::new(peers, reducer, &tensors, &inputs, outputs))
                    }),
                    (_, false) => Box::new(move |peers, crossover| {
                        start_chosen_allreduce(peers, crossover, reducer, inputs, outputs)
                    }),
                }
            }
            CollectiveOperation::Broadcast { root, segments } => {
                operand_checks::check_broadcast(&self.peers, root, &segments)?;
                let (inputs, outputs) = gather_lists(segments);
                Box::new(move |peers, _| {
                    boxed(broadcast::BroadcastJob::new(peers, root, inputs, outputs))
                })
            }
            CollectiveOperation::Allgather { segments, bytes } => {
                operand_checks::check_allgather(&self.peers, &segments, &bytes)?;
                Box::new(move |peers, _| {
                    boxed(allgather::AllgatherJob::new(peers, &segments, &bytes))
                })
            }
            CollectiveOperation::Barrier => {
                Box::new(|peers, _| boxed(barrier::BarrierJob::new(peers)))
            }
            CollectiveOperation::Alltoall { segment, sends, receives } => {
                operand_checks::check_alltoall(&self.peers, &segment, &sends, &receives)?;
                Box::new(move |peers, _| {
                    boxed(alltoall::AlltoallJob::new(peers, &segment, &sends, &receives))
                })
            }
            CollectiveOperation::Reducescatter {
                dtype,
                op,
                prescale,
                postscale,
                segments,
                bytes,
            } => {
                operand_checks::check_reducescatter(&self.peers, dtype, &segments, &bytes)?;
                let reducer = self.make_reducer(dtype, op, prescale, postscale)?;
                if alone {
                    let (inputs, outputs) = gather_lists(segments);
                    Box::new(move |_, _| {
                        boxed(SingleMemberAllreduceJob::new(reducer, inputs, outputs))
                    })
                } else {
                    Box::new(move |peers, crossover| {
                        if is_joining_hosts_faster(peers, crossover, &reducer, &bytes) {
                            boxed(HostReducescatterJob::new(peers, reducer, &segments, &bytes))
                        } else {
                            boxed(reducescatter::ReducescatterJob::new(
                                peers, reducer, &segments, &bytes,
                            ))
                        }
                    })
                }
            }
        };
        self.queue.push_back((token, start));
        Ok(())
    }

    fn make_progress(&mut self, completed: &mut Vec<OperationToken>) -> Result<bool> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let mut any = false;
        for _ in 0..MAX_PASSES_PER_CALL {
            match self.advance_queue(completed) {
                Ok(true) => any = true,
                Ok(false) => break,
                Err(error) => {
                    self.failure = Some(error.clone());
                    // Other members may be using the memory of running operations.
                    self.running = None;
                    return Err(error);
                }
            }
        }
        Ok(any)
    }

    fn abandon_operations(&mut self) {
        let abandoned = || Error::Shape { reason: "the communicator was abandoned".to_owned() };
        self.failure.get_or_insert_with(abandoned);
        self.running = None;
        self.queue.clear();
    }

    fn pending_count(&self) -> usize {
        self.queue.len()
            // The greeting is no operation of the caller.
            + usize::from(self.running.as_ref().is_some_and(|running| running.token.is_some()))
    }
}

fn gather_lists(segments: Vec<TensorSegment>) -> (GatherList, GatherList) {
    let inputs = GatherList::new(segments.iter().map(|segment| segment.input.clone()));
    let outputs = GatherList::new(segments.into_iter().map(|segment| segment.output));
    (inputs, outputs)
}
