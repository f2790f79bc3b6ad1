// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Runs the programs of all ranks: one event after the other, in the order of their times.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use farandole_collectives::program::{CollectiveProgram, ProgramAction, ProgramTransfer};

use crate::network::{NetworkModel, StepCost, loss_draw};
use crate::{Error, Result, SimulatedCluster};

/// Programs, and where their ranks are.
pub(crate) struct SimulationInput<'a> {
    pub(crate) cluster: &'a SimulatedCluster,
    pub(crate) programs: Vec<CollectiveProgram>,
    /// The host of every rank.
    pub(crate) rank_hosts: Vec<u32>,
    /// Hosts from this one on are slow.
    pub(crate) first_slow_host: u32,
    /// Whether transfers to the sender itself stand for transfers to other hosts: see
    /// `Plan::folded_program`.
    pub(crate) folded: bool,
}

/// The result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SimulationOutcome {
    pub(crate) seconds: f64,
    /// Bytes that all hosts sent, and bytes that all hosts received.
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    /// Messages between hosts.
    pub(crate) messages: u64,
}

#[derive(Clone, Copy, Debug)]
enum SimulatedEventKind {
    /// A step is done.
    StepDone(usize),
    /// The first byte of a step's message has arrived at the other host.
    HeadArrived(usize),
    /// An event that a step waits for has happened.
    DependencyDone(usize),
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

/// The core of a rank.
#[derive(Clone, Debug, Default)]
struct RankCore {
    busy: bool,
    queue: VecDeque<u32>,
}

/// Steps of all ranks, by number.
struct SimulationRun<'a> {
    input: &'a SimulationInput<'a>,
    network: NetworkModel,
    actions: Vec<ProgramAction>,
    ranks: Vec<u32>,
    /// The number of events that each step still waits for.
    pending_dependencies: Vec<u32>,
    /// The steps that come after each, one list after the other.
    successors: Vec<u32>,
    successor_starts: Vec<u32>,
    /// Receiver of each step's send.
    receiver_step: Vec<u32>,
    /// The work of each rank's core, and its queue.
    cores: Vec<RankCore>,
    events: BinaryHeap<SimulatedEvent>,
    last_number: u64,
    outcome: SimulationOutcome,
}

/// Runs it to the end.
///
/// # Errors
/// `Stuck` when programs do not fit each other.
pub(crate) fn run_simulation(scene: &SimulationInput<'_>) -> Result<SimulationOutcome> {
    let mut run = SimulationRun::new(scene);
    for step in 0..run.actions.len() {
        if run.pending_dependencies[step] == 0 {
            run.start_step(step, 0.0);
        }
    }
    let mut left = run.actions.len();
    while let Some(event) = run.events.pop() {
        match event.kind {
            SimulatedEventKind::StepDone(step) => {
                left -= 1;
                run.outcome.seconds = run.outcome.seconds.max(event.time);
                run.finish_step(step, event.time);
            }
            SimulatedEventKind::HeadArrived(step) => run.receive_message_head(step, event.time),
            SimulatedEventKind::DependencyDone(step) => run.resolve_dependency(step, event.time),
        }
    }
    if left == 0 { Ok(run.outcome) } else { Err(Error::Stuck { left }) }
}

impl<'a> SimulationRun<'a> {
    fn new(scene: &'a SimulationInput<'a>) -> Self {
        let total: usize = scene.programs.iter().map(CollectiveProgram::len).sum();
        let (mut actions, mut ranks) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let (mut waiting, mut counts) = (Vec::with_capacity(total), vec![0u32; total + 1]);
        let mut receives: HashMap<(u32, u32), Vec<usize>> = HashMap::new();
        let mut base = 0;
        for (rank, program) in (0u32..).zip(&scene.programs) {
            for (step, action) in program.actions().enumerate() {
                let after = program.dependencies_of(step);
                for before in after {
                    // One place later, so that the sums are the starts of the lists.
                    counts[base + *before as usize + 1] += 1;
                }
                let mut waits = after.len();
                if let ProgramAction::Receive(transfer) = action {
                    // A receive also waits for its message.
                    waits += 1;
                    receives.entry((transfer.member, rank)).or_default().push(base + step);
                }
                actions.push(action);
                ranks.push(rank);
                waiting.push(to_step_index(waits));
            }
            base += program.len();
        }
        for step in 0..total {
            counts[step + 1] += counts[step];
        }
        let hosts = scene.rank_hosts.iter().max().map_or(0, |host| *host as usize + 1);
        let network = NetworkModel::new(scene.cluster, hosts);
        let next = successors_by_step(scene, &counts);
        let partner = receiver_steps(&actions, &ranks, &receives);
        Self {
            input: scene,
            network,
            actions,
            ranks,
            pending_dependencies: waiting,
            successors: next,
            successor_starts: counts,
            receiver_step: partner,
            cores: vec![RankCore::default(); scene.programs.len()],
            events: BinaryHeap::new(),
            last_number: 0,
            outcome: SimulationOutcome::default(),
        }
    }

    fn schedule_event(&mut self, time: f64, what: SimulatedEventKind) {
        self.last_number += 1;
        self.events.push(SimulatedEvent { time, number: self.last_number, kind: what });
    }

    fn host_of(&self, rank: u32) -> usize {
        self.input.rank_hosts.get(rank as usize).copied().unwrap_or_default() as usize
    }

    fn is_between_hosts(&self, rank: u32, other: u32) -> bool {
        if self.input.folded { rank == other } else { self.host_of(rank) != self.host_of(other) }
    }

    /// Starts a step whose dependencies are done: it begins when its core is free.
    fn start_step(&mut self, step: usize, now: f64) {
        let core = &mut self.cores[self.ranks[step] as usize];
        if core.busy {
            core.queue.push_back(to_step_index(step));
        } else {
            core.busy = true;
            self.begin_work(step, now);
        }
    }

    fn begin_work(&mut self, step: usize, now: f64) {
        let rank = self.ranks[step];
        let cost = match self.actions[step] {
            ProgramAction::Send(transfer) | ProgramAction::Receive(transfer) => {
                self.transfer_cost(rank, transfer)
            }
            ProgramAction::Reduce { bytes } => self.network.reduce_cost(bytes_to_f64(bytes)),
        };
        let host = self.host_of(rank);
        let slow = host >= self.input.first_slow_host as usize;
        let end = self.network.occupy_core(now, host, slow, cost);
        self.schedule_event(end, SimulatedEventKind::StepDone(step));
    }

    fn transfer_cost(&self, rank: u32, transfer: ProgramTransfer) -> StepCost {
        let bytes = bytes_to_f64(transfer.bytes);
        let copy =
            if transfer.copied { self.network.copy_cost(bytes) } else { StepCost::default() };
        if !self.is_between_hosts(rank, transfer.member) {
            return copy;
        }
        let socket = self.network.socket_cost(bytes, transfer.messages.into());
        StepCost { core: copy.core + socket.core, memory: copy.memory + socket.memory }
    }

    fn finish_step(&mut self, step: usize, now: f64) {
        if let ProgramAction::Send(transfer) = self.actions[step] {
            let rank = self.ranks[step];
            if self.is_between_hosts(rank, transfer.member) {
                self.outcome.sent += transfer.bytes;
                self.outcome.messages += u64::from(transfer.messages);
                let head = self.network.send_message(
                    now,
                    self.host_of(rank),
                    bytes_to_f64(transfer.bytes),
                );
                self.schedule_event(head, SimulatedEventKind::HeadArrived(step));
            } else {
                let here = now + self.input.cluster.local_latency.as_secs_f64();
                self.schedule_event(
                    here,
                    SimulatedEventKind::DependencyDone(self.receiver_step[step] as usize),
                );
            }
        }
        let (first, last) =
            (self.successor_starts[step] as usize, self.successor_starts[step + 1] as usize);
        for place in first..last {
            self.resolve_dependency(self.successors[place] as usize, now);
        }
        // The core is busy until here, so that steps that became ready above wait behind earlier
        // ones.
        let core = &mut self.cores[self.ranks[step] as usize];
        match core.queue.pop_front() {
            Some(next) => self.begin_work(next as usize, now),
            None => core.busy = false,
        }
    }

    fn receive_message_head(&mut self, step: usize, now: f64) {
        let ProgramAction::Send(transfer) = self.actions[step] else { return };
        let (bytes, host) = (bytes_to_f64(transfer.bytes), self.host_of(transfer.member));
        self.outcome.arrived += transfer.bytes;
        // Drawn by the number of the step, so that every run loses the same packets (`SM-3`).
        let late = self.network.retransmission_delay(
            bytes,
            transfer.messages.into(),
            loss_draw(step as u64),
        );
        let end = self.network.receive_message(now, host, bytes) + late;
        self.schedule_event(
            end,
            SimulatedEventKind::DependencyDone(self.receiver_step[step] as usize),
        );
    }

    /// Records that one dependency of a step is done.
    fn resolve_dependency(&mut self, step: usize, now: f64) {
        // A send without a receive has no such step: its partner is `u32::MAX`.
        let Some(waiting) = self.pending_dependencies.get_mut(step) else { return };
        *waiting = waiting.saturating_sub(1);
        if *waiting == 0 {
            self.start_step(step, now);
        }
    }
}

/// Returns the successors of each step: the successors of step `k` begin at `successor_starts[k]`.
fn successors_by_step(scene: &SimulationInput<'_>, starts: &[u32]) -> Vec<u32> {
    let mut next = vec![0; starts.last().copied().unwrap_or_default() as usize];
    let mut filled = starts.to_vec();
    let mut base = 0;
    for program in &scene.programs {
        for step in 0..program.len() {
            for before in program.dependencies_of(step) {
                let place = &mut filled[base + *before as usize];
                next[*place as usize] = to_step_index(base + step);
                *place += 1;
            }
        }
        base += program.len();
    }
    next
}

/// Returns the receiver of each send: the first send from one rank to another by the first receive,
/// and so on.
fn receiver_steps(
    actions: &[ProgramAction],
    ranks: &[u32],
    receives: &HashMap<(u32, u32), Vec<usize>>,
) -> Vec<u32> {
    let mut sent: HashMap<(u32, u32), usize> = HashMap::new();
    let mut partner = |rank: u32, to: u32| {
        let number = sent.entry((rank, to)).or_default();
        let step = receives.get(&(rank, to)).and_then(|steps| steps.get(*number));
        *number += 1;
        step.map_or(u32::MAX, |step| to_step_index(*step))
    };
    let each = actions.iter().zip(ranks).map(|(action, rank)| match action {
        ProgramAction::Send(transfer) => partner(*rank, transfer.member),
        _ => u32::MAX,
    });
    each.collect()
}

fn to_step_index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the bytes as a number to compute with; whole up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "no message is that long")]
pub(crate) fn bytes_to_f64(bytes: u64) -> f64 {
    bytes as f64
}
