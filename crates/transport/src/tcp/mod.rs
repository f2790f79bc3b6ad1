// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Link halves over one or several TCP connections: a private ring each way, pumped by a poll of
//! either half.
//!
//! Bytes are dealt to the connections in fixed blocks ([`stripes`]); the receiver reads each
//! connection straight to where its blocks belong in the ring, so that nothing is copied to put it
//! in order. What crosses a connection is sealed in records ([`crate::record`]): sealed in the ring
//! of the sender, opened in that of the receiver.
//!
//! Measured between two network namespaces of one machine, a path without delay and without loss,
//! both directions at once, in processor time per gigabyte:
//! - Congestion control: with BBR, whose timers pace every burst, 0.57 s; with CUBIC or Reno, 0.30
//!   s. So links ask for CUBIC, which most systems use anyway, and keep the system's choice where
//!   it is not allowed. This says what BBR costs where there is nothing to control. Over a network
//!   with delay and loss neither was measured: there the system's choice may be the faster one
//!   (`FARANDOLE_TCP_CONGESTION=` takes it).
//! - `MSG_ZEROCOPY`: 0.45 to 0.77 s instead of 0.30 s: between namespaces the kernel copies after
//!   all, and the pages are pinned and their completions collected besides. Not used.
//! - Explicit socket buffers of 1 to 4 MiB instead of the kernel's own tuning: 0.28 to 0.33 s, and
//!   less throughput. Not set.
//! - Calls of 1 MiB instead of 256 KiB: 0.24 s. So a call moves all there is.
//! - A ring of 512 KiB to 1 MiB instead of 4 MiB, which stays in the cache: 0.17 to 0.25 s. So an
//!   empty ring begins at its start again.
//! - Two connections: as one. They pay where a network limits each flow (`FARANDOLE_TCP_STREAMS`).

pub(crate) mod path;
mod receiving;
mod sending;
pub(crate) mod stripes;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use farandole_shm::{Consumer, Guard, Producer, private, rewind};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown, sockopt};

use crate::peer::Peer;
use crate::shared::{Secured, Shared};
use crate::{Error, Link, LinkKind, LinkReceiver, LinkSender, Parker, Result, addresses};
use path::Sight;
use receiving::{Receiving, Step};
use sending::Sending;
use stripes::Stripes;

const CLOSED: &str = "it closed the connection";

/// The shared state of both halves.
pub(crate) struct Connection {
    sockets: Vec<OwnedFd>,
    peer: Arc<Peer>,
    parker: Parker,
    /// Takes over the sockets in the end.
    mesh: Weak<Shared>,
    channel: u32,
    guard: Guard,
    /// The sockets' end of the outgoing ring. Lock order: nothing is locked while this is held.
    outgoing: Mutex<Outgoing>,
    /// Something lies in the outgoing ring: a poll of the receiver moves it, too.
    unsent: AtomicBool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        for socket in &self.sockets {
            self.parker.unwatch(socket);
        }
        // To close a socket with something unread resets it: then the peer would hear of a failure,
        // not of an end.
        self.sockets.retain(|socket| Sight::of(socket).is_ok_and(|sight| !sight.done));
        if self.guard.intact()
            && self.peer.lost().is_none()
            && let Some(mesh) = self.mesh.upgrade()
        {
            mesh.retire(&self.peer, std::mem::take(&mut self.sockets));
        }
    }
}

impl Connection {
    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    pub(crate) fn sockets(&self) -> &[OwnedFd] {
        &self.sockets
    }

    /// Sends what the sockets take.
    fn pump(&self, outgoing: &mut Outgoing) -> Result<()> {
        let moved = outgoing.pump(&self.sockets, &self.peer);
        self.unsent.store(outgoing.pending.used()? > 0, Ordering::Release);
        moved
    }

    /// A connection's bytes were changed on the way: the peer is lost, because none of its
    /// connections can be trusted.
    fn tampered(&self, number: usize, what: &str) -> String {
        let address = self.sockets.get(number).map_or(String::new(), addresses::of_peer);
        let channel = self.channel;
        let reason = format!("on connection {number} of channel {channel} with {address}, {what}");
        if let Some(mesh) = self.mesh.upgrade() {
            mesh.lose(&self.peer, reason.clone(), false);
        }
        reason
    }

    /// On behalf of the sender, whose own polls tell what goes wrong.
    fn pump_idly(&self) {
        if self.unsent.load(Ordering::Acquire)
            && let Some(mut outgoing) = self.outgoing.try_lock()
        {
            drop(self.pump(&mut outgoing));
        }
    }
}

struct Outgoing {
    pending: Consumer,
    /// By connection.
    sending: Vec<Sending>,
    stripes: Stripes,
    broken: Option<String>,
}

impl Outgoing {
    fn pump(&mut self, sockets: &[OwnedFd], peer: &Peer) -> Result<()> {
        if let Some(reason) = &self.broken {
            return Err(peer.gone(reason));
        }
        let base = self.stripes.complete();
        let window = self.pending.window_mut()?;
        let end = base + window.len() as u64;
        for (number, (socket, sending)) in sockets.iter().zip(&mut self.sending).enumerate() {
            while let Some(extent) = self.stripes.extent(number, end) {
                let bytes = &mut window[within(base, extent.start)..within(base, extent.end)];
                match sending.step(socket, bytes) {
                    Ok(sent) => self.stripes.advance(number, sent as u64),
                    Err(Errno::AGAIN) => break,
                    Err(error) => {
                        let reason = if error == Errno::PIPE {
                            CLOSED.to_owned()
                        } else {
                            error.to_string()
                        };
                        let lost = peer.gone(&reason);
                        self.broken = Some(reason);
                        return Err(lost);
                    }
                }
            }
        }
        let done = within(base, self.stripes.complete());
        self.pending.release(done)?;
        // Not before: a peer that is lost on another connection may still hear last words on this
        // one.
        peer.lost().map_or(Ok(()), Err)
    }
}

/// Returns the offset of a position in a window that begins at `base`.
fn within(base: u64, position: u64) -> usize {
    usize::try_from(position.saturating_sub(base)).unwrap_or(usize::MAX)
}

/// A link over connections, in the order of their numbers, and what lies under it. `congestion`
/// names the algorithm to ask for.
pub(crate) fn link(
    connections: Vec<Secured>,
    peer: Arc<Peer>,
    mesh: &Arc<Shared>,
    channel: u32,
    capacity: usize,
    congestion: &str,
) -> Result<(Link, Arc<Connection>)> {
    let parker = mesh.parker.clone();
    let (mut sockets, mut sending, mut receiving) = (Vec::new(), Vec::new(), Vec::new());
    for Secured { socket, keys } in connections {
        sockets.push(socket);
        sending.push(Sending::new(keys.sending));
        receiving.push(Receiving::new(keys.receiving));
    }
    for socket in &sockets {
        rustix::io::ioctl_fionbio(socket, true).map_err(Error::of("ioctl"))?;
        sockopt::set_tcp_nodelay(socket, true).map_err(Error::of("setsockopt"))?;
        path::keep_asking(socket, mesh.peer_timeout).map_err(Error::of("setsockopt"))?;
        if !congestion.is_empty() {
            // Where it is not there or not allowed, the system's own serves.
            let _ = sockopt::set_tcp_congestion(socket, congestion);
        }
        parker.watch(socket)?;
    }
    let rank = peer.rank;
    let (outgoing, pending) = private(capacity)?;
    let (arriving, incoming) = private(capacity)?;
    let stripes = Stripes::new(sockets.len());
    let ended = vec![None; sockets.len()];
    let connection = Arc::new(Connection {
        sockets,
        peer,
        parker,
        mesh: Arc::downgrade(mesh),
        channel,
        guard: Guard::new(),
        outgoing: Mutex::new(Outgoing { pending, sending, stripes: stripes.clone(), broken: None }),
        unsent: AtomicBool::new(false),
    });
    let below = Arc::clone(&connection);
    let link = Link {
        peer: rank,
        kind: LinkKind::Tcp,
        capacity: outgoing.capacity(),
        sender: Box::new(TcpSender { connection: Arc::clone(&connection), outgoing }),
        receiver: Box::new(TcpReceiver {
            connection,
            arriving,
            incoming,
            receiving,
            stripes,
            ended,
            broken: None,
            full: false,
        }),
    };
    Ok((link, below))
}

struct TcpSender {
    connection: Arc<Connection>,
    /// The caller's end of the ring.
    outgoing: Producer,
}

impl TcpSender {
    fn pump(&self) -> Result<MutexGuard<'_, Outgoing>> {
        let mut outgoing = self.connection.outgoing.lock();
        self.connection.pump(&mut outgoing)?;
        Ok(outgoing)
    }
}

impl LinkSender for TcpSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        let mut pumped = self.connection.outgoing.lock();
        self.connection.pump(&mut pumped)?;
        rewind(&mut self.outgoing, &mut pumped.pending);
        drop(pumped);
        Ok(self.outgoing.window()?)
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.outgoing.commit(bytes)?;
        self.pump().map(drop)
    }

    fn flush(&mut self) -> Result<bool> {
        if self.outgoing.used()? == 0 {
            return Ok(true);
        }
        Ok(self.pump()?.pending.used()? == 0)
    }

    fn last_words(&mut self, bytes: &[u8]) {
        // A failure is no news: the peer is lost anyway.
        drop(self.pump());
        let Ok(window) = self.outgoing.window() else { return };
        let fits = bytes.len().min(window.len());
        window[..fits].copy_from_slice(&bytes[..fits]);
        if self.outgoing.commit(fits).is_ok() {
            drop(self.pump());
        }
    }
}

impl Drop for TcpSender {
    fn drop(&mut self) {
        if self.connection.guard.intact() {
            // What the peer no longer takes is lost, as the documentation of a drop says.
            let mut outgoing = self.connection.outgoing.lock();
            drop(self.connection.pump(&mut outgoing));
            let all = outgoing.pending.used().is_ok_and(|left| left == 0);
            for (socket, sending) in self.connection.sockets.iter().zip(&mut outgoing.sending) {
                if all {
                    sending.end(socket);
                }
                let _ = shutdown(socket, Shutdown::Write);
            }
        }
    }
}

struct TcpReceiver {
    connection: Arc<Connection>,
    /// The sockets' end of the ring.
    arriving: Producer,
    /// The caller's end.
    incoming: Consumer,
    /// By connection.
    receiving: Vec<Receiving>,
    stripes: Stripes,
    /// The reason why nothing more will come, by connection.
    ended: Vec<Option<String>>,
    /// The reason why nothing more can be believed.
    broken: Option<String>,
    /// The ring was full: bytes may wait in a socket without an edge to tell.
    full: bool,
}

impl TcpReceiver {
    fn pump(&mut self) -> Result<()> {
        if !self.stripes.ahead() && !self.receiving.iter().any(Receiving::in_ring) {
            rewind(&mut self.arriving, &mut self.incoming);
        }
        let base = self.stripes.complete();
        let window = self.arriving.window()?;
        let end = base + window.len() as u64;
        self.full = false;
        let connections = self.connection.sockets.iter().zip(&mut self.receiving).enumerate();
        for (number, (socket, receiving)) in connections {
            let mut seen = false;
            receiving.poll();
            while self.ended[number].is_none() && self.broken.is_none() {
                let (extent, block) = self.stripes.room(number, end);
                // A block that begins beyond the window has no room at all.
                let space = window.get_mut(within(base, extent.start)..within(base, extent.end));
                let space = space.unwrap_or_default();
                match receiving.step(socket, space, within(0, block), seen) {
                    Step::Placed(bytes) => {
                        self.stripes.advance(number, bytes as u64);
                        seen = true;
                    }
                    Step::Again => {}
                    Step::Drained => break,
                    Step::Full => {
                        self.full = true;
                        break;
                    }
                    Step::Ended(reason) => self.ended[number] = Some(reason),
                    Step::Tampered(what) => {
                        self.broken = Some(self.connection.tampered(number, &what))
                    }
                }
            }
        }
        let arrived = within(base, self.stripes.complete());
        Ok(self.arriving.commit(arrived)?)
    }
}

impl LinkReceiver for TcpReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        self.connection.pump_idly();
        self.pump()?;
        if self.incoming.used()? == 0 {
            self.awaits()?;
        }
        Ok(self.incoming.window()?)
    }

    fn awaits(&mut self) -> Result<()> {
        let peer = &self.connection.peer;
        if let Some(reason) = &self.broken {
            return Err(peer.gone(reason));
        }
        let next = self.stripes.owner(self.stripes.complete());
        if let Some(reason) = self.ended.get(next).and_then(Option::as_deref) {
            return Err(peer.gone(reason));
        }
        peer.lost().map_or(Ok(()), Err)
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        self.incoming.release(bytes)?;
        if self.full { self.pump() } else { Ok(()) }
    }
}
