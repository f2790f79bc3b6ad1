// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduces without bytes, for simulators and for export.
//!
//! A [`SimulatedAllreduce`] polls the jobs that run in a real world. Tensors have lengths and no
//! memory. Links always have room, and they have as many bytes as the simulator says have arrived.
//! Nothing is copied or reduced; links and jobs record what a real member would do:
//!
//! ```text
//! simulator ── deliver_bytes ──> links ──> job of a member ──> links, reductions ── MemberAction ──> simulator
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use farandole_kernels::{
    BlockReducer, Buffer, DataType, GatherList, InstructionSet, ReduceOp, ReductionSpec,
};
use farandole_transport::{Link, LinkKind, LinkReceiver, LinkSender, Result as TransportResult};
use farandole_world::Rank;

use super::chunk_sizes::MAX_CHUNK_BYTES;
use super::halving_allreduce::HalvingSchedule;
use super::hierarchy_allreduce::HierarchySchedule;
use super::members_by_host::MembersByHost;
use super::message::padded_bytes;
use super::peer_links::{CollectiveJob, PeerLinks, ReductionRecorder, ReusedBlocksAndCaches};
use super::pipelined_allreduce::PipelineSchedule;
use super::start_allreduce;
use crate::crossover::GroupHostLayout;
use crate::{AllreduceAlgorithm, CrossoverTable, Result};

/// Size of a partial sum of `float32` as a multiple of the size of an element.
const PARTIAL_SUM_WIDTH: usize = 1;

/// Bytes that a member moves between itself and the link to another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberTransfer {
    /// The other member.
    pub member: u32,
    /// Number of bytes on the link, padding included.
    pub bytes: u64,
    /// Whether the bytes are copied between the tensor and the link. A reduction reads and writes
    /// links directly.
    pub copied: bool,
}

/// Action of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberAction {
    /// Sends bytes to the other member.
    Send(MemberTransfer),
    /// Takes bytes of the other member, which have arrived.
    Receive(MemberTransfer),
    /// Reads and writes memory for a reduction.
    Reduce {
        /// Sum of the bytes read and written.
        bytes: u64,
    },
}

/// Plan of an allreduce of `float32` among members on hosts.
#[derive(Clone, Debug)]
pub struct AllreducePlan {
    host_numbers: Vec<u32>,
    hosts: MembersByHost,
    bytes: usize,
    capacity: usize,
    /// Algorithm, and the approximate number of messages; `None` for a single member.
    algorithm: Option<(AllreduceAlgorithm, u64)>,
}

impl AllreducePlan {
    /// Returns the plan of an allreduce of `bytes` among members with these host numbers, over
    /// rings of `capacity` bytes, with a `latency` between hosts. Returns `None` if the rings are
    /// too small.
    pub fn new(
        host_numbers: &[u32],
        bytes: usize,
        capacity: usize,
        crossover: &CrossoverTable,
        latency: Duration,
    ) -> Option<Self> {
        let hosts = MembersByHost::new(host_numbers, 0);
        let (members, host_count) = (host_numbers.len(), hosts.host_count());
        let shape = GroupHostLayout {
            members,
            hosts: host_count,
            largest_host_size: hosts.largest_host_size(),
        };
        let algorithm = if members < 2 {
            None
        } else {
            let algorithm = crossover.choose_algorithm(shape, bytes, capacity, Some(latency));
            let doublings = host_count.ilog2() as usize;
            let within_hosts = 2 * (members - host_count);
            let messages = match algorithm {
                AllreduceAlgorithm::Direct => members * (members - 1),
                AllreduceAlgorithm::Doubling => 2 * members + host_count * (doublings + 2),
                AllreduceAlgorithm::Pipeline => {
                    let schedule = PipelineSchedule::new(bytes, members, capacity)?;
                    schedule.chunks_per_part() * members * (members - 1) * 2
                }
                AllreduceAlgorithm::Hierarchy => {
                    let schedule =
                        HierarchySchedule::new(bytes, &hosts, PARTIAL_SUM_WIDTH, capacity)?;
                    schedule.chunk_count() * (host_count * (host_count - 1) * 2 + within_hosts)
                }
                AllreduceAlgorithm::Halving => {
                    let schedule =
                        HalvingSchedule::new(bytes, &hosts, PARTIAL_SUM_WIDTH, capacity)?;
                    schedule.chunk_count() * (2 * host_count * doublings + within_hosts)
                }
            };
            Some((algorithm, messages as u64))
        };
        Some(Self { host_numbers: host_numbers.to_vec(), hosts, bytes, capacity, algorithm })
    }

    /// Returns the algorithm; `None` for a single member.
    pub fn chosen_algorithm(&self) -> Option<AllreduceAlgorithm> {
        self.algorithm.map(|(algorithm, _)| algorithm)
    }

    /// Returns the approximate number of messages that all members send.
    pub fn message_count(&self) -> u64 {
        self.algorithm.map_or(0, |(_, messages)| messages)
    }

    /// Returns the number of members.
    pub fn member_count(&self) -> usize {
        self.host_numbers.len()
    }

    /// Returns whether all hosts do the same, so that one host can represent all: see
    /// [`AllreducePlan::start_on_last_host`].
    pub fn has_equivalent_hosts(&self) -> bool {
        let sizes = self.hosts.host_sizes();
        let equal = sizes.len() > 1 && sizes.iter().all(|size| *size == sizes[0]);
        match self.chosen_algorithm() {
            Some(AllreduceAlgorithm::Pipeline) => equal && sizes[0] == 1,
            Some(AllreduceAlgorithm::Hierarchy) => equal,
            // Otherwise the hosts of pairs do more than the others.
            Some(AllreduceAlgorithm::Halving) => equal && sizes.len().is_power_of_two(),
            _ => false,
        }
    }

    /// Starts the allreduce on all members.
    ///
    /// # Errors
    /// `Shape` when rings are too small.
    pub fn start_on_all_members(&self) -> Result<SimulatedAllreduce> {
        SimulatedAllreduce::start(self, 0..self.member_count())
    }

    /// Starts the allreduce on the members of the last host, which represents all hosts: what one
    /// of its members sends to a member of another host, it also gets from there. The last host
    /// never waits for more than that, because its parts are the shortest: of each chunk it sends
    /// longer partials than it gets, before it sends shorter results.
    ///
    /// # Errors
    /// `Shape` when rings are too small.
    pub fn start_on_last_host(&self) -> Result<SimulatedAllreduce> {
        let members = self.hosts.host_members(self.hosts.host_count() - 1);
        SimulatedAllreduce::start(self, members)
    }
}

/// Jobs of an allreduce on all members or on those of one host.
pub struct SimulatedAllreduce {
    /// Links of the polled member.
    peers: PeerLinks,
    records: SharedSimulationRecords,
    first_member: usize,
    members: Vec<SimulatedMember>,
}

/// State of a member while others are polled.
struct SimulatedMember {
    hosts: MembersByHost,
    scratch: ReusedBlocksAndCaches,
    /// `None` when the allreduce is done.
    job: Option<Box<dyn CollectiveJob>>,
}

impl SimulatedAllreduce {
    fn start(plan: &AllreducePlan, members: Range<usize>) -> Result<Self> {
        let records = SharedSimulationRecords::default();
        let others = plan.member_count() - 1;
        let longest_window = padded_bytes(plan.bytes).min(plan.capacity).min(MAX_CHUNK_BYTES);
        let zeros: Arc<[u8]> = vec![0; longest_window].into();
        let links = (0..others).map(|link| {
            let end = || SimulatedLinkEnd {
                link,
                records: records.clone(),
                zeros: Arc::clone(&zeros),
                window: Vec::new(),
            };
            Link {
                peer: Rank(saturating_index(link)),
                kind: LinkKind::Loopback,
                capacity: plan.capacity,
                sender: Box::new(end()),
                receiver: Box::new(end()),
            }
        });
        // The last rank has all links to lower ranks, so ranks and members have the same numbers.
        let rank = Rank(saturating_index(others));
        let mut peers = PeerLinks::new(rank, links.collect(), Some(&plan.host_numbers))?;
        let recorded = records.clone();
        peers.reductions =
            ReductionRecorder::new(move |bytes| recorded.lock().record_reduction(bytes));
        let mut allreduce =
            Self { peers, records, first_member: members.start, members: Vec::new() };
        let (dtype, op, size) = (DataType::F32, ReduceOp::Sum, plan.member_count());
        let reduction = ReductionSpec { dtype, op, members: size, prescale: 1.0, postscale: 1.0 };
        let tensor = || GatherList::new([Buffer::without_memory(plan.bytes)]);
        for member in members {
            let state = SimulatedMember {
                hosts: MembersByHost::new(&plan.host_numbers, member),
                scratch: ReusedBlocksAndCaches::default(),
                job: None,
            };
            allreduce.members.push(state);
            let Some(algorithm) = plan.chosen_algorithm() else { continue };
            allreduce.swap_in_member_state(member);
            let peers = &mut allreduce.peers;
            let orders = peers.orders.clone();
            let reducer =
                BlockReducer::with_order(reduction, InstructionSet::best_available(), orders)?;
            let job = start_allreduce(algorithm, peers, reducer, tensor(), tensor())?;
            allreduce.swap_in_member_state(member);
            allreduce.members[member - allreduce.first_member].job = Some(job);
        }
        Ok(allreduce)
    }

    /// Exchanges the state of a member with that of the links.
    fn swap_in_member_state(&mut self, member: usize) {
        let state = &mut self.members[member - self.first_member];
        std::mem::swap(&mut self.peers.hosts, &mut state.hosts);
        std::mem::swap(&mut self.peers.scratch, &mut state.scratch);
        self.peers.member = member;
        self.records.lock().member = member;
    }

    /// Returns the numbers of the simulated members.
    pub fn members(&self) -> Range<usize> {
        self.first_member..self.first_member + self.members.len()
    }

    /// Returns the number of members that are not done.
    pub fn pending_count(&self) -> usize {
        self.members.iter().filter(|member| member.job.is_some()).count()
    }

    /// Polls a member, and returns its actions in their order; none if it has to wait or is done.
    ///
    /// # Errors
    /// Errors of the job.
    pub fn poll_member(&mut self, member: usize) -> Result<Vec<MemberAction>> {
        let Some(mut job) = self.members[member - self.first_member].job.take() else {
            return Ok(Vec::new());
        };
        self.swap_in_member_state(member);
        let polled = loop {
            match job.poll(&mut self.peers) {
                // Some steps of a job move no bytes.
                Ok(moved) if moved.any && !moved.done && self.records.lock().actions.is_empty() => {
                }
                polled => break polled,
            }
        };
        self.swap_in_member_state(member);
        if !polled?.done {
            self.members[member - self.first_member].job = Some(job);
        }
        Ok(std::mem::take(&mut self.records.lock().actions))
    }

    /// Delivers bytes that a member has sent to another one.
    pub fn deliver_bytes(&mut self, from: usize, to: usize, bytes: u64) {
        *self.records.lock().arrived.entry((from, to)).or_default() += bytes;
    }
}

/// Records that all links of a simulation share.
#[derive(Clone, Default)]
struct SharedSimulationRecords(Arc<Mutex<SimulatedMemberRecords>>);

#[derive(Default)]
struct SimulatedMemberRecords {
    /// The polled member, and its actions.
    member: usize,
    actions: Vec<MemberAction>,
    /// Whether a reduction read or wrote the windows that the member commits and releases now.
    in_reduction: bool,
    /// Bytes that have arrived and were not received, by sender and receiver.
    arrived: HashMap<(usize, usize), u64>,
}

impl SharedSimulationRecords {
    fn lock(&self) -> MutexGuard<'_, SimulatedMemberRecords> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimulatedMemberRecords {
    fn record_reduction(&mut self, bytes: usize) {
        self.actions.push(MemberAction::Reduce { bytes: bytes as u64 });
        self.in_reduction = true;
    }

    /// Returns the other end of a link of the polled member.
    fn peer_of(&self, link: usize) -> usize {
        if link < self.member { link } else { link + 1 }
    }

    fn transfer_over_link(&self, link: usize, bytes: usize) -> MemberTransfer {
        let member = saturating_index(self.peer_of(link));
        MemberTransfer { member, bytes: bytes as u64, copied: !self.in_reduction }
    }
}

/// One half of a link, which the polled member uses. Nobody reads or writes the bytes of windows.
struct SimulatedLinkEnd {
    link: usize,
    records: SharedSimulationRecords,
    /// The longest window with bytes that have arrived, of all links.
    zeros: Arc<[u8]>,
    /// The window to be filled. Empty until it is needed, because most links carry no messages.
    window: Vec<u8>,
}

impl LinkSender for SimulatedLinkEnd {
    fn window(&mut self) -> TransportResult<&mut [u8]> {
        // A job asks for windows before it reduces, and commits after it.
        self.records.lock().in_reduction = false;
        if self.window.is_empty() {
            // The system gives memory to a long vector only where somebody writes.
            self.window = vec![0; self.zeros.len()];
        }
        Ok(&mut self.window)
    }

    fn commit(&mut self, bytes: usize) -> TransportResult<()> {
        let mut records = self.records.lock();
        let sent = records.transfer_over_link(self.link, bytes);
        records.actions.push(MemberAction::Send(sent));
        Ok(())
    }

    fn flush(&mut self) -> TransportResult<bool> {
        Ok(true)
    }

    fn carries_no_payload(&self) -> bool {
        true
    }
}

impl LinkReceiver for SimulatedLinkEnd {
    fn window(&mut self) -> TransportResult<&[u8]> {
        let mut records = self.records.lock();
        records.in_reduction = false;
        let from = records.peer_of(self.link);
        let arrived = records.arrived.get(&(from, records.member)).copied().unwrap_or_default();
        let longest = self.zeros.len();
        Ok(&self.zeros[..usize::try_from(arrived).unwrap_or(longest).min(longest)])
    }

    fn check_not_ended(&mut self, _seen_bytes: usize) -> TransportResult<()> {
        Ok(())
    }

    fn release(&mut self, bytes: usize) -> TransportResult<()> {
        let mut records = self.records.lock();
        let received = records.transfer_over_link(self.link, bytes);
        records.actions.push(MemberAction::Receive(received));
        let (from, to) = (records.peer_of(self.link), records.member);
        if let Some(arrived) = records.arrived.get_mut(&(from, to)) {
            *arrived = arrived.saturating_sub(received.bytes);
        }
        Ok(())
    }

    fn carries_no_payload(&self) -> bool {
        true
    }
}

fn saturating_index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
