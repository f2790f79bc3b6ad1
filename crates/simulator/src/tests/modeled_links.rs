// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Real communicators over modelled links: bytes go into real windows, time comes from the model.
//!
//! Cores and memory take no time here, so the result depends only on the schedules and the network.
//! Worlds must be small: every rank has all its tensors, and rings to all other ranks.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use farandole_collectives::{
    CollectiveOperation, Communicator as _, CrossoverTable, HostCommunicator, OperationToken,
    TensorSegment,
};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_transport::{Link, LinkKind, LinkReceiver, LinkSender, Result as TransportResult};
use farandole_world::Rank;
use parking_lot::Mutex;

use crate::SimulatedCluster;
use crate::events::bytes_to_f64;
use crate::network::NetworkModel;

/// The result of an allreduce.
pub(super) struct ModeledRun {
    /// From the submission on all ranks until the last is done.
    pub(super) time: Duration,
    /// Bytes from each rank to each other, after the greeting: `sent[from][to]`.
    pub(super) sent: Vec<Vec<u64>>,
}

/// All links of a world.
struct ModeledNetworkState {
    /// Between processes of a host.
    local_latency: f64,
    network: NetworkModel,
    rank_hosts: Vec<u32>,
    now: f64,
    /// By sender and receiver.
    wires: Vec<ModeledWire>,
    events: BinaryHeap<WireEvent>,
    last_number: u64,
}

/// One direction of a link.
#[derive(Default)]
struct ModeledWire {
    /// Bytes that the sender committed and the receiver has not released.
    unreleased: usize,
    arrived: Vec<u8>,
    sent: u64,
}

struct WireEvent {
    time: f64,
    number: u64,
    wire: usize,
    bytes: Vec<u8>,
    /// All of it is there, and not only its head.
    is_complete: bool,
}

impl PartialEq for WireEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for WireEvent {}

impl PartialOrd for WireEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for WireEvent {
    /// Orders the earliest event as the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

impl ModeledNetworkState {
    fn schedule_arrival(&mut self, time: f64, wire: usize, bytes: Vec<u8>, whole: bool) {
        self.last_number += 1;
        self.events.push(WireEvent {
            time,
            number: self.last_number,
            wire,
            bytes,
            is_complete: whole,
        });
    }

    fn wire_hosts(&self, wire: usize) -> (usize, usize) {
        let place = |rank: usize| self.rank_hosts.get(rank).copied().unwrap_or_default() as usize;
        (place(wire / self.rank_hosts.len()), place(wire % self.rank_hosts.len()))
    }

    fn send_bytes(&mut self, wire: usize, bytes: &[u8]) {
        self.wires[wire].unreleased += bytes.len();
        self.wires[wire].sent += bytes.len() as u64;
        let (from, to) = self.wire_hosts(wire);
        let (time, whole) = if from == to {
            (self.now + self.local_latency, true)
        } else {
            (self.network.send_message(self.now, from, bytes_to_f64(bytes.len() as u64)), false)
        };
        self.schedule_arrival(time, wire, bytes.to_vec(), whole);
    }

    /// Lets the next thing happen; false when nothing is on its way.
    fn process_next_event(&mut self) -> bool {
        let Some(event) = self.events.pop() else { return false };
        self.now = self.now.max(event.time);
        if event.is_complete {
            self.wires[event.wire].arrived.extend_from_slice(&event.bytes);
        } else {
            let to = self.wire_hosts(event.wire).1;
            let end =
                self.network.receive_message(self.now, to, bytes_to_f64(event.bytes.len() as u64));
            self.schedule_arrival(end, event.wire, event.bytes, true);
        }
        true
    }
}

type SharedNetworkState = Arc<Mutex<ModeledNetworkState>>;

struct ModeledLinkSender {
    wires: SharedNetworkState,
    wire: usize,
    window: Vec<u8>,
}

impl ModeledLinkSender {
    fn free_window(&self) -> usize {
        self.window.len() - self.wires.lock().wires[self.wire].unreleased.min(self.window.len())
    }
}

impl LinkSender for ModeledLinkSender {
    fn window(&mut self) -> TransportResult<&mut [u8]> {
        let room = self.free_window();
        Ok(&mut self.window[..room])
    }

    fn commit(&mut self, bytes: usize) -> TransportResult<()> {
        if bytes > 0 {
            self.wires.lock().send_bytes(self.wire, &self.window[..bytes]);
        }
        Ok(())
    }

    fn flush(&mut self) -> TransportResult<bool> {
        Ok(true)
    }
}

struct ModeledLinkReceiver {
    wires: SharedNetworkState,
    wire: usize,
    window: Vec<u8>,
    released: usize,
}

impl LinkReceiver for ModeledLinkReceiver {
    fn window(&mut self) -> TransportResult<&[u8]> {
        let arrived = std::mem::take(&mut self.wires.lock().wires[self.wire].arrived);
        if !arrived.is_empty() {
            self.window.drain(..self.released);
            self.released = 0;
            self.window.extend_from_slice(&arrived);
        }
        Ok(&self.window[self.released..])
    }

    fn check_not_ended(&mut self, _seen_bytes: usize) -> TransportResult<()> {
        Ok(())
    }

    fn release(&mut self, bytes: usize) -> TransportResult<()> {
        self.released += bytes;
        self.wires.lock().wires[self.wire].unreleased -= bytes;
        Ok(())
    }
}

/// Returns an allreduce of `float32` zeros by real communicators, whose rings hold `capacity`
/// bytes. Panics if a communicator fails, or if all wait for each other.
pub(super) fn run_allreduce(
    cluster: &SimulatedCluster,
    bytes: usize,
    capacity: usize,
    crossover: &CrossoverTable,
) -> ModeledRun {
    cluster.check_parameters().unwrap();
    let places = cluster.rank_hosts();
    let ranks = places.len();
    let wires = ModeledNetworkState {
        local_latency: cluster.local_latency.as_secs_f64(),
        network: NetworkModel::new(cluster, cluster.hosts as usize),
        rank_hosts: places.clone(),
        now: 0.0,
        wires: std::iter::repeat_with(ModeledWire::default).take(ranks * ranks).collect(),
        events: BinaryHeap::new(),
        last_number: 0,
    };
    let wires = Arc::new(Mutex::new(wires));
    let mut communicators = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let links = (0..ranks)
            .filter(|peer| *peer != rank)
            .map(|peer| modeled_link(&wires, &places, (rank, peer), capacity));
        let communicator =
            HostCommunicator::across_hosts(to_rank(rank), links.collect(), &places).unwrap();
        communicators.push(communicator.with_crossover(crossover.clone()));
    }
    // Greetings come before the first operation.
    drive_to_idle(&mut communicators, &wires);
    let (began, greeted) = {
        let wires = wires.lock();
        (wires.now, sent_bytes_by_rank_pair(&wires))
    };
    let tensors: Vec<HostMemory> = (0..ranks).map(|_| HostMemory::new(bytes)).collect();
    for (communicator, tensor) in communicators.iter_mut().zip(&tensors) {
        let segment = TensorSegment { input: tensor.as_buffer(), output: tensor.as_buffer() };
        let (dtype, op) = (DataType::F32, ReduceOp::Sum);
        let segments = vec![segment];
        let operation =
            CollectiveOperation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments };
        communicator.submit_operation(OperationToken(1), operation).unwrap();
    }
    drive_to_idle(&mut communicators, &wires);
    let left = communicators.iter().map(|communicator| communicator.pending_count()).sum::<usize>();
    assert_eq!(left, 0, "operations that wait for each other");
    let wires = wires.lock();
    let sent = sent_bytes_by_rank_pair(&wires).into_iter().zip(greeted);
    ModeledRun {
        time: Duration::from_secs_f64(wires.now - began),
        sent: sent
            .map(|(all, before)| {
                all.into_iter().zip(before).map(|(all, before)| all - before).collect()
            })
            .collect(),
    }
}

fn to_rank(rank: usize) -> Rank {
    Rank(u32::try_from(rank).unwrap_or(u32::MAX))
}

fn modeled_link(
    wires: &SharedNetworkState,
    places: &[u32],
    (rank, peer): (usize, usize),
    capacity: usize,
) -> Link {
    let kind = if places[rank] == places[peer] { LinkKind::Loopback } else { LinkKind::Tcp };
    let (out, back) = (rank * places.len() + peer, peer * places.len() + rank);
    let sender =
        ModeledLinkSender { wires: Arc::clone(wires), wire: out, window: vec![0; capacity] };
    let receiver = ModeledLinkReceiver {
        wires: Arc::clone(wires),
        wire: back,
        window: Vec::new(),
        released: 0,
    };
    Link {
        peer: to_rank(peer),
        kind,
        capacity,
        sender: Box::new(sender),
        receiver: Box::new(receiver),
    }
}

/// Polls all members until none moves, then lets time pass, until no message is on its way.
fn drive_to_idle(communicators: &mut [HostCommunicator], wires: &SharedNetworkState) {
    let mut completed = Vec::new();
    loop {
        let mut any = true;
        while any {
            any = false;
            for communicator in &mut *communicators {
                any |= communicator.make_progress(&mut completed).unwrap();
            }
        }
        if !wires.lock().process_next_event() {
            return;
        }
    }
}

fn sent_bytes_by_rank_pair(wires: &ModeledNetworkState) -> Vec<Vec<u64>> {
    let ranks = wires.rank_hosts.len().max(1);
    wires.wires.chunks(ranks).map(|row| row.iter().map(|wire| wire.sent).collect()).collect()
}
