// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Link halves over one or several TCP connections. Each direction has a private ring; polling
//! either half moves bytes between the rings and the sockets.
//!
//! Bytes are assigned to the connections in fixed blocks ([`stripes`]). The receiver reads each
//! connection directly to the positions of its blocks in the ring, so no copy is needed to restore
//! the order. Records ([`crate::record`]) are encrypted in the ring of the sender and decrypted in
//! the ring of the receiver.
//!
//! Measured between two network namespaces of one machine, a path without delay and without loss,
//! both directions at once, in processor time per gigabyte:
//! - Congestion control: with BBR, whose timers pace every burst, 0.57 s; with CUBIC or Reno, 0.30
//!   s. So links ask for CUBIC, which is the default of most systems, and keep the system's choice
//!   where CUBIC is not allowed. This is the cost of BBR on a path without congestion. Neither was
//!   measured over a network with delay and loss; there the system's choice may be faster (an empty
//!   `FARANDOLE_TCP_CONGESTION=` selects it).
//! - `MSG_ZEROCOPY`: 0.45 to 0.77 s instead of 0.30 s. Between namespaces the kernel copies anyway,
//!   and pinning pages and collecting completions is extra work. Not used.
//! - Explicit socket buffers of 1 to 4 MiB instead of the kernel's own tuning: 0.28 to 0.33 s, and
//!   less throughput. Not set.
//! - Calls of 1 MiB instead of 256 KiB: 0.24 s. So a call moves all available bytes.
//! - A ring of 512 KiB to 1 MiB, which stays in the cache, instead of 4 MiB: 0.17 to 0.25 s. So an
//!   empty ring starts again at its beginning.
//! - Two connections: the same as one. Several connections help where a network limits each flow
//!   (`FARANDOLE_TCP_STREAMS`).

pub(crate) mod path_liveness;
mod receiving;
mod sending;
pub(crate) mod stripes;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use farandole_shm::{ForkGuard, RingConsumer, RingProducer, create_private_ring, rewind_ring};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown, sockopt};

use crate::link_traffic::count_sent_bytes;
use crate::mesh_state::MeshState;
use crate::peer_state::PeerState;
use crate::secured_connection::SecuredConnection;
use crate::service_inbox::MonitoredLink;
use crate::{Error, Link, LinkKind, LinkReceiver, LinkSender, Parker, Result, addresses};
use path_liveness::TcpInfoSnapshot;
use receiving::{ReceiveStep, RecordReceiver};
use sending::RecordSender;
use stripes::StripeCursors;

const CONNECTION_CLOSED_REASON: &str = "it closed the connection";

/// State that both halves of a link share.
pub(crate) struct TcpLinkState {
    sockets: Vec<OwnedFd>,
    peer: Arc<PeerState>,
    parker: Parker,
    /// The mesh that takes over the sockets when the link is dropped.
    mesh: Weak<MeshState>,
    channel: u32,
    guard: ForkGuard,
    /// The outgoing ring as the sockets read it. Lock order: no other lock is taken while this is
    /// held.
    outgoing: Mutex<OutgoingRing>,
    /// Whether the outgoing ring has bytes: then a poll of the receiver also sends them.
    unsent: AtomicBool,
}

impl Drop for TcpLinkState {
    fn drop(&mut self) {
        for socket in &self.sockets {
            self.parker.unwatch_socket(socket);
        }
        // Closing a socket with unread bytes sends a reset; the peer would then see a failure
        // instead of an orderly end.
        self.sockets.retain(|socket| {
            TcpInfoSnapshot::query_tcp_info(socket).is_ok_and(|sight| !sight.end_confirmed)
        });
        if self.guard.is_original_process()
            && self.peer.loss_error().is_none()
            && let Some(mesh) = self.mesh.upgrade()
        {
            mesh.inbox.retire_sockets(&self.peer, std::mem::take(&mut self.sockets));
        }
    }
}

impl MonitoredLink for TcpLinkState {
    fn peer(&self) -> &Arc<PeerState> {
        &self.peer
    }

    fn sockets(&self) -> &[OwnedFd] {
        &self.sockets
    }
}

impl TcpLinkState {
    /// Sends as many bytes as the sockets accept.
    fn pump_outgoing(&self, outgoing: &mut OutgoingRing) -> Result<()> {
        let moved = outgoing.pump_sockets(&self.sockets, &self.peer);
        // Pairs with the load in `pump_if_unsent`. A stale value costs one poll, because the sender
        // polls too.
        self.unsent.store(outgoing.pending.used_bytes()? > 0, Ordering::Release);
        moved
    }

    /// Reports that the bytes of a connection were changed on the way. The peer is then lost,
    /// because none of its connections can be trusted.
    fn report_tampering(&self, number: usize, what: &str) -> String {
        let address =
            self.sockets.get(number).map_or(String::new(), addresses::describe_peer_address);
        let channel = self.channel;
        let reason = format!("on connection {number} of channel {channel} with {address}, {what}");
        // Without a mesh, the process has left the job, and no other link needs the news.
        if let Some(mesh) = self.mesh.upgrade() {
            mesh.record_loss(&self.peer, reason.clone(), false);
        }
        reason
    }

    /// Sends pending bytes during a poll of the receiver. Errors are dropped, because the sender's
    /// own polls report them.
    fn pump_if_unsent(&self) {
        if self.unsent.load(Ordering::Acquire)
            // The receiver must not wait for the sender's thread, which holds the lock during a
            // system call.
            && let Some(mut outgoing) = self.outgoing.try_lock()
        {
            drop(self.pump_outgoing(&mut outgoing));
        }
    }
}

struct OutgoingRing {
    pending: RingConsumer,
    /// By connection number.
    sending: Vec<RecordSender>,
    stripes: StripeCursors,
    broken: Option<String>,
}

impl OutgoingRing {
    fn pump_sockets(&mut self, sockets: &[OwnedFd], peer: &PeerState) -> Result<()> {
        // A record that was sent in part cannot be continued on a broken connection.
        if let Some(reason) = &self.broken {
            return Err(peer.loss_error_or(reason));
        }
        let base = self.stripes.completed_position();
        let window = self.pending.window_mut()?;
        let end = base + window.len() as u64;
        for (number, (socket, sending)) in sockets.iter().zip(&mut self.sending).enumerate() {
            while let Some(extent) = self.stripes.next_extent(number, end) {
                let bytes =
                    &mut window[window_offset(base, extent.start)..window_offset(base, extent.end)];
                match sending.send_record_step(socket, bytes) {
                    Ok(sent) => self.stripes.advance_cursor(number, sent as u64),
                    Err(Errno::AGAIN) => break,
                    Err(error) => {
                        // The peer closed its end in order; the text of EPIPE would send users to
                        // the network.
                        let reason = if error == Errno::PIPE {
                            CONNECTION_CLOSED_REASON.to_owned()
                        } else {
                            error.to_string()
                        };
                        let lost = peer.loss_error_or(&reason);
                        self.broken = Some(reason);
                        return Err(lost);
                    }
                }
            }
        }
        let done = window_offset(base, self.stripes.completed_position());
        self.pending.release(done)?;
        // Checked last: a peer that is lost on another connection may still receive final bytes on
        // this one.
        peer.loss_error().map_or(Ok(()), Err)
    }
}

/// Returns the offset of a position in a window that begins at `base`.
fn window_offset(base: u64, position: u64) -> usize {
    usize::try_from(position.saturating_sub(base)).unwrap_or(usize::MAX)
}

/// Creates a link over connections, which are ordered by their numbers. Also returns the state
/// under the link. `congestion` names the congestion control algorithm to ask for.
pub(crate) fn link_over_connections(
    connections: Vec<SecuredConnection>,
    peer: Arc<PeerState>,
    mesh: &Arc<MeshState>,
    channel: u32,
    capacity: usize,
    congestion: &str,
) -> Result<(Link, Arc<TcpLinkState>)> {
    let parker = mesh.parker.clone();
    let (mut sockets, mut sending, mut receiving) = (Vec::new(), Vec::new(), Vec::new());
    for SecuredConnection { socket, keys } in connections {
        sockets.push(socket);
        sending.push(RecordSender::new(keys.sending));
        receiving.push(RecordReceiver::new(keys.receiving));
    }
    for socket in &sockets {
        rustix::io::ioctl_fionbio(socket, true).map_err(Error::failed_call_mapper("ioctl"))?;
        // Ranks exchange small messages in turn; Nagle's algorithm would delay each by a round
        // trip.
        sockopt::set_tcp_nodelay(socket, true).map_err(Error::failed_call_mapper("setsockopt"))?;
        path_liveness::enable_keepalive(socket, mesh.peer_timeout)
            .map_err(Error::failed_call_mapper("setsockopt"))?;
        if !congestion.is_empty() {
            // If the algorithm is missing or not allowed, the system's default stays.
            let _ = sockopt::set_tcp_congestion(socket, congestion);
        }
        parker.watch_socket(socket)?;
    }
    let rank = peer.rank;
    let (outgoing, pending) = create_private_ring(capacity)?;
    let (arriving, incoming) = create_private_ring(capacity)?;
    let stripes = StripeCursors::new(sockets.len());
    let ended = vec![None; sockets.len()];
    let connection = Arc::new(TcpLinkState {
        sockets,
        peer,
        parker,
        // Weak: a link may outlive its mesh.
        mesh: Arc::downgrade(mesh),
        channel,
        guard: ForkGuard::new(),
        outgoing: Mutex::new(OutgoingRing {
            pending,
            sending,
            stripes: stripes.clone(),
            broken: None,
        }),
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
    connection: Arc<TcpLinkState>,
    /// The outgoing ring as the caller writes it.
    outgoing: RingProducer,
}

impl TcpSender {
    fn pump_outgoing(&self) -> Result<MutexGuard<'_, OutgoingRing>> {
        let mut outgoing = self.connection.outgoing.lock();
        self.connection.pump_outgoing(&mut outgoing)?;
        Ok(outgoing)
    }
}

impl LinkSender for TcpSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        let mut pumped = self.connection.outgoing.lock();
        self.connection.pump_outgoing(&mut pumped)?;
        // An empty ring starts again at its beginning, so small messages stay in the cache.
        rewind_ring(&mut self.outgoing, &mut pumped.pending);
        drop(pumped);
        Ok(self.outgoing.window()?)
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.outgoing.commit(bytes)?;
        count_sent_bytes(LinkKind::Tcp, bytes);
        self.pump_outgoing().map(drop)
    }

    fn flush(&mut self) -> Result<bool> {
        if self.outgoing.used_bytes()? == 0 {
            return Ok(true);
        }
        Ok(self.pump_outgoing()?.pending.used_bytes()? == 0)
    }

    fn send_final_bytes(&mut self, bytes: &[u8]) {
        // Errors do not matter: the peer is lost anyway.
        drop(self.pump_outgoing());
        let Ok(window) = self.outgoing.window() else { return };
        let fits = bytes.len().min(window.len());
        window[..fits].copy_from_slice(&bytes[..fits]);
        if self.outgoing.commit(fits).is_ok() {
            drop(self.pump_outgoing());
        }
    }
}

impl Drop for TcpSender {
    fn drop(&mut self) {
        if self.connection.guard.is_original_process() {
            // Bytes that the peer does not accept any more are lost, as documented for a drop.
            let mut outgoing = self.connection.outgoing.lock();
            drop(self.connection.pump_outgoing(&mut outgoing));
            let all = outgoing.pending.used_bytes().is_ok_and(|left| left == 0);
            for (socket, sending) in self.connection.sockets.iter().zip(&mut outgoing.sending) {
                // The end record says that all bytes were sent, so a link that dropped bytes must
                // not send it.
                if all {
                    sending.send_end_record(socket);
                }
                let _ = shutdown(socket, Shutdown::Write);
            }
        }
    }
}

struct TcpReceiver {
    connection: Arc<TcpLinkState>,
    /// The incoming ring as the sockets write it.
    arriving: RingProducer,
    /// The incoming ring as the caller reads it.
    incoming: RingConsumer,
    /// By connection number.
    receiving: Vec<RecordReceiver>,
    stripes: StripeCursors,
    /// The reason why no more bytes will come, by connection number.
    ended: Vec<Option<String>>,
    /// The reason why no further bytes can be trusted.
    broken: Option<String>,
    /// Whether the ring was full: bytes may then wait in a socket without a new epoll edge.
    full: bool,
}

impl TcpReceiver {
    /// Returns the error of the link if no more bytes will come, apart from those in the sockets.
    fn end_error(&self) -> Option<Error> {
        let peer = &self.connection.peer;
        // Only the connection of the next byte counts: the others may end first and still have
        // bytes here.
        let next = self.stripes.connection_at(self.stripes.completed_position());
        let ended = || self.ended.get(next).and_then(Option::as_ref);
        match self.broken.as_ref().or_else(ended) {
            Some(reason) => Some(peer.loss_error_or(reason)),
            None => peer.loss_error(),
        }
    }

    fn pump_incoming(&mut self) -> Result<()> {
        // Bytes behind a gap, and parts of a record, are at their positions and must not move.
        if !self.stripes.has_gaps()
            && !self.receiving.iter().any(RecordReceiver::has_partial_in_ring)
        {
            rewind_ring(&mut self.arriving, &mut self.incoming);
        }
        let base = self.stripes.completed_position();
        let window = self.arriving.window()?;
        let end = base + window.len() as u64;
        self.full = false;
        let connections = self.connection.sockets.iter().zip(&mut self.receiving).enumerate();
        for (number, (socket, receiving)) in connections {
            let mut seen = false;
            receiving.begin_poll();
            while self.ended[number].is_none() && self.broken.is_none() {
                let (extent, block) = self.stripes.next_extent_and_room(number, end);
                // A block that begins behind the window has no space at all.
                let space = window
                    .get_mut(window_offset(base, extent.start)..window_offset(base, extent.end));
                let space = space.unwrap_or_default();
                match receiving.receive_record_step(socket, space, window_offset(0, block), seen) {
                    ReceiveStep::Placed(bytes) => {
                        self.stripes.advance_cursor(number, bytes as u64);
                        seen = true;
                    }
                    ReceiveStep::Again => {}
                    ReceiveStep::Drained => break,
                    ReceiveStep::Full => {
                        self.full = true;
                        break;
                    }
                    ReceiveStep::Ended(reason) => self.ended[number] = Some(reason),
                    ReceiveStep::Tampered(what) => {
                        self.broken = Some(self.connection.report_tampering(number, &what))
                    }
                }
            }
        }
        let arrived = window_offset(base, self.stripes.completed_position());
        Ok(self.arriving.commit(arrived)?)
    }
}

impl LinkReceiver for TcpReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        self.connection.pump_if_unsent();
        self.pump_incoming()?;
        if self.incoming.used_bytes()? == 0 {
            self.check_not_ended(0)?;
        }
        Ok(self.incoming.window()?)
    }

    fn check_not_ended(&mut self, seen_bytes: usize) -> Result<()> {
        let Some(error) = self.end_error() else { return Ok(()) };
        // The peer may have sent bytes and closed the link since the caller's window.
        self.pump_incoming()?;
        if self.incoming.used_bytes()? > seen_bytes { Ok(()) } else { Err(error) }
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        self.incoming.release(bytes)?;
        // The socket is watched edge-triggered: bytes that did not fit cause no further event.
        if self.full { self.pump_incoming() } else { Ok(()) }
    }
}
