// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Work for the service thread, from all other threads of the mesh.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::peer_state::PeerState;
use crate::peer_watch::PeerWatch;
use crate::{Error, Result};

/// A link whose connections the service thread monitors, so that it detects a broken connection
/// even while the link is unused.
pub(crate) trait MonitoredLink: Send + Sync {
    /// Returns the peer at the other end.
    fn peer(&self) -> &Arc<PeerState>;

    /// Returns the sockets, by the numbers of their connections.
    fn sockets(&self) -> &[OwnedFd];
}

/// A socket that is kept open until its peer has received the end of the stream.
#[derive(Debug)]
pub(crate) struct RetiredSocket {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: Arc<PeerState>,
}

/// Objects that the service thread takes over. Lock order: no other lock is taken while one of
/// these is held.
pub(crate) struct ServiceInbox {
    /// Wakes the service thread.
    pub(crate) event: OwnedFd,
    stop: AtomicBool,
    watches: Mutex<Vec<PeerWatch>>,
    monitored_links: Mutex<Vec<Weak<dyn MonitoredLink>>>,
    retired: Mutex<Vec<RetiredSocket>>,
}

impl ServiceInbox {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(Error::failed_call_mapper("eventfd"))?,
            stop: AtomicBool::new(false),
            watches: Mutex::default(),
            monitored_links: Mutex::default(),
            retired: Mutex::default(),
        })
    }

    pub(crate) fn queue_peer_watch(&self, watch: PeerWatch) {
        self.watches.lock().push(watch);
        self.wake_service();
    }

    pub(crate) fn take_peer_watches(&self) -> Vec<PeerWatch> {
        std::mem::take(&mut *self.watches.lock())
    }

    /// Passes a link to the service thread.
    pub(crate) fn queue_monitored_link(&self, link: Weak<dyn MonitoredLink>) {
        self.monitored_links.lock().push(link);
        self.wake_service();
    }

    pub(crate) fn take_monitored_links(&self) -> Vec<Weak<dyn MonitoredLink>> {
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

    pub(crate) fn request_stop(&self) {
        // Pairs with the load in `is_stopping`. Set before the wake, or the thread would sleep
        // again.
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
