// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of an allreduce on each member, without their execution: for simulators and for
//! export.
//!
//! A [`Plan`] holds the schedules by which the jobs of this crate run, and writes them down as
//! steps. Sends to one member leave in the order of the steps and are received in that order, as
//! messages on a link are.

use super::doubling::program as doubling;
use super::halving::program as halving;
use super::hierarchy::program as hierarchy;
use super::hosts::Hosts;
use super::message::padded;
use super::pipeline::program as pipeline;
use crate::crossover::Shape;
use crate::{Algorithm, Crossover};

/// Bytes that go from one member to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The other member.
    pub member: u32,
    /// Bytes on the link, padding included.
    pub bytes: u64,
    /// Messages that they are; more than one in a folded program only.
    pub messages: u32,
    /// Whether they are copied between the tensor and the link; a reduction reads and writes links
    /// itself.
    pub copied: bool,
}

/// The action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends.
    Send(Transfer),
    /// Waits for what the other member sends.
    Receive(Transfer),
    /// Reads and writes so many bytes of memory, for a reduction.
    Reduce {
        /// Bytes read and bytes written.
        bytes: u64,
    },
}

/// A step, and where what it comes after is listed.
#[derive(Clone, Copy, Debug)]
struct Step {
    action: Action,
    first: u32,
    count: u32,
}

/// The steps of one member.
#[derive(Clone, Debug, Default)]
pub struct Program {
    steps: Vec<Step>,
    after: Vec<u32>,
}

impl Program {
    /// Returns the steps; each comes after steps before it only.
    pub fn actions(&self) -> impl ExactSizeIterator<Item = Action> + '_ {
        self.steps.iter().map(|step| step.action)
    }

    /// Returns the number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the steps that a step comes after.
    pub fn after(&self, step: usize) -> &[u32] {
        let Some(step) = self.steps.get(step) else { return &[] };
        let first = step.first as usize;
        self.after.get(first..first + step.count as usize).unwrap_or_default()
    }
}

/// Writes a program.
pub(super) struct Builder {
    program: Program,
    /// The last send to each member.
    last: Vec<Option<u32>>,
}

impl Builder {
    pub(super) fn new(members: usize) -> Self {
        Self { program: Program::default(), last: vec![None; members] }
    }

    pub(super) fn reduce(&mut self, bytes: usize, after: &[u32]) -> u32 {
        self.push(Action::Reduce { bytes: bytes as u64 }, after)
    }

    /// Sends `messages` that have `bytes` in all, padding included.
    pub(super) fn send(&mut self, to: usize, load: Load, after: &[u32]) -> u32 {
        self.send_over(to, to, load, after)
    }

    /// As [`send`](Self::send), over one of several links to a member, which each have a number of
    /// their own.
    pub(super) fn send_over(&mut self, link: usize, to: usize, load: Load, after: &[u32]) -> u32 {
        let mut all = after.to_vec();
        all.extend(self.last.get(link).copied().flatten());
        let step = self.push(Action::Send(load.with(to)), &all);
        if self.last.len() <= link {
            self.last.resize(link + 1, None);
        }
        self.last[link] = Some(step);
        step
    }

    pub(super) fn receive(&mut self, from: usize, load: Load, after: &[u32]) -> u32 {
        self.push(Action::Receive(load.with(from)), after)
    }

    /// Brings the inputs of a chunk within a host to the member that carries it. For this member it
    /// returns the steps that receive them, for the others none.
    pub(super) fn gather(&mut self, chunk: &Carried<'_>, member: usize) -> Option<Vec<u32>> {
        if chunk.carrier != member {
            self.send(chunk.carrier, Load::one(chunk.bytes, true), &[]);
            return None;
        }
        let load = Load::one(chunk.bytes, false);
        Some(chunk.hosts.near(member).map(|from| self.receive(from, load, &[])).collect())
    }

    /// Brings the result of a chunk, which these steps make, to the other members of the host of
    /// the one that carries it.
    pub(super) fn hand_out(&mut self, chunk: &Carried<'_>, member: usize, results: &[u32]) {
        let load = Load::one(chunk.bytes, true);
        if chunk.carrier != member {
            self.receive(chunk.carrier, load, &[]);
            return;
        }
        for to in chunk.hosts.near(member) {
            self.send(to, load, results);
        }
    }

    fn push(&mut self, action: Action, after: &[u32]) -> u32 {
        let Program { steps, after: all } = &mut self.program;
        let (step, first) = (index(steps.len()), index(all.len()));
        all.extend_from_slice(after);
        steps.push(Step { action, first, count: index(after.len()) });
        step
    }

    pub(super) fn finish(self) -> Program {
        self.program
    }
}

/// A chunk that one member of a host carries.
pub(super) struct Carried<'a> {
    pub(super) hosts: &'a Hosts,
    pub(super) carrier: usize,
    /// Bytes of elements.
    pub(super) bytes: usize,
}

fn index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The content of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    bytes: usize,
    messages: u32,
    copied: bool,
}

impl Load {
    /// Returns one message with these bytes.
    pub(super) fn one(bytes: usize, copied: bool) -> Self {
        Self { bytes: padded(bytes), messages: u32::from(bytes > 0), copied }
    }

    /// Returns the messages with these bytes, empty ones left out.
    pub(super) fn all(bytes: impl Iterator<Item = usize>, copied: bool) -> Self {
        let add = |sum: Self, bytes: usize| Self {
            bytes: sum.bytes + padded(bytes),
            messages: sum.messages + u32::from(bytes > 0),
            copied,
        };
        bytes.fold(Self { copied, ..Self::default() }, add)
    }

    pub(super) fn copied(self, copied: bool) -> Self {
        Self { copied, ..self }
    }

    pub(super) fn is_empty(self) -> bool {
        self.bytes == 0
    }

    fn with(self, member: usize) -> Transfer {
        let Self { bytes, messages, copied } = self;
        Transfer { member: index(member), bytes: bytes as u64, messages, copied }
    }
}

/// An allreduce among members on hosts.
#[derive(Clone, Debug)]
pub struct Plan {
    hosts: Hosts,
    bytes: usize,
    width: usize,
    way: Way,
}

#[derive(Clone, Debug)]
enum Way {
    Alone,
    Direct,
    Doubling,
    Pipeline(pipeline::Cut),
    Hierarchy(hierarchy::Schedule),
    Halving(halving::Schedule),
}

impl Plan {
    /// Returns an allreduce of `bytes` among members with these host numbers, over rings of
    /// `capacity` bytes. `width` is how many times the bytes of an element a partial sum takes: 1
    /// for `float32`. `None` where the rings are too small.
    pub fn new(
        hosts: &[u32],
        bytes: usize,
        width: usize,
        capacity: usize,
        crossover: &Crossover,
    ) -> Option<Self> {
        let hosts = Hosts::new(hosts, 0);
        let members: usize = hosts.sizes().iter().sum();
        let shape = Shape { members, hosts: hosts.count(), together: hosts.largest() };
        let way = match crossover.choose(shape, bytes, capacity) {
            _ if members < 2 => Way::Alone,
            Algorithm::Direct => Way::Direct,
            Algorithm::Doubling => Way::Doubling,
            Algorithm::Pipeline => Way::Pipeline(pipeline::cut(bytes, members, capacity)?),
            Algorithm::Hierarchy => {
                Way::Hierarchy(hierarchy::Schedule::new(bytes, &hosts, width, capacity)?)
            }
            Algorithm::Halving => {
                Way::Halving(halving::Schedule::new(bytes, &hosts, width, capacity)?)
            }
        };
        Some(Self { hosts, bytes, width, way })
    }

    /// Returns the algorithm; `None` for one member.
    pub fn algorithm(&self) -> Option<Algorithm> {
        match self.way {
            Way::Alone => None,
            Way::Direct => Some(Algorithm::Direct),
            Way::Doubling => Some(Algorithm::Doubling),
            Way::Pipeline(_) => Some(Algorithm::Pipeline),
            Way::Hierarchy(_) => Some(Algorithm::Hierarchy),
            Way::Halving(_) => Some(Algorithm::Halving),
        }
    }

    /// Returns the number of members.
    pub fn members(&self) -> usize {
        self.hosts.sizes().iter().sum()
    }

    /// About how many messages all members send.
    pub fn messages(&self) -> u64 {
        let members = self.members() as u64;
        match &self.way {
            Way::Alone => 0,
            Way::Direct => members * (members - 1),
            Way::Doubling => {
                let hosts = self.hosts.count() as u64;
                2 * members + hosts * (u64::from(hosts.ilog2()) + 2)
            }
            Way::Pipeline(cut) => pipeline::steps(cut) as u64 * members * (members - 1) * 2,
            Way::Hierarchy(schedule) => {
                let hosts = self.hosts.count() as u64;
                schedule.chunks() as u64 * (hosts * (hosts - 1) * 2 + 2 * (members - hosts))
            }
            Way::Halving(schedule) => {
                let hosts = self.hosts.count() as u64;
                schedule.chunks() as u64
                    * (2 * hosts * u64::from(hosts.ilog2()) + 2 * (members - hosts))
            }
        }
    }

    /// Returns the steps of a member.
    pub fn program(&self, member: usize) -> Program {
        match &self.way {
            Way::Alone => Program::default(),
            Way::Direct => direct(self.members(), member, self.bytes),
            Way::Doubling => doubling::program(&self.hosts, member, self.bytes, self.width),
            Way::Pipeline(cut) => pipeline::program(cut, member),
            Way::Hierarchy(schedule) => hierarchy::program(schedule, member, self.width),
            Way::Halving(schedule) => halving::program(schedule, member),
        }
    }

    /// Returns whether all hosts do the same, so that one of them stands for all: see
    /// [`Plan::folded`].
    pub fn folds(&self) -> bool {
        let sizes = self.hosts.sizes();
        let equal = sizes.len() > 1 && sizes.iter().all(|size| *size == sizes[0]);
        match self.way {
            Way::Pipeline(_) => equal && sizes[0] == 1,
            Way::Hierarchy(_) => equal,
            Way::Halving(_) => equal && sizes.len().is_power_of_two(),
            _ => false,
        }
    }

    /// Returns the members of the one host that stands for all.
    pub fn folded_members(&self) -> usize {
        self.hosts.largest()
    }

    /// Returns the steps of a member of the first host, in which transfers to other hosts go to the
    /// member itself, as one transfer for each chunk, or for each of its swaps: its counterparts on
    /// other hosts send the same bytes at the same time.
    pub fn folded(&self, member: usize) -> Program {
        match &self.way {
            Way::Pipeline(cut) => pipeline::folded(cut),
            Way::Hierarchy(schedule) => hierarchy::folded(schedule, member, self.width),
            Way::Halving(schedule) => halving::folded(schedule, member),
            _ => Program::default(),
        }
    }
}

/// See `direct`.
fn direct(members: usize, member: usize, bytes: usize) -> Program {
    let mut builder = Builder::new(members);
    let others = || (1..members).map(move |k| (member + k) % members);
    for to in others() {
        builder.send(to, Load::one(bytes, true), &[]);
    }
    let arrived: Vec<u32> =
        others().map(|from| builder.receive(from, Load::one(bytes, false), &[])).collect();
    builder.reduce((members + 3) * bytes, &arrived);
    builder.finish()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Checks that one member sends another messages of so many bytes, and that the other receives
    /// them, in this order.
    pub(in super::super) fn assert_goes(
        programs: &[Program],
        from: usize,
        to: usize,
        expected: &[u64],
        world: &[u32],
    ) {
        let sent = programs[from].actions().filter_map(|action| match action {
            Action::Send(transfer) if transfer.member as usize == to => Some(transfer.bytes),
            _ => None,
        });
        let received = programs[to].actions().filter_map(|action| match action {
            Action::Receive(transfer) if transfer.member as usize == from => Some(transfer.bytes),
            _ => None,
        });
        assert_eq!(sent.collect::<Vec<_>>(), expected, "{world:?}: {from} to {to}");
        assert_eq!(received.collect::<Vec<_>>(), expected, "{world:?}: {from} to {to}");
    }
}
