// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Runs the programs of all ranks: one event after the other, in the order of their times.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use farandole_collectives::program::{Action, Program, Transfer};

use crate::network::{Cost, Network, chance};
use crate::{Cluster, Error, Result};

/// Programs, and where their ranks are.
pub(crate) struct Scene<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) programs: Vec<Program>,
    /// The host of every rank.
    pub(crate) places: Vec<u32>,
    /// Hosts from this one on are slow.
    pub(crate) slow_from: u32,
    /// Whether transfers to the sender itself stand for transfers to other hosts: see
    /// `Plan::folded`.
    pub(crate) folded: bool,
}

/// The result.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) seconds: f64,
    /// Bytes that left a host, and those that arrived at one.
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    /// Messages between hosts.
    pub(crate) messages: u64,
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// A step is done.
    Done(usize),
    /// The head of what a step sends is at the other host.
    Head(usize),
    /// An event that a step waits for has happened.
    Here(usize),
}

#[derive(Clone, Copy, Debug)]
struct Event {
    time: f64,
    number: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest is the greatest, as a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

/// The core of a rank.
#[derive(Clone, Debug, Default)]
struct Core {
    busy: bool,
    queue: VecDeque<u32>,
}

/// Steps of all ranks, by number.
struct Run<'a> {
    scene: &'a Scene<'a>,
    network: Network,
    actions: Vec<Action>,
    ranks: Vec<u32>,
    /// The number of events that each step still waits for.
    waiting: Vec<u32>,
    /// The steps that come after each, one list after the other.
    next: Vec<u32>,
    starts: Vec<u32>,
    /// Receiver of each step's send.
    partner: Vec<u32>,
    /// The work of each rank's core, and its queue.
    cores: Vec<Core>,
    events: BinaryHeap<Event>,
    numbers: u64,
    outcome: Outcome,
}

/// Runs it to the end.
///
/// # Errors
/// `Stuck` when programs do not fit each other.
pub(crate) fn run(scene: &Scene<'_>) -> Result<Outcome> {
    let mut run = Run::new(scene);
    for step in 0..run.actions.len() {
        if run.waiting[step] == 0 {
            run.start(step, 0.0);
        }
    }
    let mut left = run.actions.len();
    while let Some(event) = run.events.pop() {
        match event.what {
            What::Done(step) => {
                left -= 1;
                run.outcome.seconds = run.outcome.seconds.max(event.time);
                run.done(step, event.time);
            }
            What::Head(step) => run.head(step, event.time),
            What::Here(step) => run.came(step, event.time),
        }
    }
    if left == 0 { Ok(run.outcome) } else { Err(Error::Stuck { left }) }
}

impl<'a> Run<'a> {
    fn new(scene: &'a Scene<'a>) -> Self {
        let total: usize = scene.programs.iter().map(Program::len).sum();
        let (mut actions, mut ranks) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let (mut waiting, mut counts) = (Vec::with_capacity(total), vec![0u32; total + 1]);
        let mut receives: HashMap<(u32, u32), Vec<usize>> = HashMap::new();
        let mut base = 0;
        for (rank, program) in (0u32..).zip(&scene.programs) {
            for (step, action) in program.actions().enumerate() {
                let after = program.after(step);
                for before in after {
                    counts[base + *before as usize + 1] += 1;
                }
                let mut waits = after.len();
                if let Action::Receive(transfer) = action {
                    waits += 1;
                    receives.entry((transfer.member, rank)).or_default().push(base + step);
                }
                actions.push(action);
                ranks.push(rank);
                waiting.push(index(waits));
            }
            base += program.len();
        }
        for step in 0..total {
            counts[step + 1] += counts[step];
        }
        let hosts = scene.places.iter().max().map_or(0, |host| *host as usize + 1);
        let network = Network::new(scene.cluster, hosts);
        let next = followers(scene, &counts);
        let partner = partners(&actions, &ranks, &receives);
        Self {
            scene,
            network,
            actions,
            ranks,
            waiting,
            next,
            starts: counts,
            partner,
            cores: vec![Core::default(); scene.programs.len()],
            events: BinaryHeap::new(),
            numbers: 0,
            outcome: Outcome::default(),
        }
    }

    fn at(&mut self, time: f64, what: What) {
        self.numbers += 1;
        self.events.push(Event { time, number: self.numbers, what });
    }

    fn host(&self, rank: u32) -> usize {
        self.scene.places.get(rank as usize).copied().unwrap_or_default() as usize
    }

    fn is_far(&self, rank: u32, other: u32) -> bool {
        if self.scene.folded { rank == other } else { self.host(rank) != self.host(other) }
    }

    /// Everything that a step comes after is done: it begins when its core is free.
    fn start(&mut self, step: usize, now: f64) {
        let core = &mut self.cores[self.ranks[step] as usize];
        if core.busy {
            core.queue.push_back(index(step));
        } else {
            core.busy = true;
            self.begin(step, now);
        }
    }

    fn begin(&mut self, step: usize, now: f64) {
        let rank = self.ranks[step];
        let cost = match self.actions[step] {
            Action::Send(transfer) | Action::Receive(transfer) => self.moving(rank, transfer),
            Action::Reduce { bytes } => self.network.touch(float(bytes)),
        };
        let host = self.host(rank);
        let slow = host >= self.scene.slow_from as usize;
        let end = self.network.work(now, host, slow, cost);
        self.at(end, What::Done(step));
    }

    fn moving(&self, rank: u32, transfer: Transfer) -> Cost {
        let bytes = float(transfer.bytes);
        let copy = if transfer.copied { self.network.copy(bytes) } else { Cost::default() };
        if !self.is_far(rank, transfer.member) {
            return copy;
        }
        let socket = self.network.socket(bytes, transfer.messages.into());
        Cost { core: copy.core + socket.core, memory: copy.memory + socket.memory }
    }

    fn done(&mut self, step: usize, now: f64) {
        if let Action::Send(transfer) = self.actions[step] {
            let rank = self.ranks[step];
            if self.is_far(rank, transfer.member) {
                self.outcome.sent += transfer.bytes;
                self.outcome.messages += u64::from(transfer.messages);
                let head = self.network.depart(now, self.host(rank), float(transfer.bytes));
                self.at(head, What::Head(step));
            } else {
                let here = now + self.scene.cluster.near.as_secs_f64();
                self.at(here, What::Here(self.partner[step] as usize));
            }
        }
        let (first, last) = (self.starts[step] as usize, self.starts[step + 1] as usize);
        for place in first..last {
            self.came(self.next[place] as usize, now);
        }
        let core = &mut self.cores[self.ranks[step] as usize];
        match core.queue.pop_front() {
            Some(next) => self.begin(next as usize, now),
            None => core.busy = false,
        }
    }

    fn head(&mut self, step: usize, now: f64) {
        let Action::Send(transfer) = self.actions[step] else { return };
        let (bytes, host) = (float(transfer.bytes), self.host(transfer.member));
        self.outcome.arrived += transfer.bytes;
        let late =
            self.network.retransmission(bytes, transfer.messages.into(), chance(step as u64));
        let end = self.network.arrive(now, host, bytes) + late;
        self.at(end, What::Here(self.partner[step] as usize));
    }

    /// One thing that a step waits for has come.
    fn came(&mut self, step: usize, now: f64) {
        let Some(waiting) = self.waiting.get_mut(step) else { return };
        *waiting = waiting.saturating_sub(1);
        if *waiting == 0 {
            self.start(step, now);
        }
    }
}

/// Returns the steps that come after each: those of step `k` are from `starts[k]` on.
fn followers(scene: &Scene<'_>, starts: &[u32]) -> Vec<u32> {
    let mut next = vec![0; starts.last().copied().unwrap_or_default() as usize];
    let mut filled = starts.to_vec();
    let mut base = 0;
    for program in &scene.programs {
        for step in 0..program.len() {
            for before in program.after(step) {
                let place = &mut filled[base + *before as usize];
                next[*place as usize] = index(base + step);
                *place += 1;
            }
        }
        base += program.len();
    }
    next
}

/// Returns the receiver of each send: the first send from one rank to another by the first receive,
/// and so on.
fn partners(
    actions: &[Action],
    ranks: &[u32],
    receives: &HashMap<(u32, u32), Vec<usize>>,
) -> Vec<u32> {
    let mut sent: HashMap<(u32, u32), usize> = HashMap::new();
    let mut partner = |rank: u32, to: u32| {
        let number = sent.entry((rank, to)).or_default();
        let step = receives.get(&(rank, to)).and_then(|steps| steps.get(*number));
        *number += 1;
        step.map_or(u32::MAX, |step| index(*step))
    };
    let each = actions.iter().zip(ranks).map(|(action, rank)| match action {
        Action::Send(transfer) => partner(*rank, transfer.member),
        _ => u32::MAX,
    });
    each.collect()
}

fn index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the bytes as a number to compute with; whole up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "no message is that long")]
pub(crate) fn float(bytes: u64) -> f64 {
    bytes as f64
}
