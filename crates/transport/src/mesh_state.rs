// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! State that the mesh, its service thread and its dialers share.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use farandole_shm::{ForkGuard, ProcessDoorbell, RingConsumer, RingProducer};
use farandole_world::{Generation, Rank};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use crate::handshake::JobKey;
use crate::handshake::key_exchange::ConnectionKeys;
use crate::peer::PeerState;
use crate::tcp::TcpLinkState;
use crate::watch::{PeerWatch, ProcessEndDescriptor, loss_report_allowance};
use crate::{Error, Parker, Result};

/// A connection of a link that an authenticated peer has dialled.
#[derive(Debug)]
pub(crate) enum ArrivedConnection {
    SharedMemory { sender: RingProducer, receiver: RingConsumer, bell: Arc<ProcessDoorbell> },
    Tcp { secured: SecuredConnection, streams: u16 },
}

/// A TCP connection after its handshake.
#[derive(Debug)]
pub(crate) struct SecuredConnection {
    pub(crate) socket: OwnedFd,
    /// Boxed, because the tables of the ciphers take a kilobyte, too much to move.
    pub(crate) keys: Box<ConnectionKeys>,
}

/// A socket that is kept open until its peer has received the end of the stream.
#[derive(Debug)]
pub(crate) struct RetiredSocket {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: Arc<PeerState>,
}

/// Key of an arrival: channel, peer, number of the connection.
pub(crate) type ArrivalKey = (u32, Rank, u16);

pub(crate) struct MeshState {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) generation: Generation,
    pub(crate) key: JobKey,
    pub(crate) use_shared_memory: bool,
    pub(crate) peer_timeout: Duration,
    /// Whether some ranks learn of losses only through reports of other ranks.
    pub(crate) relies_on_loss_reports: AtomicBool,
    pub(crate) parker: Parker,
    /// Pidfd of this process, with which peers watch it; `None` if the kernel has no pidfds.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Peers by rank; the entry of this rank is unused.
    pub(crate) peers: Vec<Arc<PeerState>>,
    pub(crate) guard: ForkGuard,
    /// Number of refused connections.
    pub(crate) refused: AtomicU64,
    /// Sockets of first handshakes. Their peers watch them to detect the end of this process.
    kept_sockets: Mutex<Vec<OwnedFd>>,
    /// Wakes the service thread.
    pub(crate) event: OwnedFd,
    stop: AtomicBool,
    /// Arrived connections, with the capacity of their rings. Lock order: no other lock is taken
    /// while this is held.
    arrivals: Mutex<HashMap<ArrivalKey, (u64, ArrivedConnection)>>,
    arrived: Condvar,
    /// For the service thread to take. Lock order: like `arrivals`.
    watches: Mutex<Vec<PeerWatch>>,
    /// For the service thread to take. Lock order: like `arrivals`.
    monitored_links: Mutex<Vec<Weak<TcpLinkState>>>,
    /// For the service thread to take. Lock order: like `arrivals`.
    retired: Mutex<Vec<RetiredSocket>>,
    first_loss: OnceLock<Error>,
    /// Own addresses from which no connection could be made, and for which a warning was logged.
    /// Lock order: like `arrivals`.
    pub(crate) warned_addresses: Mutex<BTreeSet<IpAddr>>,
    /// Peers that were lost other than by leaving in order. Lock order: like `arrivals`.
    losses: Mutex<BTreeSet<Rank>>,
}

/// Parameters of a new [`MeshState`].
pub(crate) struct MeshParameters {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) generation: Generation,
    pub(crate) key: JobKey,
    pub(crate) use_shared_memory: bool,
    pub(crate) use_pidfd: bool,
    pub(crate) peer_timeout: Duration,
}

impl MeshState {
    pub(crate) fn new(facts: MeshParameters) -> Result<Self> {
        let pidfd = rustix::process::pidfd_open(
            rustix::process::getpid(),
            rustix::process::PidfdFlags::empty(),
        );
        Ok(Self {
            rank: facts.rank,
            size: facts.size,
            generation: facts.generation,
            key: facts.key,
            use_shared_memory: facts.use_shared_memory,
            peer_timeout: facts.peer_timeout,
            relies_on_loss_reports: AtomicBool::new(false),
            parker: Parker::new()?,
            pidfd: pidfd.ok().filter(|_| facts.use_pidfd),
            peers: (0..facts.size).map(|rank| Arc::new(PeerState::new(Rank(rank)))).collect(),
            guard: ForkGuard::new(),
            refused: AtomicU64::new(0),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(Error::from_call("eventfd"))?,
            kept_sockets: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            arrivals: Mutex::new(HashMap::new()),
            arrived: Condvar::new(),
            watches: Mutex::new(Vec::new()),
            monitored_links: Mutex::new(Vec::new()),
            retired: Mutex::new(Vec::new()),
            first_loss: OnceLock::new(),
            warned_addresses: Mutex::default(),
            losses: Mutex::default(),
        })
    }

    /// Adds an arrived connection. It replaces an earlier one with the same key, which its dialer
    /// has given up.
    pub(crate) fn add_arrival(&self, place: ArrivalKey, capacity: u64, arrival: ArrivedConnection) {
        let replaced = self.arrivals.lock().insert(place, (capacity, arrival));
        self.arrived.notify_all();
        self.wake_parked_threads();
        drop(replaced);
    }

    /// Wakes the threads that sleep in the parker, so that they poll all links.
    pub(crate) fn wake_parked_threads(&self) {
        // Writing to this process's eventfd fails only when it is full, which also wakes.
        let _ = self.parker.own_doorbell().ring_doorbell();
    }

    /// Takes the connections of a link that `peer` has dialled over TCP, with the capacity of its
    /// rings. Returns `None` until all connections have arrived.
    pub(crate) fn take_arrived_connections(
        &self,
        channel: u32,
        peer: &PeerState,
    ) -> Option<(u64, Vec<SecuredConnection>)> {
        let place = |stream| (channel, peer.rank, stream);
        let mut arrivals = self.arrivals.lock();
        let (capacity, ArrivedConnection::Tcp { streams, .. }) = arrivals.get(&place(0))? else {
            return None;
        };
        let (capacity, streams) = (*capacity, *streams);
        if !(1..streams).all(|stream| arrivals.contains_key(&place(stream))) {
            return None;
        }
        let connection = |stream| match arrivals.remove(&place(stream)) {
            Some((_, ArrivedConnection::Tcp { secured, .. })) => Some(secured),
            _ => None,
        };
        Some((capacity, (0..streams).filter_map(connection).collect()))
    }

    /// Waits for a connection that `peer` dials.
    pub(crate) fn await_arrival(
        &self,
        (channel, stream): (u32, u16),
        peer: &PeerState,
        deadline: Instant,
    ) -> Result<(u64, ArrivedConnection)> {
        let started = Instant::now();
        let mut arrivals = self.arrivals.lock();
        loop {
            if let Some(arrival) = arrivals.remove(&(channel, peer.rank, stream)) {
                return Ok(arrival);
            }
            if let Some(error) = peer.loss_error() {
                return Err(error);
            }
            if self.arrived.wait_until(&mut arrivals, deadline).timed_out() {
                let host = peer.host.get().map_or("", String::as_str);
                let what = format!("rank {} on {host} to open channel {channel}", peer.rank);
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            }
        }
    }

    /// Returns the descriptor that shows the end of a local peer: its pidfd, or else the socket of
    /// the first handshake. If either rank has no pidfd, both keep that socket.
    pub(crate) fn process_end_descriptor(
        &self,
        pidfd: Option<OwnedFd>,
        socket: OwnedFd,
        first: bool,
    ) -> Option<ProcessEndDescriptor> {
        match pidfd {
            None if first => Some(ProcessEndDescriptor::Socket(socket)),
            pidfd => {
                if first && self.pidfd.is_none() {
                    self.kept_sockets.lock().push(socket);
                }
                pidfd.map(ProcessEndDescriptor::Pidfd)
            }
        }
    }

    pub(crate) fn queue_watch(&self, watch: PeerWatch) {
        self.watches.lock().push(watch);
        self.wake_service();
    }

    pub(crate) fn take_watches(&self) -> Vec<PeerWatch> {
        std::mem::take(&mut *self.watches.lock())
    }

    /// Passes a link to the service thread, which detects a broken connection even while the link
    /// is unused.
    pub(crate) fn queue_monitored_link(&self, connection: &Arc<TcpLinkState>) {
        self.monitored_links.lock().push(Arc::downgrade(connection));
        self.wake_service();
    }

    pub(crate) fn take_monitored_links(&self) -> Vec<Weak<TcpLinkState>> {
        std::mem::take(&mut *self.monitored_links.lock())
    }

    /// Passes sockets of a dropped link to the service thread, which keeps them until the peer has
    /// received the end of the stream.
    pub(crate) fn retire_sockets(&self, peer: &Arc<PeerState>, sockets: Vec<OwnedFd>) {
        let retired =
            sockets.into_iter().map(|socket| RetiredSocket { socket, peer: Arc::clone(peer) });
        self.retired.lock().extend(retired);
        self.wake_service();
    }

    pub(crate) fn take_retired_sockets(&self) -> Vec<RetiredSocket> {
        std::mem::take(&mut *self.retired.lock())
    }

    /// Records the loss of a peer, and wakes all waiting threads.
    pub(crate) fn record_loss(&self, peer: &PeerState, reason: String, orderly: bool) {
        if !peer.mark_lost(reason) {
            return;
        }
        if !orderly && let Some(error) = peer.loss_error() {
            self.losses.lock().insert(peer.rank);
            // Only the first loss is reported.
            drop(self.first_loss.set(error));
        }
        drop(self.arrivals.lock());
        self.arrived.notify_all();
        self.wake_parked_threads();
    }

    /// Returns the longest time without a sign of life before a peer is lost. If ranks learn of
    /// losses through reports, a part of the timeout is reserved for the reports.
    pub(crate) fn max_peer_silence(&self) -> Duration {
        let timeout = self.peer_timeout;
        if self.relies_on_loss_reports.load(Ordering::Relaxed) {
            timeout - loss_report_allowance(timeout)
        } else {
            timeout
        }
    }

    pub(crate) fn first_loss(&self) -> Option<&Error> {
        self.first_loss.get()
    }

    pub(crate) fn lost_ranks(&self) -> Vec<Rank> {
        self.losses.lock().iter().copied().collect()
    }

    pub(crate) fn request_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_service();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn wake_service(&self) {
        // A full eventfd is already signalled.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}
