// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links that are opened at their first use.
//!
//! The windows of a link that is not open are empty, as if its rings were full: whoever polls it
//! continues with other links. The first call that needs the link, of either half, asks for it. As
//! everywhere, the higher rank dials. It does so on a thread of its own. The lower rank takes the
//! connections that the service thread has accepted, whenever they came. Both are woken through the
//! parker when there is news, so a thread that sleeps polls the link again.
//!
//! A dial has a limit of its own ([`dial::any`]). If it fails, the link fails, as if it had broken.
//! That alone does not make the peer a lost one: it may have left in order, which only the ranks
//! know that exchange heartbeats with it. The lower rank has no limit: a rank that is late for an
//! operation is late on open links, too. It waits until the peer dials, is lost, or the operation
//! has reached its deadline.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use farandole_world::Rank;
use parking_lot::Mutex;

use crate::dial::Wait;
use crate::peer::Peer;
use crate::shared::{Secured, Shared};
use crate::spread::{Call, Way};
use crate::{Error, Link, LinkKind, LinkReceiver, LinkSender, Result, tcp};

/// Dials under way at most.
const MOST: usize = 16;
/// Longer than any dial may take; it has limits of its own.
const LIMIT: Duration = Duration::from_secs(600);
const LEFT: &str = "this process has left the mesh";

/// Links that wait for a thread to dial them.
#[derive(Default)]
pub(super) struct Dials {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    slots: VecDeque<Arc<Slot>>,
    /// Threads that have not ended.
    threads: usize,
}

impl Dials {
    fn add(self: &Arc<Self>, slot: Arc<Slot>) {
        let mut waiting = self.waiting.lock();
        waiting.slots.push_back(slot);
        if waiting.threads == MOST {
            return;
        }
        let dials = Arc::clone(self);
        match thread::Builder::new().name("farandole-dial".to_owned()).spawn(move || dials.work()) {
            Ok(_) => waiting.threads += 1,
            // The threads there are dial this one, too.
            Err(_) if waiting.threads > 0 => {}
            Err(error) => {
                let slot = waiting.slots.pop_back();
                drop(waiting);
                if let Some(slot) = slot {
                    slot.settle(Err(Error::of("clone")(error)));
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        self.waiting.lock().threads
    }

    fn work(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            let Some(slot) = waiting.slots.pop_front() else {
                waiting.threads -= 1;
                return;
            };
            drop(waiting);
            let outcome = slot.dial();
            slot.settle(outcome);
        }
    }
}

/// A link to `peer` that is opened at its first use, with rings of `capacity` bytes.
pub(super) fn link(
    shared: &Arc<Shared>,
    dials: &Arc<Dials>,
    peer: &Arc<Peer>,
    channel: u32,
    capacity: usize,
    way: Way,
    congestion: &str,
) -> Link {
    let slot = Arc::new(Slot {
        shared: Arc::clone(shared),
        dials: Arc::clone(dials),
        peer: Arc::clone(peer),
        channel,
        capacity,
        way,
        congestion: congestion.to_owned(),
        state: Mutex::new(State::Unasked),
    });
    Link {
        peer: peer.rank,
        kind: LinkKind::Tcp,
        capacity,
        sender: Box::new(Sender { slot: Arc::clone(&slot), open: None }),
        receiver: Box::new(Receiver { slot, open: None }),
    }
}

enum State {
    Unasked,
    Asked,
    /// The halves until they are fetched.
    Open {
        sender: Option<Box<dyn LinkSender>>,
        receiver: Option<Box<dyn LinkReceiver>>,
    },
    Failed(Error),
}

impl State {
    fn of(opened: Result<Link>) -> Self {
        match opened {
            Ok(Link { sender, receiver, .. }) => {
                Self::Open { sender: Some(sender), receiver: Some(receiver) }
            }
            Err(error) => Self::Failed(error),
        }
    }
}

/// One end of a link, shared by its halves and the thread that dials.
struct Slot {
    shared: Arc<Shared>,
    dials: Arc<Dials>,
    peer: Arc<Peer>,
    channel: u32,
    capacity: usize,
    way: Way,
    congestion: String,
    /// Lock order: those of `shared` may be taken while this is held, one at a time.
    state: Mutex<State>,
}

impl Slot {
    fn dials(&self) -> bool {
        self.shared.rank > self.peer.rank
    }

    /// Asks for the link if nobody has, and takes what has come. Whether it is open.
    fn look(self: &Arc<Self>) -> Result<bool> {
        self.shared.guard.check()?;
        let mut state = self.state.lock();
        let is_new = matches!(*state, State::Unasked);
        match &*state {
            State::Open { .. } => return Ok(true),
            State::Failed(error) => return Err(error.clone()),
            State::Unasked | State::Asked => *state = State::Asked,
        }
        if self.dials() {
            drop(state);
            if is_new {
                self.dials.add(Arc::clone(self));
            }
            return Ok(false);
        }
        // In this order: what came before an orderly end counts.
        let lost = self.peer.lost();
        match self.shared.take_arrived(self.channel, &self.peer) {
            Some(arrived) => {
                let opened = self.accept(arrived);
                let error = opened.as_ref().err().cloned();
                *state = State::of(opened);
                error.map_or(Ok(true), Err)
            }
            None if self.shared.stopping() => Err(self.peer.gone(LEFT)),
            None => lost.map_or(Ok(false), Err),
        }
    }

    fn accept(&self, (capacity, connections): (u64, Vec<Secured>)) -> Result<Link> {
        if capacity != self.capacity as u64 {
            return Err(super::other_capacity(
                self.peer.rank,
                self.channel,
                capacity,
                self.capacity,
            ));
        }
        self.over(connections)
    }

    fn over(&self, connections: Vec<Secured>) -> Result<Link> {
        let peer = Arc::clone(&self.peer);
        let congestion = &self.congestion;
        let (link, below) =
            tcp::link(connections, peer, &self.shared, self.channel, self.capacity, congestion)?;
        self.shared.follow(&below);
        Ok(link)
    }

    /// On a thread of its own: waits.
    fn dial(self: &Arc<Self>) -> Result<Link> {
        // The halves are gone when this thread alone has it.
        let mut give_up =
            || self.shared.stopping() || self.peer.lost().is_some() || Arc::strong_count(self) == 1;
        let mut wait = Wait { deadline: Instant::now() + LIMIT, give_up: &mut give_up };
        let call = Call { to: &self.peer, channel: self.channel, capacity: self.capacity as u64 };
        match self.way.connect(&self.shared, &call, &mut wait) {
            Ok(connections) => self.over(connections),
            Err(Error::Interrupted) => Err(self.peer.gone(LEFT)),
            Err(error @ Error::System { .. }) => Err(error),
            Err(error) => Err(self.peer.gone(&format!("no link could be opened: {error}"))),
        }
    }

    /// Says what became of a dial.
    fn settle(&self, opened: Result<Link>) {
        *self.state.lock() = State::of(opened);
        self.shared.wake();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // What nobody takes any more.
        if self.shared.guard.intact()
            && !self.dials()
            && matches!(self.state.get_mut(), State::Unasked | State::Asked)
        {
            drop(self.shared.take_arrived(self.channel, &self.peer));
        }
    }
}

struct Sender {
    slot: Arc<Slot>,
    open: Option<Box<dyn LinkSender>>,
}

impl Sender {
    /// The half of the open link; none while it is not open.
    fn half(&mut self) -> Result<Option<&mut (dyn LinkSender + 'static)>> {
        if self.open.is_none()
            && self.slot.look()?
            && let State::Open { sender, .. } = &mut *self.slot.state.lock()
        {
            self.open = sender.take();
        }
        Ok(self.open.as_deref_mut())
    }
}

impl LinkSender for Sender {
    fn window(&mut self) -> Result<&mut [u8]> {
        match self.half()? {
            Some(open) => open.window(),
            None => Ok(&mut []),
        }
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        let rank = self.slot.peer.rank;
        match self.half()? {
            Some(open) => open.commit(bytes),
            None => nothing_of(bytes, rank),
        }
    }

    fn flush(&mut self) -> Result<bool> {
        self.open.as_mut().map_or(Ok(true), |open| open.flush())
    }

    fn last_words(&mut self, bytes: &[u8]) {
        if let Some(open) = &mut self.open {
            open.last_words(bytes);
        }
    }

    fn is_on_demand(&self) -> bool {
        true
    }

    fn ask(&mut self) {
        // A failure is the next call's.
        drop(self.half());
    }
}

struct Receiver {
    slot: Arc<Slot>,
    open: Option<Box<dyn LinkReceiver>>,
}

impl Receiver {
    /// The half of the open link; none while it is not open.
    fn half(&mut self) -> Result<Option<&mut (dyn LinkReceiver + 'static)>> {
        if self.open.is_none()
            && self.slot.look()?
            && let State::Open { receiver, .. } = &mut *self.slot.state.lock()
        {
            self.open = receiver.take();
        }
        Ok(self.open.as_deref_mut())
    }
}

impl LinkReceiver for Receiver {
    fn window(&mut self) -> Result<&[u8]> {
        match self.half()? {
            Some(open) => open.window(),
            None => Ok(&[]),
        }
    }

    fn awaits(&mut self) -> Result<()> {
        self.half()?.map_or(Ok(()), |open| open.awaits())
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        let rank = self.slot.peer.rank;
        match self.half()? {
            Some(open) => open.release(bytes),
            None => nothing_of(bytes, rank),
        }
    }
}

/// A window of a link that is not open has no bytes.
fn nothing_of(bytes: usize, rank: Rank) -> Result<()> {
    match bytes {
        0 => Ok(()),
        _ => Err(Error::Frame { rank, reason: format!("{bytes} bytes of an empty window") }),
    }
}
