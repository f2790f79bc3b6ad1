// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Real communicators over modelled links: bytes go into real windows, time is that of the model.
//!
//! Cores and memory take no time here, so it shows what the schedules make of the network. Worlds
//! must be small: every rank has all its tensors, and rings to all others.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use farandole_collectives::{
    Communicator as _, Crossover, DataType, HostCommunicator, Memory, Operation, ReduceOp, Segment,
    Token,
};
use farandole_transport::{Link, LinkKind, LinkReceiver, LinkSender, Result as TransportResult};
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::events::float;
use crate::network::Network;
use crate::{Cluster, Error, Result};

/// The result of an allreduce.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// From the submission on all ranks until the last is done.
    pub time: Duration,
    /// Bytes from each rank to each other, after the greeting: `sent[from][to]`.
    pub sent: Vec<Vec<u64>>,
}

/// All links of a world.
struct Wires {
    /// Between processes of a host.
    near: f64,
    network: Network,
    places: Vec<u32>,
    now: f64,
    /// By sender and receiver.
    wires: Vec<Wire>,
    events: BinaryHeap<Event>,
    numbers: u64,
}

/// One direction of a link.
#[derive(Default)]
struct Wire {
    /// Bytes that the sender committed and the receiver has not released.
    held: usize,
    arrived: Vec<u8>,
    sent: u64,
}

struct Event {
    time: f64,
    number: u64,
    wire: usize,
    bytes: Vec<u8>,
    /// All of it is there, and not only its head.
    whole: bool,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

impl Wires {
    fn push(&mut self, time: f64, wire: usize, bytes: Vec<u8>, whole: bool) {
        self.numbers += 1;
        self.events.push(Event { time, number: self.numbers, wire, bytes, whole });
    }

    fn ends(&self, wire: usize) -> (usize, usize) {
        let place = |rank: usize| self.places.get(rank).copied().unwrap_or_default() as usize;
        (place(wire / self.places.len()), place(wire % self.places.len()))
    }

    fn commit(&mut self, wire: usize, bytes: &[u8]) {
        self.wires[wire].held += bytes.len();
        self.wires[wire].sent += bytes.len() as u64;
        let (from, to) = self.ends(wire);
        let (time, whole) = if from == to {
            (self.now + self.near, true)
        } else {
            (self.network.depart(self.now, from, float(bytes.len() as u64)), false)
        };
        self.push(time, wire, bytes.to_vec(), whole);
    }

    /// Lets the next thing happen; false when nothing is on its way.
    fn advance(&mut self) -> bool {
        let Some(event) = self.events.pop() else { return false };
        self.now = self.now.max(event.time);
        if event.whole {
            self.wires[event.wire].arrived.extend_from_slice(&event.bytes);
        } else {
            let to = self.ends(event.wire).1;
            let end = self.network.arrive(self.now, to, float(event.bytes.len() as u64));
            self.push(end, event.wire, event.bytes, true);
        }
        true
    }
}

type Shared = Arc<Mutex<Wires>>;

struct Sender {
    wires: Shared,
    wire: usize,
    window: Vec<u8>,
}

impl Sender {
    fn room(&self) -> usize {
        self.window.len() - self.wires.lock().wires[self.wire].held.min(self.window.len())
    }
}

impl LinkSender for Sender {
    fn window(&mut self) -> TransportResult<&mut [u8]> {
        let room = self.room();
        Ok(&mut self.window[..room])
    }

    fn commit(&mut self, bytes: usize) -> TransportResult<()> {
        if bytes > 0 {
            self.wires.lock().commit(self.wire, &self.window[..bytes]);
        }
        Ok(())
    }

    fn flush(&mut self) -> TransportResult<bool> {
        Ok(true)
    }
}

struct Receiver {
    wires: Shared,
    wire: usize,
    window: Vec<u8>,
    released: usize,
}

impl LinkReceiver for Receiver {
    fn window(&mut self) -> TransportResult<&[u8]> {
        let arrived = std::mem::take(&mut self.wires.lock().wires[self.wire].arrived);
        if !arrived.is_empty() {
            self.window.drain(..self.released);
            self.released = 0;
            self.window.extend_from_slice(&arrived);
        }
        Ok(&self.window[self.released..])
    }

    fn awaits(&mut self) -> TransportResult<()> {
        Ok(())
    }

    fn release(&mut self, bytes: usize) -> TransportResult<()> {
        self.released += bytes;
        self.wires.lock().wires[self.wire].held -= bytes;
        Ok(())
    }
}

/// Returns an allreduce of `float32` zeros by real communicators, whose rings hold `capacity`
/// bytes.
///
/// # Errors
/// `Collectives` when one fails, `Stuck` when all wait for each other.
pub fn allreduce(
    cluster: &Cluster,
    bytes: usize,
    capacity: usize,
    crossover: &Crossover,
) -> Result<Live> {
    cluster.check()?;
    let places = cluster.places();
    let ranks = places.len();
    let wires = Wires {
        near: cluster.near.as_secs_f64(),
        network: Network::new(cluster, cluster.hosts as usize),
        places: places.clone(),
        now: 0.0,
        wires: std::iter::repeat_with(Wire::default).take(ranks * ranks).collect(),
        events: BinaryHeap::new(),
        numbers: 0,
    };
    let wires = Arc::new(Mutex::new(wires));
    let mut communicators = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let links = (0..ranks)
            .filter(|peer| *peer != rank)
            .map(|peer| link(&wires, &places, (rank, peer), capacity));
        let communicator = HostCommunicator::over(number(rank), links.collect(), &places)?;
        communicators.push(communicator.with_crossover(crossover.clone()));
    }
    // Greetings come before the first operation.
    drive(&mut communicators, &wires)?;
    let (began, greeted) = {
        let wires = wires.lock();
        (wires.now, sent(&wires))
    };
    let tensors: Vec<Memory> = (0..ranks).map(|_| Memory::new(bytes)).collect();
    for (communicator, tensor) in communicators.iter_mut().zip(&tensors) {
        let segment = Segment { input: tensor.buffer(), output: tensor.buffer() };
        let (dtype, op) = (DataType::F32, ReduceOp::Sum);
        let segments = vec![segment];
        communicator.submit(
            Token(1),
            Operation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments },
        )?;
    }
    drive(&mut communicators, &wires)?;
    let left = communicators.iter().map(|communicator| communicator.pending()).sum::<usize>();
    if left > 0 {
        return Err(Error::Stuck { left });
    }
    let wires = wires.lock();
    let sent = sent(&wires).into_iter().zip(greeted);
    Ok(Live {
        time: Duration::from_secs_f64(wires.now - began),
        sent: sent
            .map(|(all, before)| {
                all.into_iter().zip(before).map(|(all, before)| all - before).collect()
            })
            .collect(),
    })
}

fn number(rank: usize) -> Rank {
    Rank(u32::try_from(rank).unwrap_or(u32::MAX))
}

fn link(wires: &Shared, places: &[u32], (rank, peer): (usize, usize), capacity: usize) -> Link {
    let kind = if places[rank] == places[peer] { LinkKind::Loopback } else { LinkKind::Tcp };
    let (out, back) = (rank * places.len() + peer, peer * places.len() + rank);
    let sender = Sender { wires: Arc::clone(wires), wire: out, window: vec![0; capacity] };
    let receiver =
        Receiver { wires: Arc::clone(wires), wire: back, window: Vec::new(), released: 0 };
    Link {
        peer: number(peer),
        kind,
        capacity,
        sender: Box::new(sender),
        receiver: Box::new(receiver),
    }
}

/// Polls all members until none moves, then lets time pass, until no message is on its way.
fn drive(communicators: &mut [HostCommunicator], wires: &Shared) -> Result<()> {
    let mut completed = Vec::new();
    loop {
        let mut any = true;
        while any {
            any = false;
            for communicator in &mut *communicators {
                any |= communicator.progress(&mut completed)?;
            }
        }
        if !wires.lock().advance() {
            return Ok(());
        }
    }
}

fn sent(wires: &Wires) -> Vec<Vec<u64>> {
    let ranks = wires.places.len().max(1);
    wires.wires.chunks(ranks).map(|row| row.iter().map(|wire| wire.sent).collect()).collect()
}
