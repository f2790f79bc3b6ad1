// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The service thread of a mesh: accepts connections of peers, sends heartbeats, and detects lost
//! peers.
//!
//! Processes without the job's key cannot block this thread. It never waits for a single
//! connection, and drops a connection after [`HANDSHAKE_TIME_LIMIT`]. If more than
//! [`MAX_CONCURRENT_HANDSHAKES`] handshakes are open, it drops one: of the connections without a
//! verified hello, the oldest from the address that has the most of them. A rank sends its code in
//! the first message, so a flood of unverified connections evicts only other unverified
//! connections.
//!
//! A rank watches the ranks of its host and few ranks of other hosts. When it finds one of them
//! lost, it reports the loss to all ranks with which it exchanges heartbeats, and they forward the
//! report. A rank that watches the lost rank itself forwards the report but does not act on it: if
//! only the network between two other ranks is broken, this rank can still communicate with both.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use farandole_world::Rank;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};

use crate::acceptor_handshake::{AcceptorHandshake, AcceptorProgress};
use crate::handshake::HANDSHAKE_TIME_LIMIT;
use crate::mesh_state::MeshState;
use crate::peer_state::PeerState;
use crate::peer_watch::{PeerLiveness, PeerWatch, loss_report_allowance};
use crate::service_inbox::{MonitoredLink, RetiredSocket};
use crate::tcp::path_liveness::{PathSilence, TcpInfoSnapshot};
use crate::{Error, Result};

/// Largest number of open handshakes.
// Each open handshake holds a descriptor, and a flood must not use up all descriptors of the
// process.
const MAX_CONCURRENT_HANDSHAKES: usize = 128;
/// Pause after `accept` failed because no file descriptor or memory was free.
const DESCRIPTOR_SHORTAGE_PAUSE: Duration = Duration::from_millis(20);
/// Shortest time that a connection may stay unconfirmed. TCP retransmits a lost packet after 0.2 to
/// 0.4 s, and after twice that time if the retransmission is lost, too.
const MIN_RETRANSMISSION_TIME: Duration = Duration::from_millis(900);
/// Size of a read from a retired socket in bytes, and reads of one socket before the next socket is
/// served.
const DISCARD_READ_LIMITS: (usize, usize) = (64 << 10, 32);

const EVENT_TOKEN: u64 = 0;
const TCP_LISTENER_TOKEN: u64 = 1;
const UNIX_LISTENER_TOKEN: u64 = 2;
const FIRST_FREE_TOKEN: u64 = 3;

pub(crate) struct MeshListeners {
    pub(crate) tcp: Vec<TcpListener>,
    pub(crate) unix: Option<UnixListener>,
}

/// A TCP connection of a link that this thread monitors.
struct MonitoredConnection {
    connection: Weak<dyn MonitoredLink>,
    /// Number of the connection in its link.
    number: usize,
    silence: PathSilence,
}

pub(crate) struct MeshService {
    shared: Arc<MeshState>,
    listeners: MeshListeners,
    epoll: OwnedFd,
    /// Unfinished handshakes by token. Tokens grow, so the first entry is the oldest.
    incoming: BTreeMap<u64, AcceptorHandshake>,
    watched: BTreeMap<u64, PeerWatch>,
    /// Losses that were reported to all watched peers, with their reasons.
    broadcast_losses: BTreeMap<Rank, String>,
    /// Connections by token, until they break or are dropped. This thread does not read or write
    /// their data.
    monitored_connections: BTreeMap<u64, MonitoredConnection>,
    /// Sockets of dropped links, until their peers have confirmed the end of the stream.
    retired: Vec<RetiredSocket>,
    next: u64,
    interval: Duration,
}

impl MeshService {
    pub(crate) fn new(shared: Arc<MeshState>, listeners: MeshListeners) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(Error::failed_call_mapper("epoll_create"))?;
        register_readable(&epoll, &shared.inbox.event, EVENT_TOKEN)?;
        for tcp in &listeners.tcp {
            tcp.set_nonblocking(true).map_err(Error::failed_call_mapper("ioctl"))?;
            register_readable(&epoll, tcp, TCP_LISTENER_TOKEN)?;
        }
        if let Some(unix) = &listeners.unix {
            unix.set_nonblocking(true).map_err(Error::failed_call_mapper("ioctl"))?;
            register_readable(&epoll, unix, UNIX_LISTENER_TOKEN)?;
        }
        let interval =
            (shared.peer_timeout / 10).clamp(Duration::from_millis(5), Duration::from_millis(500));
        Ok(Self {
            shared,
            listeners,
            epoll,
            incoming: BTreeMap::new(),
            watched: BTreeMap::new(),
            broadcast_losses: BTreeMap::new(),
            monitored_connections: BTreeMap::new(),
            retired: Vec::new(),
            next: FIRST_FREE_TOKEN,
            interval,
        })
    }

    /// Serves until the mesh stops.
    pub(crate) fn run(mut self) {
        let mut last = Instant::now();
        let mut pause = self.interval;
        while !self.shared.inbox.is_stopping() {
            let left = (last + pause).saturating_duration_since(Instant::now());
            for token in self.wait_for_events(left) {
                self.serve_event(token);
            }
            let lived = last.elapsed();
            if lived >= pause {
                last = Instant::now();
                // If this process was stopped itself, the silence of its peers during that time
                // does not count.
                self.run_liveness_tick(lived.min(2 * pause));
                // Frequent checks measure silence more precisely, so a late answer is less often
                // taken for a loss.
                let waits =
                    self.monitored_connections.values().any(|path| path.silence.is_ongoing());
                pause = if waits { self.interval / 5 } else { self.interval };
            }
        }
        // Peers that were dialled just now also need the goodbye: they would take the end of the
        // connection for the death of this process.
        for watch in self.watched.values_mut().chain(&mut self.shared.inbox.take_peer_watches()) {
            watch.send_goodbye();
        }
    }

    fn wait_for_events(&self, left: Duration) -> Vec<u64> {
        // Rounded up: waiting for zero milliseconds before a tick would spin.
        let left = Timespec::try_from(left + Duration::from_millis(1))
            .unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let found = epoll::wait(&self.epoll, &mut events[..], Some(&left)).unwrap_or(0);
        events[..found].iter().map(|event| event.data.u64()).collect()
    }

    fn serve_event(&mut self, token: u64) {
        match token {
            EVENT_TOKEN => {
                // The read resets the event; its count is unused.
                let _ = rustix::io::read(&self.shared.inbox.event, &mut [0_u8; 8]);
                for watch in self.shared.inbox.take_peer_watches() {
                    self.watch_peer(watch);
                }
                for path in self.shared.inbox.take_monitored_links() {
                    self.monitor_link(&path);
                }
                self.retired.extend(self.shared.inbox.take_retired_sockets());
            }
            TCP_LISTENER_TOKEN => (0..self.listeners.tcp.len())
                .for_each(|number| self.accept_connections(Some(number))),
            UNIX_LISTENER_TOKEN => self.accept_connections(None),
            token => {
                if let Some(incoming) = self.incoming.remove(&token) {
                    // The handshake may hand the socket to a link. This thread must then get no
                    // more events for it.
                    let _ = epoll::delete(&self.epoll, &incoming);
                    self.advance_handshake(token, incoming);
                } else if let Some(watch) = self.watched.get_mut(&token) {
                    let mut losses = Vec::new();
                    let verdict = watch.read_liveness_updates(self.shared.rank, &mut losses);
                    for (rank, reason) in losses {
                        self.handle_reported_loss(rank, reason);
                    }
                    self.apply_liveness(token, verdict);
                } else if let Some(path) = self.monitored_connections.remove(&token) {
                    self.report_broken_connection(&path);
                }
            }
        }
    }

    /// Monitors the sockets of a link for errors. One event per socket is enough: the user of the
    /// link detects the end of the stream itself.
    fn monitor_link(&mut self, path: &Weak<dyn MonitoredLink>) {
        let Some(connection) = path.upgrade() else { return };
        for (number, socket) in connection.sockets().iter().enumerate() {
            let token = self.next_token();
            // The kernel always reports errors. Without ONESHOT, a broken socket would wake this
            // thread for ever.
            let flags = epoll::EventFlags::ONESHOT;
            // If the socket cannot be added, the periodic check still covers it.
            let _ = epoll::add(&self.epoll, socket, epoll::EventData::new_u64(token), flags);
            let path = MonitoredConnection {
                connection: Weak::clone(path),
                number,
                silence: PathSilence::default(),
            };
            self.monitored_connections.insert(token, path);
        }
    }

    fn report_broken_connection(&self, path: &MonitoredConnection) {
        if let Some(connection) = path.connection.upgrade()
            && let Some(socket) = connection.sockets().get(path.number)
            && let Ok(Err(error)) = sockopt::socket_error(socket)
            // The peer closed its end of this link, which is allowed at any time and is not a loss.
            && error != Errno::PIPE
        {
            self.shared.record_loss(
                connection.peer(),
                format!("its connection broke: {error}"),
                false,
            );
        }
    }

    /// Accepts connections on the TCP listener with this number, or on the Unix socket for `None`.
    fn accept_connections(&mut self, number: Option<usize>) {
        // The number is limited so that a flood of connections cannot delay the liveness check.
        for _ in 0..MAX_CONCURRENT_HANDSHAKES {
            let accepted = match number {
                None => self.listeners.unix.as_ref().map(accept_unix_connection),
                Some(number) => self.listeners.tcp.get(number).map(accept_tcp_connection),
            };
            let Some(accepted) = accepted else { return };
            match accepted {
                Ok((socket, source)) => self.begin_handshake(socket, source),
                Err(error) => {
                    let errno = Errno::from_io_error(&error);
                    if matches!(
                        errno,
                        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
                    ) {
                        // The listener stays readable while the connection is not accepted, so the
                        // loop would spin.
                        std::thread::sleep(DESCRIPTOR_SHORTAGE_PAUSE);
                    }
                    return;
                }
            }
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd, source: Option<IpAddr>) {
        let waiting = self
            .incoming
            .iter()
            .map(|(token, one)| (*token, one.has_verified_hello(), one.source_address()));
        if self.incoming.len() >= MAX_CONCURRENT_HANDSHAKES
            && let Some(unseated) =
                choose_evicted_connection(waiting).and_then(|token| self.incoming.remove(&token))
        {
            self.refuse_connection(unseated);
        }
        let token = self.next_token();
        self.advance_handshake(
            token,
            AcceptorHandshake::new(socket, source, Instant::now() + HANDSHAKE_TIME_LIMIT),
        );
    }

    fn advance_handshake(&mut self, token: u64, incoming: AcceptorHandshake) {
        match incoming.advance_handshake(&self.shared) {
            AcceptorProgress::Waiting(incoming) => {
                if register_readable(&self.epoll, &incoming, token).is_ok() {
                    self.incoming.insert(token, *incoming);
                }
            }
            AcceptorProgress::Watched(watch) => self.watch_peer(watch),
            AcceptorProgress::Refused => {
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
            AcceptorProgress::Linked => {}
        }
    }

    fn refuse_connection(&self, incoming: AcceptorHandshake) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
        drop(incoming);
    }

    fn watch_peer(&mut self, mut watch: PeerWatch) {
        let token = self.next_token();
        // A peer that connects late has missed these reports, and may watch none of the lost ranks.
        for (rank, reason) in &self.broadcast_losses {
            watch.report_rank_loss(*rank, reason);
        }
        if let Some(descriptor) = watch.poll_descriptor() {
            // If the descriptor cannot be added, the peer is still watched by its heartbeat.
            drop(register_readable(&self.epoll, descriptor, token));
        }
        self.watched.insert(token, watch);
    }

    fn apply_liveness(&mut self, token: u64, verdict: PeerLiveness) {
        if let PeerLiveness::Lost { reason, orderly } = verdict
            && let Some(mut watch) = self.watched.remove(&token)
        {
            if !orderly {
                // Without this message, the peer would see only the end of the connection and
                // report that as the reason.
                watch.report_rank_loss(watch.peer.rank, &reason);
            }
            if let Some(descriptor) = watch.poll_descriptor() {
                // A failure does not matter: the descriptor is closed next.
                let _ = epoll::delete(&self.epoll, descriptor);
            }
            // An orderly end is recorded, too: links to this peer must not wait for more bytes.
            self.shared.record_loss(&watch.peer, reason.clone(), orderly);
            if !orderly {
                self.broadcast_loss(watch.peer.rank, reason);
            }
        }
    }

    /// Handles the report of a peer that another rank was lost.
    fn handle_reported_loss(&mut self, rank: Rank, reason: String) {
        let Some(peer) = self.shared.peers.get(rank.index()).map(Arc::clone) else { return };
        let is_watched = self.watched.values().any(|watch| watch.peer.rank == rank);
        // A report about this rank cannot be true here, and a watched rank has its own evidence.
        if rank != self.shared.rank && !is_watched {
            self.shared.record_loss(&peer, reason.clone(), false);
        }
        self.broadcast_loss(rank, reason);
    }

    /// Reports a loss to all watched peers, once for each lost rank.
    fn broadcast_loss(&mut self, rank: Rank, reason: String) {
        // Reports travel in both directions of a ring of ranks; without this check they would never
        // stop.
        if let Entry::Vacant(vacant) = self.broadcast_losses.entry(rank) {
            let reason = vacant.insert(reason);
            self.watched.values_mut().for_each(|watch| watch.report_rank_loss(rank, reason));
        }
    }

    fn run_liveness_tick(&mut self, lived: Duration) {
        self.shared.parker.own_doorbell().increment_heartbeat();
        // Shorter than the peer timeout if other ranks depend on the report, which also takes time.
        let timeout = self.shared.max_peer_silence();
        let verdicts: Vec<_> = self
            .watched
            .iter_mut()
            .map(|(token, watch)| (*token, watch.send_and_check_heartbeat(lived, timeout)))
            .collect();
        for (token, verdict) in verdicts {
            self.apply_liveness(token, verdict);
        }
        self.monitored_connections.retain(|_, path| path.connection.strong_count() > 0);
        self.retired
            .retain(|retired| retired.peer.loss_error().is_none() && drain_retired_socket(retired));
        for (peer, silent) in self.silent_connections(lived) {
            let reason =
                format!("nothing that was sent to it in the last {silent:.1?} was confirmed");
            self.shared.record_loss(&peer, reason, false);
        }
        let now = Instant::now();
        while let Some(oldest) =
            self.incoming.first_entry().filter(|oldest| oldest.get().deadline <= now)
        {
            let oldest = oldest.remove();
            self.refuse_connection(oldest);
        }
    }

    /// Returns the connections that have been silent for too long, or will have been before the
    /// check after the next one, because this thread may be scheduled late. A peer that still sends
    /// heartbeats may be unreachable on one connection. The limit leaves time for ranks that learn
    /// of the loss only from this rank.
    fn silent_connections(&mut self, lived: Duration) -> Vec<(Arc<PeerState>, Duration)> {
        let timeout = self.shared.peer_timeout;
        let limit = (timeout - loss_report_allowance(timeout)).max(MIN_RETRANSMISSION_TIME);
        let look = |path: &mut MonitoredConnection| {
            let connection = path.connection.upgrade()?;
            let sight =
                TcpInfoSnapshot::query_tcp_info(connection.sockets().get(path.number)?).ok()?;
            let silent = path.silence.update_silence(lived, sight);
            (silent + 2 * lived >= limit).then(|| (Arc::clone(connection.peer()), silent))
        };
        self.monitored_connections.values_mut().filter_map(look).collect()
    }

    fn next_token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn accept_unix_connection(listener: &UnixListener) -> io::Result<(OwnedFd, Option<IpAddr>)> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    Ok((OwnedFd::from(stream), None))
}

fn accept_tcp_connection(listener: &TcpListener) -> io::Result<(OwnedFd, Option<IpAddr>)> {
    let (stream, from) = listener.accept()?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // A dual-stack listener shows IPv4 peers as IPv6; both forms must count as one source.
    Ok((OwnedFd::from(stream), Some(from.ip().to_canonical())))
}

/// Chooses the connection to evict. `waiting` lists connections by age, each with its token,
/// whether its hello was verified, and its source. Prefers unverified connections, and among them
/// the oldest one of the source that has the most. Returns `None` if there are no connections.
fn choose_evicted_connection(
    waiting: impl Iterator<Item = (u64, bool, Option<IpAddr>)> + Clone,
) -> Option<u64> {
    let strangers = waiting.clone().any(|(_, vouched, _)| !vouched);
    // A source with a verified hello is a rank, so it goes only if no stranger is left.
    let candidates = waiting.filter(|(_, vouched, _)| !(strangers && *vouched));
    let mut sources: BTreeMap<Option<IpAddr>, (usize, u64)> = BTreeMap::new();
    for (token, _, source) in candidates {
        sources.entry(source).or_insert((0, token)).0 += 1;
    }
    sources
        .values()
        // A flood usually comes from one address, so peers at other addresses keep their slots.
        .max_by_key(|(count, oldest)| (*count, Reverse(*oldest)))
        .map(|(_, oldest)| *oldest)
}

/// Discards the bytes that arrived on a retired socket, because a peer may close its end only after
/// it has sent everything. Returns whether the socket is still needed.
fn drain_retired_socket(retired: &RetiredSocket) -> bool {
    let mut scrap = vec![0; DISCARD_READ_LIMITS.0];
    for _ in 0..DISCARD_READ_LIMITS.1 {
        match recv(&retired.socket, &mut scrap[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::AGAIN) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    TcpInfoSnapshot::query_tcp_info(&retired.socket).is_ok_and(|sight| !sight.end_confirmed)
}

fn register_readable(epoll: &OwnedFd, source: impl AsFd, token: u64) -> Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
        .map_err(Error::failed_call_mapper("epoll_ctl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_way_first_and_of_these_the_oldest_from_where_most_come() {
        let [here, there] = [1, 2].map(|last| Some(IpAddr::from([10, 0, 0, last])));
        let waiting = [
            (3, true, there),
            (4, false, here),
            (5, false, there),
            (6, false, there),
            (7, true, there),
            (8, false, None),
        ];
        assert_eq!(choose_evicted_connection(waiting.into_iter()), Some(5));
        // With as many from each source: the oldest of all.
        assert_eq!(
            choose_evicted_connection(waiting.into_iter().filter(|one| one.0 != 6)),
            Some(4)
        );
        assert_eq!(
            choose_evicted_connection(waiting.into_iter().filter(|one| one.1)),
            Some(3),
            "nobody else is left"
        );
        assert_eq!(choose_evicted_connection(std::iter::empty()), None);
    }
}
