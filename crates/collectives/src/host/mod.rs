// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The communicator over links: every member has one to every other, of any kind.
//!
//! Links may be of the kind that is opened at its first use. **No deadlock** with those: an
//! operation asks for all links that it uses before it moves anything
//! ([`Job::links`](peers::Job::links)). A link opens when both ends have asked for it, whatever the
//! members do next. Consider the first operation that is not over on all members. All members have
//! begun it, so both ends of each of its links have asked, and the links open. Then the proofs of
//! the algorithms hold.

mod adasum;
mod allgather;
mod alltoall;
mod alone;
mod barrier;
mod broadcast;
mod check;
mod copies;
mod direct;
mod doubling;
mod exchange;
mod greeting;
mod halving;
mod hierarchy;
mod hosts;
mod in_place;
mod message;
mod peers;
mod pipeline;
#[cfg(test)]
mod polled;
mod position;
pub mod program;
mod reducescatter;

use std::collections::VecDeque;

use farandole_transport::{ALIGNMENT, Link, PACKET};
use farandole_world::Rank;

use crate::buffer::Flat;
use crate::kernel::{self, Reducer, Reduction};
use crate::{
    Algorithm, Communicator, Crossover, DataType, Error, Operation, ReduceOp, Result, Segment,
    Token,
};
use peers::{Job, Peers};

/// Parts, chunks and messages are multiples of this: no element is ever cut.
const UNIT: usize = ALIGNMENT;

/// Chunks stay in the second-level cache, and fill packets.
const LARGEST_CHUNK: usize = 4 * PACKET;
/// Below, a chunk costs more in messages than it gains in overlap.
const SMALLEST_CHUNK: usize = 16 << 10;

/// Passes of one call to `progress`, so that a caller can look at its deadline.
const PASSES: usize = 64;

/// Returns the bytes of chunks that are no longer than `longest`, a multiple of the unit, such that
/// all `carriers` get equally many.
fn even_chunk(bytes: usize, longest: usize, carriers: usize) -> usize {
    let carriers = carriers.max(1);
    let rounds = bytes.div_ceil(longest.saturating_mul(carriers)).max(1);
    bytes.div_ceil(rounds * carriers).next_multiple_of(UNIT).max(SMALLEST_CHUNK).min(longest)
}

/// Returns the start of a part of `bytes` that are cut in `parts`. Parts differ by one unit at
/// most; the longer ones come first.
fn start_of(bytes: usize, parts: usize, part: usize) -> usize {
    let units = bytes.div_ceil(UNIT);
    let (each, longer) = (units / parts, units % parts);
    ((each * part + part.min(longer)) * UNIT).min(bytes)
}

/// Runs operations over links, one after the other.
pub struct HostCommunicator {
    peers: Peers,
    crossover: Crossover,
    queue: VecDeque<(Token, Planned)>,
    running: Option<Running>,
    /// The first failure; every later call repeats it.
    failure: Option<Error>,
}

struct Running {
    /// `None` for the greeting.
    token: Option<Token>,
    job: Box<dyn Job>,
    done: bool,
}

/// An operation that passed its checks. Jobs are made when their turn comes: they need the agreed
/// capacity.
enum Planned {
    Allreduce { reducer: Reducer, inputs: Flat, outputs: Flat },
    Adasum { reducer: Reducer, tensors: Vec<usize>, inputs: Flat, outputs: Flat },
    Broadcast { root: usize, inputs: Flat, outputs: Flat },
    Allgather { segments: Vec<Segment>, bytes: Vec<Vec<usize>> },
    Alltoall { segment: Segment, sends: Vec<usize>, receives: Vec<usize> },
    Reducescatter { reducer: Reducer, segments: Vec<Segment>, bytes: Vec<Vec<usize>> },
    Barrier,
}

impl HostCommunicator {
    /// Returns a communicator of `rank` and the peers of `links`, all on one host, members in rank
    /// order. Every member must make its own at the same point of all links' streams; the first
    /// operation begins with a greeting that compares what they made. Links that are opened at
    /// their first use are not greeted over: the others must connect all members.
    ///
    /// # Errors
    /// `Shape` when links do not lead to distinct other ranks, or a ring's size is not a multiple
    /// of `ALIGNMENT`.
    pub fn new(rank: Rank, links: Vec<Link>) -> Result<Self> {
        Ok(Self::of(Peers::new(rank, links, None)?))
    }

    /// Like [`new`](Self::new), on several hosts: `hosts` has a number for every member, in member
    /// order, equal for those that share memory. They should follow each other.
    ///
    /// # Errors
    /// Those of `new`, and `Shape` when there are not as many hosts as members.
    pub fn over(rank: Rank, links: Vec<Link>, hosts: &[u32]) -> Result<Self> {
        Ok(Self::of(Peers::new(rank, links, Some(hosts))?))
    }

    fn of(peers: Peers) -> Self {
        Self {
            peers,
            crossover: Crossover::default(),
            queue: VecDeque::new(),
            running: None,
            failure: None,
        }
        .greeting()
    }

    /// Other algorithms than those of the table; the same on every member.
    #[must_use]
    pub fn with_crossover(self, crossover: Crossover) -> Self {
        Self { crossover, ..self }.greeting()
    }

    fn greeting(mut self) -> Self {
        self.running = (self.peers.size() > 1).then(|| {
            let job = Box::new(greeting::Greeting::new(&self.peers, &self.crossover));
            Running { token: None, job, done: false }
        });
        self
    }

    /// Gives the links back, for another communicator once all members are done with this one.
    pub fn into_links(self) -> Vec<Link> {
        self.peers.links
    }

    fn reducer(
        &self,
        dtype: DataType,
        op: ReduceOp,
        prescale: f64,
        postscale: f64,
    ) -> Result<Reducer> {
        let reduction = Reduction { dtype, op, members: self.peers.size(), prescale, postscale };
        Reducer::ordered(reduction, kernel::Path::best(), self.peers.orders.clone())
    }

    fn step(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        let Some(running) = &mut self.running else {
            let Some((token, planned)) = self.queue.pop_front() else { return Ok(false) };
            let job = planned.start(&mut self.peers, &self.crossover)?;
            if self.peers.on_demand {
                let links = job.links(&self.peers);
                self.peers.ask(&links);
            }
            self.running = Some(Running { token: Some(token), job, done: false });
            return Ok(true);
        };
        let mut any = false;
        if !running.done {
            let moved = running.job.poll(&mut self.peers)?;
            any = moved.any || moved.done;
            running.done = moved.done;
            if !any {
                // Bytes that a socket did not take at once are sent only by a later call, and peers
                // may wait only for these bytes.
                self.peers.flush();
            }
        }
        if running.done && self.peers.flush() {
            completed.extend(running.token);
            self.running = None;
            any = true;
        }
        Ok(any)
    }
}

impl Planned {
    fn start(self, peers: &mut Peers, crossover: &Crossover) -> Result<Box<dyn Job>> {
        Ok(match self {
            Self::Allreduce { reducer, inputs, outputs } if peers.size() == 1 => {
                Box::new(alone::Alone::new(reducer, inputs, outputs))
            }
            Self::Allreduce { reducer, inputs, outputs } => {
                match crossover.choose(peers.shape, inputs.len(), peers.capacity) {
                    Algorithm::Direct => {
                        Box::new(direct::Direct::new(peers, reducer, inputs, outputs))
                    }
                    Algorithm::Doubling => {
                        Box::new(doubling::Doubling::new(peers, reducer, &inputs, outputs))
                    }
                    Algorithm::Pipeline if in_place::is_considered(peers, &outputs) => {
                        Box::new(in_place::InPlace::new(peers, reducer, inputs, outputs))
                    }
                    Algorithm::Pipeline => {
                        Box::new(pipeline::Pipeline::new(peers, reducer, inputs, outputs)?)
                    }
                    Algorithm::Hierarchy => {
                        Box::new(hierarchy::Hierarchy::new(peers, reducer, inputs, outputs)?)
                    }
                    Algorithm::Halving => {
                        Box::new(halving::Halving::new(peers, reducer, inputs, outputs)?)
                    }
                }
            }
            Self::Adasum { reducer, inputs, outputs, .. } if peers.size() == 1 => {
                Box::new(alone::Alone::new(reducer, inputs, outputs))
            }
            Self::Adasum { reducer, tensors, inputs, outputs } => {
                Box::new(adasum::Adasum::new(peers, reducer, &tensors, &inputs, outputs))
            }
            Self::Broadcast { root, inputs, outputs } => {
                Box::new(broadcast::Broadcast::new(peers, root, inputs, outputs))
            }
            Self::Allgather { segments, bytes } => {
                Box::new(allgather::Allgather::new(peers, &segments, &bytes))
            }
            Self::Alltoall { segment, sends, receives } => {
                Box::new(alltoall::Alltoall::new(peers, &segment, &sends, &receives))
            }
            Self::Reducescatter { reducer, segments, .. } if peers.size() == 1 => {
                let (inputs, outputs) = flats(segments);
                Box::new(alone::Alone::new(reducer, inputs, outputs))
            }
            Self::Reducescatter { reducer, segments, bytes }
                if reducescatter::across::pays(peers, crossover, &reducer, &bytes) =>
            {
                Box::new(reducescatter::across::Across::new(peers, reducer, &segments, &bytes))
            }
            Self::Reducescatter { reducer, segments, bytes } => {
                Box::new(reducescatter::Reducescatter::new(peers, reducer, &segments, &bytes))
            }
            Self::Barrier => Box::new(barrier::Barrier::new(peers)),
        })
    }
}

impl Communicator for HostCommunicator {
    fn size(&self) -> usize {
        self.peers.size()
    }

    fn member(&self) -> usize {
        self.peers.member
    }

    fn submit(&mut self, token: Token, operation: Operation) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let planned = match operation {
            Operation::Allreduce { dtype, op, prescale, postscale, segments } => {
                check::allreduce(dtype, &segments)?;
                if op == ReduceOp::Adasum {
                    check::adasum(dtype)?;
                    let tensors = segments.iter().map(|segment| segment.input.len()).collect();
                    // Converts and scales one vector.
                    let alone =
                        Reduction { dtype, op: ReduceOp::Sum, members: 1, prescale, postscale };
                    let (inputs, outputs) = flats(segments);
                    let reducer = Reducer::new(alone)?;
                    self.queue
                        .push_back((token, Planned::Adasum { reducer, tensors, inputs, outputs }));
                    return Ok(());
                }
                let reducer = self.reducer(dtype, op, prescale, postscale)?;
                let (inputs, outputs) = flats(segments);
                Planned::Allreduce { reducer, inputs, outputs }
            }
            Operation::Broadcast { root, segments } => {
                check::broadcast(&self.peers, root, &segments)?;
                let (inputs, outputs) = flats(segments);
                Planned::Broadcast { root, inputs, outputs }
            }
            Operation::Allgather { segments, bytes } => {
                check::allgather(&self.peers, &segments, &bytes)?;
                Planned::Allgather { segments, bytes }
            }
            Operation::Barrier => Planned::Barrier,
            Operation::Alltoall { segment, sends, receives } => {
                check::alltoall(&self.peers, &segment, &sends, &receives)?;
                Planned::Alltoall { segment, sends, receives }
            }
            Operation::Reducescatter { dtype, op, prescale, postscale, segments, bytes } => {
                check::reducescatter(&self.peers, dtype, &segments, &bytes)?;
                let reducer = self.reducer(dtype, op, prescale, postscale)?;
                Planned::Reducescatter { reducer, segments, bytes }
            }
        };
        self.queue.push_back((token, planned));
        Ok(())
    }

    fn progress(&mut self, completed: &mut Vec<Token>) -> Result<bool> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let mut any = false;
        for _ in 0..PASSES {
            match self.step(completed) {
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

    fn abandon(&mut self) {
        let abandoned = || Error::Shape { reason: "the communicator was abandoned".to_owned() };
        self.failure.get_or_insert_with(abandoned);
        self.running = None;
        self.queue.clear();
    }

    fn pending(&self) -> usize {
        self.queue.len()
            + usize::from(self.running.as_ref().is_some_and(|running| running.token.is_some()))
    }
}

fn flats(segments: Vec<Segment>) -> (Flat, Flat) {
    let inputs = Flat::new(segments.iter().map(|segment| segment.input.clone()));
    let outputs = Flat::new(segments.into_iter().map(|segment| segment.output));
    (inputs, outputs)
}
