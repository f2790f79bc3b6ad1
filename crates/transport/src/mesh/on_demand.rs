// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that are opened at their first use.
//!
//! The windows of a link that is not open are empty, as if its rings were full, so a caller that
//! polls it continues with other links. The first call that needs the link, on either half,
//! requests it. As for all links, the higher rank dials, here on a separate thread. The lower rank
//! takes the connections that the service thread has accepted, even if they came before the
//! request. When the state changes, both ranks wake their parkers, so a sleeping thread polls the
//! link again.
//!
//! A dial has a time limit ([`dial_any_address`](crate::dial::dial_any_address)). If the dial
//! fails, the link fails, as if it had broken. This alone does not make the peer lost: it may have
//! left in order, which only the ranks know that exchange heartbeats with it. The lower rank has no
//! limit, because a rank that is late for an operation is also late on open links. It waits until
//! the peer dials, the peer is lost, or the operation reaches its deadline.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::Rank;
use parking_lot::Mutex;

use crate::dial::DialWait;
use crate::mesh_state::MeshState;
use crate::multi_nic::{LinkRequest, PeerRoutes};
use crate::peer_state::PeerState;
use crate::secured_connection::SecuredConnection;
use crate::{Error, Link, LinkKind, LinkReceiver, LinkSender, Result, tcp};

/// Largest number of concurrent dials.
// An operation asks for all its links at once: one thread for each would be hundreds of threads.
const MAX_ON_DEMAND_DIALS: usize = 16;
/// Deadline of the wait for a dial. It is longer than the time limit of any dial.
// `dial_any_address` has its own limit; this one only satisfies `DialWait`, which needs a deadline.
const ON_DEMAND_DIAL_LIMIT: Duration = Duration::from_secs(600);
const MESH_LEFT_REASON: &str = "this process has left the mesh";

/// Queue of links to dial, with the threads that dial them.
#[derive(Default)]
pub(super) struct DialQueue {
    waiting: Mutex<DialQueueState>,
}

#[derive(Default)]
struct DialQueueState {
    slots: VecDeque<Arc<OnDemandLinkEnd>>,
    /// Number of running dial threads.
    threads: usize,
}

impl DialQueue {
    fn enqueue_link_to_dial(self: &Arc<Self>, slot: Arc<OnDemandLinkEnd>) {
        let mut waiting = self.waiting.lock();
        waiting.slots.push_back(slot);
        if waiting.threads == MAX_ON_DEMAND_DIALS {
            return;
        }
        let dials = Arc::clone(self);
        match thread::Builder::new()
            .name("farandole-dial".to_owned())
            .spawn(move || dials.dial_queued_links())
        {
            Ok(_) => waiting.threads += 1,
            // The running threads dial this link, too.
            Err(_) if waiting.threads > 0 => {}
            Err(error) => {
                // No thread runs, so no other thread can have taken this slot.
                let slot = waiting.slots.pop_back();
                drop(waiting);
                if let Some(slot) = slot {
                    slot.publish_dial_result(Err(Error::failed_call_mapper("clone")(error)));
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn thread_count(&self) -> usize {
        self.waiting.lock().threads
    }

    fn dial_queued_links(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            let Some(slot) = waiting.slots.pop_front() else {
                // Under the lock: a slot that is added later finds the smaller count and starts a
                // thread.
                waiting.threads -= 1;
                return;
            };
            // The dial takes seconds at worst, and the thread that drives the engine needs this
            // lock to enqueue.
            drop(waiting);
            let outcome = slot.dial_peer();
            slot.publish_dial_result(outcome);
        }
    }
}

/// Creates a link to `peer` that is opened at its first use, with rings of `capacity` bytes.
pub(super) fn on_demand_link(
    shared: &Arc<MeshState>,
    dials: &Arc<DialQueue>,
    peer: &Arc<PeerState>,
    channel: u32,
    capacity: usize,
    routes: PeerRoutes,
    congestion: &str,
) -> Link {
    let slot = Arc::new(OnDemandLinkEnd {
        shared: Arc::clone(shared),
        dial_queue: Arc::clone(dials),
        peer: Arc::clone(peer),
        channel,
        capacity,
        routes,
        congestion: congestion.to_owned(),
        state: Mutex::new(OnDemandState::Idle),
    });
    Link {
        peer: peer.rank,
        kind: LinkKind::Tcp,
        capacity,
        sender: Box::new(OnDemandSender { slot: Arc::clone(&slot), open: None }),
        receiver: Box::new(OnDemandReceiver { slot, open: None }),
    }
}

enum OnDemandState {
    Idle,
    Requested,
    /// The link is open; each half is here until its owner takes it.
    Open {
        sender: Option<Box<dyn LinkSender>>,
        receiver: Option<Box<dyn LinkReceiver>>,
    },
    Failed(Error),
}

impl OnDemandState {
    fn from_result(opened: Result<Link>) -> Self {
        match opened {
            Ok(Link { sender, receiver, .. }) => {
                Self::Open { sender: Some(sender), receiver: Some(receiver) }
            }
            Err(error) => Self::Failed(error),
        }
    }
}

/// State of one end of a link, shared by its halves and the thread that dials.
struct OnDemandLinkEnd {
    shared: Arc<MeshState>,
    dial_queue: Arc<DialQueue>,
    peer: Arc<PeerState>,
    channel: u32,
    capacity: usize,
    routes: PeerRoutes,
    congestion: String,
    /// Lock order: the locks of `shared` may be taken while this is held, one at a time.
    state: Mutex<OnDemandState>,
}

impl OnDemandLinkEnd {
    fn is_dialer(&self) -> bool {
        self.shared.rank > self.peer.rank
    }

    /// Requests the link if that has not happened yet, and takes connections that have arrived.
    /// Returns whether the link is open.
    fn request_and_poll_open(self: &Arc<Self>) -> Result<bool> {
        self.shared.guard.check_not_forked()?;
        let mut state = self.state.lock();
        let is_new = matches!(*state, OnDemandState::Idle);
        match &*state {
            OnDemandState::Open { .. } => return Ok(true),
            OnDemandState::Failed(error) => return Err(error.clone()),
            OnDemandState::Idle | OnDemandState::Requested => *state = OnDemandState::Requested,
        }
        if self.is_dialer() {
            // The dial thread takes this lock in `publish_dial_result`, so it must be free before
            // the slot is queued.
            drop(state);
            if is_new {
                self.dial_queue.enqueue_link_to_dial(Arc::clone(self));
            }
            return Ok(false);
        }
        // The loss is read before the arrivals: connections that arrived before an orderly end
        // still count.
        let lost = self.peer.loss_error();
        match self.shared.arrivals.take_connections(self.channel, &self.peer) {
            Some(arrived) => {
                let opened = self.link_from_arrivals(arrived);
                let error = opened.as_ref().err().cloned();
                *state = OnDemandState::from_result(opened);
                error.map_or(Ok(true), Err)
            }
            // The service thread accepts no more connections, so the link can never open.
            None if self.shared.inbox.is_stopping() => {
                Err(self.peer.loss_error_or(MESH_LEFT_REASON))
            }
            None => lost.map_or(Ok(false), Err),
        }
    }

    fn link_from_arrivals(
        &self,
        (capacity, connections): (u64, Vec<SecuredConnection>),
    ) -> Result<Link> {
        if capacity != self.capacity as u64 {
            return Err(capacity_mismatch_error(
                self.peer.rank,
                self.channel,
                capacity,
                self.capacity,
            ));
        }
        self.open_tcp_link(connections)
    }

    fn open_tcp_link(&self, connections: Vec<SecuredConnection>) -> Result<Link> {
        let peer = Arc::clone(&self.peer);
        let congestion = &self.congestion;
        let (link, below) = tcp::link_over_connections(
            connections,
            peer,
            &self.shared,
            self.channel,
            self.capacity,
            congestion,
        )?;
        self.shared.inbox.queue_monitored_link(Arc::downgrade(&below) as _);
        Ok(link)
    }

    /// Dials the peer and waits for the result; runs on a dial thread.
    fn dial_peer(self: &Arc<Self>) -> Result<Link> {
        // When this thread has the only reference, both halves were dropped.
        let mut give_up = || {
            self.shared.inbox.is_stopping()
                || self.peer.loss_error().is_some()
                || Arc::strong_count(self) == 1
        };
        let mut wait =
            DialWait { deadline: Instant::now() + ON_DEMAND_DIAL_LIMIT, give_up: &mut give_up };
        let call =
            LinkRequest { to: &self.peer, channel: self.channel, capacity: self.capacity as u64 };
        match self.routes.dial_connections(&self.shared, &call, &mut wait) {
            Ok(connections) => self.open_tcp_link(connections),
            Err(Error::Interrupted) => Err(self.peer.loss_error_or(MESH_LEFT_REASON)),
            // A lack of descriptors or memory of this process is not the fault of the peer.
            Err(error @ Error::System { .. }) => Err(error),
            Err(error) => {
                Err(self.peer.loss_error_or(&format!("no link could be opened: {error}")))
            }
        }
    }

    /// Publishes the result of a dial, and wakes parked threads.
    fn publish_dial_result(&self, opened: Result<Link>) {
        *self.state.lock() = OnDemandState::from_result(opened);
        self.shared.wake_parked_threads();
    }
}

impl Drop for OnDemandLinkEnd {
    fn drop(&mut self) {
        // Both halves are dropped, so connections that arrived for them are closed.
        if self.shared.guard.is_original_process()
            && !self.is_dialer()
            && matches!(self.state.get_mut(), OnDemandState::Idle | OnDemandState::Requested)
        {
            drop(self.shared.arrivals.take_connections(self.channel, &self.peer));
        }
    }
}

struct OnDemandSender {
    slot: Arc<OnDemandLinkEnd>,
    open: Option<Box<dyn LinkSender>>,
}

impl OnDemandSender {
    /// Returns the half of the open link, or `None` while the link is not open.
    fn half_if_open(&mut self) -> Result<Option<&mut (dyn LinkSender + 'static)>> {
        if self.open.is_none()
            && self.slot.request_and_poll_open()?
            && let OnDemandState::Open { sender, .. } = &mut *self.slot.state.lock()
        {
            self.open = sender.take();
        }
        Ok(self.open.as_deref_mut())
    }
}

impl LinkSender for OnDemandSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        match self.half_if_open()? {
            Some(open) => open.window(),
            None => Ok(&mut []),
        }
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        let rank = self.slot.peer.rank;
        match self.half_if_open()? {
            Some(open) => open.commit(bytes),
            None => check_empty_window(bytes, rank),
        }
    }

    fn flush(&mut self) -> Result<bool> {
        // A flush does not request the link: nothing was committed to a window that is empty.
        self.open.as_mut().map_or(Ok(true), |open| open.flush())
    }

    fn send_final_bytes(&mut self, bytes: &[u8]) {
        if let Some(open) = &mut self.open {
            open.send_final_bytes(bytes);
        }
    }

    fn is_on_demand(&self) -> bool {
        true
    }

    fn request_open(&mut self) {
        // The next call reports a failure.
        drop(self.half_if_open());
    }
}

struct OnDemandReceiver {
    slot: Arc<OnDemandLinkEnd>,
    open: Option<Box<dyn LinkReceiver>>,
}

impl OnDemandReceiver {
    /// Returns the half of the open link, or `None` while the link is not open.
    fn half_if_open(&mut self) -> Result<Option<&mut (dyn LinkReceiver + 'static)>> {
        if self.open.is_none()
            && self.slot.request_and_poll_open()?
            && let OnDemandState::Open { receiver, .. } = &mut *self.slot.state.lock()
        {
            self.open = receiver.take();
        }
        Ok(self.open.as_deref_mut())
    }
}

impl LinkReceiver for OnDemandReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        match self.half_if_open()? {
            Some(open) => open.window(),
            None => Ok(&[]),
        }
    }

    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()> {
        self.half_if_open()?.map_or(Ok(()), |open| open.check_not_ended(seen_bytes))
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        let rank = self.slot.peer.rank;
        match self.half_if_open()? {
            Some(open) => open.release(bytes),
            None => check_empty_window(bytes, rank),
        }
    }
}

/// Fails if bytes of a window are used while the link is not open, because its windows are empty.
fn check_empty_window(bytes: usize, rank: Rank) -> Result<()> {
    match bytes {
        0 => Ok(()),
        _ => Err(Error::Frame { rank, reason: format!("{bytes} bytes of an empty window") }),
    }
}

/// Returns the error for a link whose ends have different capacities.
/// Returns the error of a link whose ends ask for rings of different sizes.
pub(super) fn capacity_mismatch_error(rank: Rank, channel: u32, theirs: u64, own: usize) -> Error {
    let reason =
        format!("rank {rank} opened channel {channel} with {theirs} bytes a ring, here: {own}");
    Error::Handshake { reason }
}
