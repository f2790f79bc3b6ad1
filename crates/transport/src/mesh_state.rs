// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! State that the mesh, its service thread and its dialers share.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farandole_shm::ForkGuard;
use farandole_world::{Generation, Rank};
use parking_lot::Mutex;

use crate::connection_arrivals::{ArrivalKey, ArrivedConnection, ConnectionArrivals};
use crate::handshake::JobKey;
use crate::peer_state::PeerState;
use crate::peer_watch::{ProcessEndDescriptor, loss_report_allowance};
use crate::service_inbox::ServiceInbox;
use crate::{Error, Parker, Result};

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
    pub(crate) arrivals: ConnectionArrivals,
    pub(crate) inbox: ServiceInbox,
    first_loss: OnceLock<Error>,
    /// Own addresses from which no connection could be made, and for which a warning was logged.
    /// Lock order: no other lock is taken while this is held.
    pub(crate) warned_addresses: Mutex<BTreeSet<IpAddr>>,
    /// Peers that were lost other than by leaving in order. Lock order: no other lock is taken
    /// while this is held.
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
            kept_sockets: Mutex::new(Vec::new()),
            arrivals: ConnectionArrivals::default(),
            inbox: ServiceInbox::new()?,
            first_loss: OnceLock::new(),
            warned_addresses: Mutex::default(),
            losses: Mutex::default(),
        })
    }

    /// Adds an arrived connection, and wakes the threads that may wait for it.
    pub(crate) fn add_arrival(&self, place: ArrivalKey, capacity: u64, arrival: ArrivedConnection) {
        let replaced = self.arrivals.add_connection(place, capacity, arrival);
        // An on-demand link waits in the parker, not at the condition variable of the arrivals.
        self.wake_parked_threads();
        // After the wake: dropping closes sockets, which may take a moment.
        drop(replaced);
    }

    /// Wakes the threads that sleep in the parker, so that they poll all links.
    pub(crate) fn wake_parked_threads(&self) {
        // Writing to this process's eventfd fails only when it is full, which also wakes.
        let _ = self.parker.own_doorbell().ring_doorbell();
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
        self.arrivals.wake_waiting_threads();
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
}
