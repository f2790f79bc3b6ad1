// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Runs the jobs of all ranks: one event after the other, in the order of their times.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use farandole_collectives::simulation::{MemberAction, MemberTransfer, SimulatedAllreduce};

use crate::network::{HostStepCost, NetworkModel, message_loss_random};
use crate::{Error, Result, SimulatedCluster};

/// An allreduce, and where its ranks are.
pub(crate) struct SimulationInput<'a> {
    pub(crate) cluster: &'a SimulatedCluster,
    pub(crate) allreduce: SimulatedAllreduce,
    /// The host of every rank of the world.
    pub(crate) rank_hosts: &'a [u32],
    /// Whether the last host stands for all: see `AllreducePlan::start_on_last_host`.
    pub(crate) folded: bool,
}

/// The result.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SimulationOutcome {
    pub(crate) seconds: f64,
    /// Bytes that all hosts sent.
    pub(crate) sent: u64,
    /// Messages between hosts.
    pub(crate) messages: u64,
}

/// Bytes on the way from one rank to another.
#[derive(Clone, Copy, Debug)]
struct SentMessage {
    from: u32,
    to: u32,
    bytes: u64,
    /// Number of the message among those between hosts.
    number: u64,
}

#[derive(Clone, Copy, Debug)]
enum SimulatedEventKind {
    /// The core of a rank has done an action.
    ActionDone(u32),
    /// The first byte of a message has arrived at the other host.
    HeadArrived(SentMessage),
    /// All of a message has arrived.
    Arrived(SentMessage),
}

#[derive(Clone, Copy, Debug)]
struct SimulatedEvent {
    time: f64,
    number: u64,
    kind: SimulatedEventKind,
}

impl PartialEq for SimulatedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for SimulatedEvent {}

impl PartialOrd for SimulatedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for SimulatedEvent {
    /// Orders the earliest event as the greatest, because a heap returns the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        // Events of the same time keep the order in which they were scheduled (`SM-3`).
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

struct SimulationRun<'a, 'b> {
    input: &'a mut SimulationInput<'b>,
    network: NetworkModel,
    /// Hosts from this one on are slow.
    first_slow_host: usize,
    /// Actions of each simulated rank, by its last poll, that its core has not done. The first one
    /// is under way.
    cores: Vec<VecDeque<MemberAction>>,
    first_rank: usize,
    events: BinaryHeap<SimulatedEvent>,
    last_number: u64,
    outcome: SimulationOutcome,
}

/// Runs it to the end. `see` gets the actions of each rank, in their order.
///
/// # Errors
/// `Stuck` when all ranks wait for each other.
pub(crate) fn run_simulation(
    input: &mut SimulationInput<'_>,
    mut see: impl FnMut(u32, &[MemberAction]),
) -> Result<SimulationOutcome> {
    let ranks = input.allreduce.members();
    let mut run = SimulationRun {
        network: NetworkModel::new(input.cluster, input.cluster.hosts as usize),
        first_slow_host: (input.cluster.hosts - input.cluster.stragglers) as usize,
        cores: vec![VecDeque::new(); ranks.len()],
        first_rank: ranks.start,
        input,
        events: BinaryHeap::new(),
        last_number: 0,
        outcome: SimulationOutcome::default(),
    };
    for rank in ranks {
        run.poll_rank(to_rank(rank), 0.0, &mut see)?;
    }
    while let Some(event) = run.events.pop() {
        match event.kind {
            SimulatedEventKind::ActionDone(rank) => {
                run.outcome.seconds = run.outcome.seconds.max(event.time);
                run.finish_action(rank, event.time);
                if run.core(rank).is_empty() {
                    run.poll_rank(rank, event.time, &mut see)?;
                }
            }
            SimulatedEventKind::HeadArrived(message) => {
                run.receive_message_head(message, event.time)
            }
            SimulatedEventKind::Arrived(SentMessage { from, to, bytes, .. }) => {
                run.input.allreduce.deliver_bytes(from as usize, to as usize, bytes);
                if run.core(to).is_empty() {
                    run.poll_rank(to, event.time, &mut see)?;
                }
            }
        }
    }
    match run.input.allreduce.pending_count() {
        0 => Ok(run.outcome),
        left => Err(Error::Stuck { left }),
    }
}

impl SimulationRun<'_, '_> {
    fn core(&mut self, rank: u32) -> &mut VecDeque<MemberAction> {
        &mut self.cores[rank as usize - self.first_rank]
    }

    fn schedule_event(&mut self, time: f64, what: SimulatedEventKind) {
        self.last_number += 1;
        self.events.push(SimulatedEvent { time, number: self.last_number, kind: what });
    }

    fn host_of(&self, rank: u32) -> usize {
        self.input.rank_hosts.get(rank as usize).copied().unwrap_or_default() as usize
    }

    fn is_between_hosts(&self, rank: u32, other: u32) -> bool {
        self.host_of(rank) != self.host_of(other)
    }

    /// Polls a rank whose core is free, and begins the first of its actions.
    fn poll_rank(
        &mut self,
        rank: u32,
        now: f64,
        see: &mut impl FnMut(u32, &[MemberAction]),
    ) -> Result<()> {
        let actions = self.input.allreduce.poll_member(rank as usize)?;
        see(rank, &actions);
        *self.core(rank) = actions.into();
        self.begin_action(rank, now);
        Ok(())
    }

    fn begin_action(&mut self, rank: u32, now: f64) {
        let Some(action) = self.core(rank).front().copied() else { return };
        let cost = match action {
            MemberAction::Send(transfer) | MemberAction::Receive(transfer) => {
                self.transfer_cost(rank, transfer)
            }
            MemberAction::Reduce { bytes } => self.network.reduce_cost(bytes_to_f64(bytes)),
        };
        let host = self.host_of(rank);
        let end = self.network.occupy_core(now, host, host >= self.first_slow_host, cost);
        self.schedule_event(end, SimulatedEventKind::ActionDone(rank));
    }

    fn transfer_cost(&self, rank: u32, transfer: MemberTransfer) -> HostStepCost {
        let bytes = bytes_to_f64(transfer.bytes);
        let copy =
            if transfer.copied { self.network.copy_cost(bytes) } else { HostStepCost::default() };
        if !self.is_between_hosts(rank, transfer.member) {
            return copy;
        }
        let socket = self.network.socket_cost(bytes);
        HostStepCost { core: copy.core + socket.core, memory: copy.memory + socket.memory }
    }

    /// Ends the action that is under way, and begins the next one.
    fn finish_action(&mut self, rank: u32, now: f64) {
        if let Some(MemberAction::Send(MemberTransfer { member: to, bytes, .. })) =
            self.core(rank).pop_front()
        {
            let number = self.outcome.messages;
            let mut message = SentMessage { from: rank, to, bytes, number };
            if self.is_between_hosts(rank, to) {
                self.outcome.sent += bytes;
                self.outcome.messages += 1;
                if self.input.folded {
                    (message.from, message.to) = (to, rank);
                }
                let head = self.network.send_message(now, self.host_of(rank), bytes_to_f64(bytes));
                self.schedule_event(head, SimulatedEventKind::HeadArrived(message));
            } else {
                let here = now + self.input.cluster.local_latency.as_secs_f64();
                self.schedule_event(here, SimulatedEventKind::Arrived(message));
            }
        }
        self.begin_action(rank, now);
    }

    fn receive_message_head(&mut self, message: SentMessage, now: f64) {
        let (bytes, host) = (bytes_to_f64(message.bytes), self.host_of(message.to));
        // Drawn by the number of the message, so that every run loses the same packets (`SM-3`).
        let late = self.network.retransmission_delay(bytes, message_loss_random(message.number));
        let end = self.network.receive_message(now, host, bytes) + late;
        self.schedule_event(end, SimulatedEventKind::Arrived(message));
    }
}

fn to_rank(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the bytes as a number to compute with; whole up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "no message is that long")]
pub(crate) fn bytes_to_f64(bytes: u64) -> f64 {
    bytes as f64
}
