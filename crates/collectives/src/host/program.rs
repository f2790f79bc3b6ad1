// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Steps of an allreduce on each member, without their execution: for simulators and for export.
//!
//! An [`AllreducePlan`] holds the schedules that the jobs of this crate use, and writes them as
//! steps. Sends to one member are in the order of the steps, and the member receives them in this
//! order, like messages on a link.

use super::doubling::program as doubling;
use super::halving::program as halving;
use super::hierarchy::program as hierarchy;
use super::hosts::MembersByHost;
use super::message::padded_bytes;
use super::pipeline::program as pipeline;
use crate::crossover::GroupShape;
use crate::{AllreduceAlgorithm, CrossoverTable};

/// Bytes that one member sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramTransfer {
    /// The other member.
    pub member: u32,
    /// Number of bytes on the link, padding included.
    pub bytes: u64,
    /// Number of messages; more than one only in a folded program.
    pub messages: u32,
    /// Whether the bytes are copied between the tensor and the link. A reduction reads and writes
    /// links directly.
    pub copied: bool,
}

/// Action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramAction {
    /// Sends bytes to the other member.
    Send(ProgramTransfer),
    /// Waits for the bytes that the other member sends.
    Receive(ProgramTransfer),
    /// Reads and writes memory for a reduction.
    Reduce {
        /// Sum of the bytes read and written.
        bytes: u64,
    },
}

/// A step, and the range of its dependencies in `CollectiveProgram::dependencies`.
#[derive(Clone, Copy, Debug)]
struct ProgramStep {
    action: ProgramAction,
    first_dependency: u32,
    dependency_count: u32,
}

/// Steps of one member.
#[derive(Clone, Debug, Default)]
pub struct CollectiveProgram {
    steps: Vec<ProgramStep>,
    dependencies: Vec<u32>,
}

impl CollectiveProgram {
    /// Returns the actions of the steps. A step depends only on steps before it.
    pub fn actions(&self) -> impl ExactSizeIterator<Item = ProgramAction> + '_ {
        self.steps.iter().map(|step| step.action)
    }

    /// Returns the number of steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns whether the program has no steps.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the steps on which a step depends.
    pub fn dependencies_of(&self, step: usize) -> &[u32] {
        let Some(step) = self.steps.get(step) else { return &[] };
        let first = step.first_dependency as usize;
        self.dependencies.get(first..first + step.dependency_count as usize).unwrap_or_default()
    }
}

/// Builder of a program.
pub(super) struct ProgramBuilder {
    program: CollectiveProgram,
    /// Last send on each link.
    last: Vec<Option<u32>>,
}

impl ProgramBuilder {
    pub(super) fn new(members: usize) -> Self {
        Self { program: CollectiveProgram::default(), last: vec![None; members] }
    }

    pub(super) fn add_reduction(&mut self, bytes: usize, after: &[u32]) -> u32 {
        self.push_step(ProgramAction::Reduce { bytes: bytes as u64 }, after)
    }

    /// Adds a send of `load` to member `to`. The send follows the previous send to this member.
    pub(super) fn add_send(&mut self, to: usize, load: TransferLoad, after: &[u32]) -> u32 {
        self.add_send_over_link(to, to, load, after)
    }

    /// Adds a send like [`add_send`](Self::add_send), over one of several links to a member; each
    /// of these links has a distinct number.
    pub(super) fn add_send_over_link(
        &mut self,
        link: usize,
        to: usize,
        load: TransferLoad,
        after: &[u32],
    ) -> u32 {
        let mut all = after.to_vec();
        all.extend(self.last.get(link).copied().flatten());
        let step = self.push_step(ProgramAction::Send(load.into_transfer(to)), &all);
        if self.last.len() <= link {
            self.last.resize(link + 1, None);
        }
        self.last[link] = Some(step);
        step
    }

    pub(super) fn add_receive(&mut self, from: usize, load: TransferLoad, after: &[u32]) -> u32 {
        self.push_step(ProgramAction::Receive(load.into_transfer(from)), after)
    }

    /// Adds the steps that bring the inputs of a chunk to the member that carries it, within a
    /// host. Returns the receiving steps if `member` is the carrier, otherwise `None`.
    pub(super) fn add_input_gather_steps(
        &mut self,
        chunk: &CarriedChunk<'_>,
        member: usize,
    ) -> Option<Vec<u32>> {
        if chunk.carrier != member {
            self.add_send(chunk.carrier, TransferLoad::load_of_one_message(chunk.bytes, true), &[]);
            return None;
        }
        let load = TransferLoad::load_of_one_message(chunk.bytes, false);
        Some(
            chunk.hosts.local_peers(member).map(|from| self.add_receive(from, load, &[])).collect(),
        )
    }

    /// Adds the steps that bring the result of a chunk, which the steps `results` compute, from its
    /// carrier to the other members on the host of the carrier.
    pub(super) fn add_result_distribution_steps(
        &mut self,
        chunk: &CarriedChunk<'_>,
        member: usize,
        results: &[u32],
    ) {
        let load = TransferLoad::load_of_one_message(chunk.bytes, true);
        if chunk.carrier != member {
            self.add_receive(chunk.carrier, load, &[]);
            return;
        }
        for to in chunk.hosts.local_peers(member) {
            self.add_send(to, load, results);
        }
    }

    fn push_step(&mut self, action: ProgramAction, after: &[u32]) -> u32 {
        let CollectiveProgram { steps, dependencies: all } = &mut self.program;
        let (step, first) = (saturating_index(steps.len()), saturating_index(all.len()));
        all.extend_from_slice(after);
        steps.push(ProgramStep {
            action,
            first_dependency: first,
            dependency_count: saturating_index(after.len()),
        });
        step
    }

    pub(super) fn into_program(self) -> CollectiveProgram {
        self.program
    }
}

/// Chunk that one member of a host carries.
pub(super) struct CarriedChunk<'a> {
    pub(super) hosts: &'a MembersByHost,
    pub(super) carrier: usize,
    /// Bytes of elements.
    pub(super) bytes: usize,
}

fn saturating_index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Content of a transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransferLoad {
    bytes: usize,
    messages: u32,
    copied: bool,
}

impl TransferLoad {
    /// Returns the load of one message of `bytes` bytes.
    pub(super) fn load_of_one_message(bytes: usize, copied: bool) -> Self {
        Self { bytes: padded_bytes(bytes), messages: u32::from(bytes > 0), copied }
    }

    /// Returns the load of messages of these lengths, without the empty ones.
    pub(super) fn all_messages(bytes: impl Iterator<Item = usize>, copied: bool) -> Self {
        let add = |sum: Self, bytes: usize| Self {
            bytes: sum.bytes + padded_bytes(bytes),
            messages: sum.messages + u32::from(bytes > 0),
            copied,
        };
        bytes.fold(Self { copied, ..Self::default() }, add)
    }

    pub(super) fn with_copied_flag(self, copied: bool) -> Self {
        Self { copied, ..self }
    }

    pub(super) fn is_empty(self) -> bool {
        self.bytes == 0
    }

    fn into_transfer(self, member: usize) -> ProgramTransfer {
        let Self { bytes, messages, copied } = self;
        ProgramTransfer { member: saturating_index(member), bytes: bytes as u64, messages, copied }
    }
}

/// Plan of an allreduce among members on hosts.
#[derive(Clone, Debug)]
pub struct AllreducePlan {
    hosts: MembersByHost,
    bytes: usize,
    width: usize,
    algorithm: PlannedAlgorithm,
}

#[derive(Clone, Debug)]
enum PlannedAlgorithm {
    SingleMember,
    Direct,
    Doubling,
    Pipeline(pipeline::PipelineSchedule),
    Hierarchy(hierarchy::HierarchySchedule),
    Halving(halving::HalvingSchedule),
}

impl AllreducePlan {
    /// Returns the plan of an allreduce of `bytes` among members with these host numbers, over
    /// rings of `capacity` bytes. `width` is the size of a partial sum as a multiple of the size of
    /// an element: 1 for `float32`. Returns `None` if the rings are too small.
    pub fn new(
        hosts: &[u32],
        bytes: usize,
        width: usize,
        capacity: usize,
        crossover: &CrossoverTable,
    ) -> Option<Self> {
        let hosts = MembersByHost::new(hosts, 0);
        let members: usize = hosts.host_sizes().iter().sum();
        let shape = GroupShape {
            members,
            hosts: hosts.host_count(),
            largest_host_size: hosts.largest_host_size(),
        };
        let algorithm = match crossover.choose_algorithm(shape, bytes, capacity) {
            _ if members < 2 => PlannedAlgorithm::SingleMember,
            AllreduceAlgorithm::Direct => PlannedAlgorithm::Direct,
            AllreduceAlgorithm::Doubling => PlannedAlgorithm::Doubling,
            AllreduceAlgorithm::Pipeline => {
                PlannedAlgorithm::Pipeline(pipeline::plan_schedule(bytes, members, capacity)?)
            }
            AllreduceAlgorithm::Hierarchy => PlannedAlgorithm::Hierarchy(
                hierarchy::HierarchySchedule::new(bytes, &hosts, width, capacity)?,
            ),
            AllreduceAlgorithm::Halving => PlannedAlgorithm::Halving(
                halving::HalvingSchedule::new(bytes, &hosts, width, capacity)?,
            ),
        };
        Some(Self { hosts, bytes, width, algorithm })
    }

    /// Returns the algorithm; `None` for a single member.
    pub fn chosen_algorithm(&self) -> Option<AllreduceAlgorithm> {
        match self.algorithm {
            PlannedAlgorithm::SingleMember => None,
            PlannedAlgorithm::Direct => Some(AllreduceAlgorithm::Direct),
            PlannedAlgorithm::Doubling => Some(AllreduceAlgorithm::Doubling),
            PlannedAlgorithm::Pipeline(_) => Some(AllreduceAlgorithm::Pipeline),
            PlannedAlgorithm::Hierarchy(_) => Some(AllreduceAlgorithm::Hierarchy),
            PlannedAlgorithm::Halving(_) => Some(AllreduceAlgorithm::Halving),
        }
    }

    /// Returns the number of members.
    pub fn member_count(&self) -> usize {
        self.hosts.host_sizes().iter().sum()
    }

    /// Returns the approximate number of messages that all members send.
    pub fn message_count(&self) -> u64 {
        let members = self.member_count() as u64;
        match &self.algorithm {
            PlannedAlgorithm::SingleMember => 0,
            PlannedAlgorithm::Direct => members * (members - 1),
            PlannedAlgorithm::Doubling => {
                let hosts = self.hosts.host_count() as u64;
                2 * members + hosts * (u64::from(hosts.ilog2()) + 2)
            }
            PlannedAlgorithm::Pipeline(cut) => {
                pipeline::chunks_per_part(cut) as u64 * members * (members - 1) * 2
            }
            PlannedAlgorithm::Hierarchy(schedule) => {
                let hosts = self.hosts.host_count() as u64;
                schedule.chunk_count() as u64 * (hosts * (hosts - 1) * 2 + 2 * (members - hosts))
            }
            PlannedAlgorithm::Halving(schedule) => {
                let hosts = self.hosts.host_count() as u64;
                schedule.chunk_count() as u64
                    * (2 * hosts * u64::from(hosts.ilog2()) + 2 * (members - hosts))
            }
        }
    }

    /// Returns the steps of a member.
    pub fn member_program(&self, member: usize) -> CollectiveProgram {
        match &self.algorithm {
            PlannedAlgorithm::SingleMember => CollectiveProgram::default(),
            PlannedAlgorithm::Direct => direct_program(self.member_count(), member, self.bytes),
            PlannedAlgorithm::Doubling => {
                doubling::member_program(&self.hosts, member, self.bytes, self.width)
            }
            PlannedAlgorithm::Pipeline(cut) => pipeline::member_program(cut, member),
            PlannedAlgorithm::Hierarchy(schedule) => {
                hierarchy::member_program(schedule, member, self.width)
            }
            PlannedAlgorithm::Halving(schedule) => halving::member_program(schedule, member),
        }
    }

    /// Returns whether all hosts do the same, so that one host can represent all: see
    /// [`AllreducePlan::folded_program`].
    pub fn is_foldable(&self) -> bool {
        let sizes = self.hosts.host_sizes();
        let equal = sizes.len() > 1 && sizes.iter().all(|size| *size == sizes[0]);
        match self.algorithm {
            PlannedAlgorithm::Pipeline(_) => equal && sizes[0] == 1,
            PlannedAlgorithm::Hierarchy(_) => equal,
            // Otherwise the hosts of pairs do more than the others.
            PlannedAlgorithm::Halving(_) => equal && sizes.len().is_power_of_two(),
            _ => false,
        }
    }

    /// Returns the number of members on the host that represents all hosts.
    pub fn folded_member_count(&self) -> usize {
        self.hosts.largest_host_size()
    }

    /// Returns the steps of a member of the first host, which represents all hosts. Transfers to
    /// other hosts go to the member itself, one transfer for each chunk or for each swap of a
    /// chunk, because the counterparts of the member on other hosts send the same bytes at the same
    /// time.
    pub fn folded_program(&self, member: usize) -> CollectiveProgram {
        match &self.algorithm {
            PlannedAlgorithm::Pipeline(cut) => pipeline::folded_program(cut),
            PlannedAlgorithm::Hierarchy(schedule) => {
                hierarchy::folded_program(schedule, member, self.width)
            }
            PlannedAlgorithm::Halving(schedule) => halving::folded_program(schedule, member),
            _ => CollectiveProgram::default(),
        }
    }
}

/// Returns the steps of a member in the algorithm of module `direct`.
fn direct_program(members: usize, member: usize, bytes: usize) -> CollectiveProgram {
    let mut builder = ProgramBuilder::new(members);
    let others = || (1..members).map(move |k| (member + k) % members);
    for to in others() {
        builder.add_send(to, TransferLoad::load_of_one_message(bytes, true), &[]);
    }
    let arrived: Vec<u32> = others()
        .map(|from| builder.add_receive(from, TransferLoad::load_of_one_message(bytes, false), &[]))
        .collect();
    // Reads the inputs of all members and writes the result, which is then copied to the output.
    builder.add_reduction((members + 3) * bytes, &arrived);
    builder.into_program()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Checks that `from` sends messages of the expected lengths to `to`, and that `to` receives
    /// them in this order.
    pub(in super::super) fn assert_messages_match(
        programs: &[CollectiveProgram],
        from: usize,
        to: usize,
        expected: &[u64],
        world: &[u32],
    ) {
        let sent = programs[from].actions().filter_map(|action| match action {
            ProgramAction::Send(transfer) if transfer.member as usize == to => Some(transfer.bytes),
            _ => None,
        });
        let received = programs[to].actions().filter_map(|action| match action {
            ProgramAction::Receive(transfer) if transfer.member as usize == from => {
                Some(transfer.bytes)
            }
            _ => None,
        });
        assert_eq!(sent.collect::<Vec<_>>(), expected, "{world:?}: {from} to {to}");
        assert_eq!(received.collect::<Vec<_>>(), expected, "{world:?}: {from} to {to}");
    }
}
