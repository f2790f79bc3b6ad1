// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! State that the mesh, its service thread and its dialers share.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use farandole_shm::{Bell, Consumer, Guard, Producer};
use farandole_world::{Generation, Rank};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use crate::handshake::Key;
use crate::handshake::exchange::Keys;
use crate::peer::Peer;
use crate::tcp::Connection;
use crate::watch::{End, Watch, hearsay};
use crate::{Error, Parker, Result};

/// A link of which a peer dialled and proved its end.
#[derive(Debug)]
pub(crate) enum Arrival {
    Shared { sender: Producer, receiver: Consumer, bell: Arc<Bell> },
    Tcp { secured: Secured, streams: u16 },
}

/// A TCP connection after its handshake.
#[derive(Debug)]
pub(crate) struct Secured {
    pub(crate) socket: OwnedFd,
    /// Tables of ciphers: a kilobyte, too much to move about.
    pub(crate) keys: Box<Keys>,
}

/// A socket that is only kept until its peer knows that nothing follows.
#[derive(Debug)]
pub(crate) struct Retired {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: Arc<Peer>,
}

/// The target of an arrival: channel, peer, number of the connection.
pub(crate) type Place = (u32, Rank, u16);

pub(crate) struct Shared {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) generation: Generation,
    pub(crate) key: Key,
    pub(crate) use_shared_memory: bool,
    pub(crate) peer_timeout: Duration,
    /// Whether some ranks hear of losses from others only.
    pub(crate) hearsay: AtomicBool,
    pub(crate) parker: Parker,
    /// Refers to this process, for peers to watch; `None` where the kernel has none.
    pub(crate) pidfd: Option<OwnedFd>,
    /// By rank; the own entry is unused.
    pub(crate) peers: Vec<Arc<Peer>>,
    pub(crate) guard: Guard,
    /// Connections that were turned away.
    pub(crate) refused: AtomicU64,
    /// Sockets of first handshakes, whose peers watch them for our end.
    kept: Mutex<Vec<OwnedFd>>,
    /// Wakes the service thread.
    pub(crate) event: OwnedFd,
    stop: AtomicBool,
    /// With the capacity of its rings. Lock order: nothing is locked while this is held.
    arrivals: Mutex<HashMap<Place, (u64, Arrival)>>,
    arrived: Condvar,
    /// For the service thread to take. Lock order: as above.
    watches: Mutex<Vec<Watch>>,
    /// For the service thread to take. Lock order: as above.
    paths: Mutex<Vec<Weak<Connection>>>,
    /// For the service thread to take. Lock order: as above.
    retired: Mutex<Vec<Retired>>,
    first_loss: OnceLock<Error>,
    /// Own addresses that a warning was logged for: from there no connection came about. Lock
    /// order: nothing is locked while this is held.
    pub(crate) detours: Mutex<BTreeSet<IpAddr>>,
    /// Peers that were lost otherwise than by leaving in order. Lock order: nothing is locked while
    /// this is held.
    losses: Mutex<BTreeSet<Rank>>,
}

/// The facts a [`Shared`] starts from.
pub(crate) struct Facts {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) generation: Generation,
    pub(crate) key: Key,
    pub(crate) use_shared_memory: bool,
    pub(crate) use_pidfd: bool,
    pub(crate) peer_timeout: Duration,
}

impl Shared {
    pub(crate) fn new(facts: Facts) -> Result<Self> {
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
            hearsay: AtomicBool::new(false),
            parker: Parker::new()?,
            pidfd: pidfd.ok().filter(|_| facts.use_pidfd),
            peers: (0..facts.size).map(|rank| Arc::new(Peer::new(Rank(rank)))).collect(),
            guard: Guard::new(),
            refused: AtomicU64::new(0),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(Error::of("eventfd"))?,
            kept: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            arrivals: Mutex::new(HashMap::new()),
            arrived: Condvar::new(),
            watches: Mutex::new(Vec::new()),
            paths: Mutex::new(Vec::new()),
            retired: Mutex::new(Vec::new()),
            first_loss: OnceLock::new(),
            detours: Mutex::default(),
            losses: Mutex::default(),
        })
    }

    /// A link arrived; an earlier one of the same name was given up by its dialer.
    pub(crate) fn arrive(&self, place: Place, capacity: u64, arrival: Arrival) {
        let replaced = self.arrivals.lock().insert(place, (capacity, arrival));
        self.arrived.notify_all();
        self.wake();
        drop(replaced);
    }

    /// Has the threads that sleep in the parker look at all links again.
    pub(crate) fn wake(&self) {
        // An eventfd of this process is refused only when it is full: then it is rung.
        let _ = self.parker.bell().ring();
    }

    /// A link that `peer` has dialled over TCP, with the capacity of its rings. `None` until all
    /// its connections are there.
    pub(crate) fn take_arrived(&self, channel: u32, peer: &Peer) -> Option<(u64, Vec<Secured>)> {
        let place = |stream| (channel, peer.rank, stream);
        let mut arrivals = self.arrivals.lock();
        let (capacity, Arrival::Tcp { streams, .. }) = arrivals.get(&place(0))? else {
            return None;
        };
        let (capacity, streams) = (*capacity, *streams);
        if !(1..streams).all(|stream| arrivals.contains_key(&place(stream))) {
            return None;
        }
        let connection = |stream| match arrivals.remove(&place(stream)) {
            Some((_, Arrival::Tcp { secured, .. })) => Some(secured),
            _ => None,
        };
        Some((capacity, (0..streams).filter_map(connection).collect()))
    }

    /// Waits for a link that `peer` dials.
    pub(crate) fn await_arrival(
        &self,
        (channel, stream): (u32, u16),
        peer: &Peer,
        deadline: Instant,
    ) -> Result<(u64, Arrival)> {
        let started = Instant::now();
        let mut arrivals = self.arrivals.lock();
        loop {
            if let Some(arrival) = arrivals.remove(&(channel, peer.rank, stream)) {
                return Ok(arrival);
            }
            if let Some(error) = peer.lost() {
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
    /// the first handshake. If either lacks a pidfd, both keep that socket.
    pub(crate) fn end_of(
        &self,
        pidfd: Option<OwnedFd>,
        socket: OwnedFd,
        first: bool,
    ) -> Option<End> {
        match pidfd {
            None if first => Some(End::Socket(socket)),
            pidfd => {
                if first && self.pidfd.is_none() {
                    self.kept.lock().push(socket);
                }
                pidfd.map(End::Pidfd)
            }
        }
    }

    pub(crate) fn watch(&self, watch: Watch) {
        self.watches.lock().push(watch);
        self.nudge();
    }

    pub(crate) fn take_watches(&self) -> Vec<Watch> {
        std::mem::take(&mut *self.watches.lock())
    }

    /// Lets the service thread notice a broken connection, also while its link is not used.
    pub(crate) fn follow(&self, connection: &Arc<Connection>) {
        self.paths.lock().push(Arc::downgrade(connection));
        self.nudge();
    }

    pub(crate) fn take_paths(&self) -> Vec<Weak<Connection>> {
        std::mem::take(&mut *self.paths.lock())
    }

    /// Lets the service thread keep unused sockets until their peer knows that nothing follows.
    pub(crate) fn retire(&self, peer: &Arc<Peer>, sockets: Vec<OwnedFd>) {
        let retired = sockets.into_iter().map(|socket| Retired { socket, peer: Arc::clone(peer) });
        self.retired.lock().extend(retired);
        self.nudge();
    }

    pub(crate) fn take_retired(&self) -> Vec<Retired> {
        std::mem::take(&mut *self.retired.lock())
    }

    /// A peer is gone; all waiting threads look again.
    pub(crate) fn lose(&self, peer: &Peer, reason: String, orderly: bool) {
        if !peer.lose(reason) {
            return;
        }
        if !orderly && let Some(error) = peer.lost() {
            self.losses.lock().insert(peer.rank);
            // The first loss is the one reported.
            drop(self.first_loss.set(error));
        }
        drop(self.arrivals.lock());
        self.arrived.notify_all();
        self.wake();
    }

    /// The longest time for which a peer may show no life. If ranks hear of losses from others,
    /// that needs some of the timeout.
    pub(crate) fn longest_silence(&self) -> Duration {
        let timeout = self.peer_timeout;
        if self.hearsay.load(Ordering::Relaxed) { timeout - hearsay(timeout) } else { timeout }
    }

    pub(crate) fn first_loss(&self) -> Option<&Error> {
        self.first_loss.get()
    }

    pub(crate) fn lost(&self) -> Vec<Rank> {
        self.losses.lock().iter().copied().collect()
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.nudge();
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn nudge(&self) {
        // Full means that it is signalled already.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}
