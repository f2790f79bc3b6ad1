// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The thread of a mesh: accepts peers, shows that this process lives, and notices when others do
//! not.
//!
//! Strangers cannot hold it up: it never waits for one connection, drops each after [`PATIENCE`],
//! and one when there are more than [`MOST`]: of those that have not shown the key's code, the
//! oldest from where most of them come. A rank shows it in its first message, so a flood unseats
//! its own kind.
//!
//! A rank watches the ranks of its host and few ranks of other hosts. When it sees that one of them
//! is lost, it tells all ranks with which it exchanges heartbeats, and these pass it on. A rank
//! that watches the lost one itself passes the news on and does not act on it: if only the network
//! between two other ranks is broken, its engine can still speak with both.

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

use crate::incoming::{Incoming, Progress};
use crate::peer::Peer;
use crate::shared::{Retired, Shared};
use crate::tcp::Connection;
use crate::tcp::path::{Sight, Silence};
use crate::watch::{Verdict, Watch, hearsay};
use crate::{Error, Result};

/// The longest a handshake may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Handshakes at the same time.
const MOST: usize = 128;
/// Pause after the system had no descriptor for a connection.
const EXHAUSTED: Duration = Duration::from_millis(20);
/// A connection is given this time at least: TCP repeats what a lost packet carried after 0.2 to
/// 0.4 s, and one that is lost again twice as long after that.
const REPETITIONS: Duration = Duration::from_millis(900);
/// Bytes read at a time of what nobody wants, and how often before others have their turn.
const SCRAP: (usize, usize) = (64 << 10, 32);

const EVENT: u64 = 0;
const TCP: u64 = 1;
const UNIX: u64 = 2;
const FIRST: u64 = 3;

pub(crate) struct Listeners {
    pub(crate) tcp: Vec<TcpListener>,
    pub(crate) unix: Option<UnixListener>,
}

/// A connection of a link.
struct Path {
    connection: Weak<Connection>,
    /// Among the connections of its link.
    number: usize,
    silence: Silence,
}

pub(crate) struct Service {
    shared: Arc<Shared>,
    listeners: Listeners,
    epoll: OwnedFd,
    /// By ascending age of their tokens: the first is the oldest.
    incoming: BTreeMap<u64, Incoming>,
    watched: BTreeMap<u64, Watch>,
    /// Losses that every peer was told of, with their reasons.
    told: BTreeMap<Rank, String>,
    /// Until they break or are gone. Their data is no concern of this thread.
    paths: BTreeMap<u64, Path>,
    /// Until their peers know of their end.
    retired: Vec<Retired>,
    next: u64,
    interval: Duration,
}

impl Service {
    pub(crate) fn new(shared: Arc<Shared>, listeners: Listeners) -> Result<Self> {
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::of("epoll_create"))?;
        add(&epoll, &shared.event, EVENT)?;
        for tcp in &listeners.tcp {
            tcp.set_nonblocking(true).map_err(Error::of("ioctl"))?;
            add(&epoll, tcp, TCP)?;
        }
        if let Some(unix) = &listeners.unix {
            unix.set_nonblocking(true).map_err(Error::of("ioctl"))?;
            add(&epoll, unix, UNIX)?;
        }
        let interval =
            (shared.peer_timeout / 10).clamp(Duration::from_millis(5), Duration::from_millis(500));
        Ok(Self {
            shared,
            listeners,
            epoll,
            incoming: BTreeMap::new(),
            watched: BTreeMap::new(),
            told: BTreeMap::new(),
            paths: BTreeMap::new(),
            retired: Vec::new(),
            next: FIRST,
            interval,
        })
    }

    /// Serves until stopped.
    pub(crate) fn run(mut self) {
        let mut last = Instant::now();
        let mut pause = self.interval;
        while !self.shared.stopping() {
            let left = (last + pause).saturating_duration_since(Instant::now());
            for token in self.wait(left) {
                self.serve(token);
            }
            let lived = last.elapsed();
            if lived >= pause {
                last = Instant::now();
                // Whoever was stopped himself must not hold the silence of that time against
                // others.
                self.tick(lived.min(2 * pause));
                // Who looks often can wait for longer before he takes for lost what is only late.
                let waits = self.paths.values().any(|path| path.silence.lasts());
                pause = if waits { self.interval / 5 } else { self.interval };
            }
        }
        // A peer that was dialled a moment ago would take our end for our death.
        for watch in self.watched.values_mut().chain(&mut self.shared.take_watches()) {
            watch.goodbye();
        }
    }

    fn wait(&self, left: Duration) -> Vec<u64> {
        // Round up: a wait of zero milliseconds before the tick would spin.
        let left = Timespec::try_from(left + Duration::from_millis(1))
            .unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let found = epoll::wait(&self.epoll, &mut events[..], Some(&left)).unwrap_or(0);
        events[..found].iter().map(|event| event.data.u64()).collect()
    }

    fn serve(&mut self, token: u64) {
        match token {
            EVENT => {
                // Read to reset; the count means nothing.
                let _ = rustix::io::read(&self.shared.event, &mut [0_u8; 8]);
                for watch in self.shared.take_watches() {
                    self.watch(watch);
                }
                for path in self.shared.take_paths() {
                    self.follow(&path);
                }
                self.retired.extend(self.shared.take_retired());
            }
            TCP => (0..self.listeners.tcp.len()).for_each(|number| self.accept(Some(number))),
            UNIX => self.accept(None),
            token => {
                if let Some(incoming) = self.incoming.remove(&token) {
                    // It may be handed on: then its later events are not for this thread.
                    let _ = epoll::delete(&self.epoll, &incoming);
                    self.advance(token, incoming);
                } else if let Some(watch) = self.watched.get_mut(&token) {
                    let mut losses = Vec::new();
                    let verdict = watch.news(self.shared.rank, &mut losses);
                    for (rank, reason) in losses {
                        self.hear(rank, reason);
                    }
                    self.settle(token, verdict);
                } else if let Some(path) = self.paths.remove(&token) {
                    self.broke(&path);
                }
            }
        }
    }

    /// Waits for nothing but an error, and for that once: who uses the link hears of its end by
    /// himself.
    fn follow(&mut self, path: &Weak<Connection>) {
        let Some(connection) = path.upgrade() else { return };
        for (number, socket) in connection.sockets().iter().enumerate() {
            let token = self.token();
            let flags = epoll::EventFlags::ONESHOT;
            // One that cannot be waited for is still looked at now and then.
            let _ = epoll::add(&self.epoll, socket, epoll::EventData::new_u64(token), flags);
            let path = Path { connection: Weak::clone(path), number, silence: Silence::default() };
            self.paths.insert(token, path);
        }
    }

    fn broke(&self, path: &Path) {
        if let Some(connection) = path.connection.upgrade()
            && let Some(socket) = connection.sockets().get(path.number)
            && let Ok(Err(error)) = sockopt::socket_error(socket)
            // The peer closed its end of this link, as it may at any time; it is not lost by that.
            && error != Errno::PIPE
        {
            self.shared.lose(connection.peer(), format!("its connection broke: {error}"), false);
        }
    }

    /// Accepts on the listener of TCP with this number, or on the Unix socket.
    fn accept(&mut self, number: Option<usize>) {
        // Whoever connects without end is heard again after the next look at the clock.
        for _ in 0..MOST {
            let accepted = match number {
                None => self.listeners.unix.as_ref().map(accept_local),
                Some(number) => self.listeners.tcp.get(number).map(accept_remote),
            };
            let Some(accepted) = accepted else { return };
            match accepted {
                Ok((socket, source)) => self.begin(socket, source),
                Err(error) => {
                    let errno = Errno::from_io_error(&error);
                    if matches!(
                        errno,
                        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
                    ) {
                        std::thread::sleep(EXHAUSTED);
                    }
                    return;
                }
            }
        }
    }

    fn begin(&mut self, socket: OwnedFd, source: Option<IpAddr>) {
        let waiting =
            self.incoming.iter().map(|(token, one)| (*token, one.vouched(), one.source()));
        if self.incoming.len() >= MOST
            && let Some(unseated) = unseated(waiting).and_then(|token| self.incoming.remove(&token))
        {
            self.refuse(unseated);
        }
        let token = self.token();
        self.advance(token, Incoming::new(socket, source, Instant::now() + PATIENCE));
    }

    fn advance(&mut self, token: u64, incoming: Incoming) {
        match incoming.advance(&self.shared) {
            Progress::Waiting(incoming) => {
                if add(&self.epoll, &incoming, token).is_ok() {
                    self.incoming.insert(token, *incoming);
                }
            }
            Progress::Watched(watch) => self.watch(watch),
            Progress::Refused => {
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
            Progress::Linked => {}
        }
    }

    fn refuse(&self, incoming: Incoming) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
        drop(incoming);
    }

    fn watch(&mut self, mut watch: Watch) {
        let token = self.token();
        for (rank, reason) in &self.told {
            watch.tell(*rank, reason);
        }
        if let Some(descriptor) = watch.descriptor() {
            // A peer that cannot be waited for is still watched by its heartbeat.
            drop(add(&self.epoll, descriptor, token));
        }
        self.watched.insert(token, watch);
    }

    fn settle(&mut self, token: u64, verdict: Verdict) {
        if let Verdict::Lost { reason, orderly } = verdict
            && let Some(mut watch) = self.watched.remove(&token)
        {
            if !orderly {
                // Otherwise the peer sees only that the connection ended, and reports that in place
                // of the reason.
                watch.tell(watch.peer.rank, &reason);
            }
            if let Some(descriptor) = watch.descriptor() {
                // The descriptor is closed next in any case.
                let _ = epoll::delete(&self.epoll, descriptor);
            }
            self.shared.lose(&watch.peer, reason.clone(), orderly);
            if !orderly {
                self.tell(watch.peer.rank, reason);
            }
        }
    }

    /// A peer tells of a loss.
    fn hear(&mut self, rank: Rank, reason: String) {
        let Some(peer) = self.shared.peers.get(rank.index()).map(Arc::clone) else { return };
        let is_watched = self.watched.values().any(|watch| watch.peer.rank == rank);
        if rank != self.shared.rank && !is_watched {
            self.shared.lose(&peer, reason.clone(), false);
        }
        self.tell(rank, reason);
    }

    /// Tells all watched peers of a loss, once.
    fn tell(&mut self, rank: Rank, reason: String) {
        if let Entry::Vacant(told) = self.told.entry(rank) {
            let reason = told.insert(reason);
            self.watched.values_mut().for_each(|watch| watch.tell(rank, reason));
        }
    }

    fn tick(&mut self, lived: Duration) {
        self.shared.parker.bell().beat();
        let timeout = self.shared.longest_silence();
        let verdicts: Vec<_> = self
            .watched
            .iter_mut()
            .map(|(token, watch)| (*token, watch.tick(lived, timeout)))
            .collect();
        for (token, verdict) in verdicts {
            self.settle(token, verdict);
        }
        self.paths.retain(|_, path| path.connection.strong_count() > 0);
        self.retired.retain(|retired| retired.peer.lost().is_none() && is_needed(retired));
        for (peer, silent) in self.silent_paths(lived) {
            let reason =
                format!("nothing that was sent to it in the last {silent:.1?} was confirmed");
            self.shared.lose(&peer, reason, false);
        }
        let now = Instant::now();
        while let Some(oldest) =
            self.incoming.first_entry().filter(|oldest| oldest.get().deadline <= now)
        {
            let oldest = oldest.remove();
            self.refuse(oldest);
        }
    }

    /// Connections that have been silent for too long, or will have been by the next look but one:
    /// a thread may be kept waiting for its core. A peer that is heard on another connection may be
    /// cut off on this one. Those that hear of it only from us need some of the time.
    fn silent_paths(&mut self, lived: Duration) -> Vec<(Arc<Peer>, Duration)> {
        let timeout = self.shared.peer_timeout;
        let limit = (timeout - hearsay(timeout)).max(REPETITIONS);
        let look = |path: &mut Path| {
            let connection = path.connection.upgrade()?;
            let sight = Sight::of(connection.sockets().get(path.number)?).ok()?;
            let silent = path.silence.after(lived, sight);
            (silent + 2 * lived >= limit).then(|| (Arc::clone(connection.peer()), silent))
        };
        self.paths.values_mut().filter_map(look).collect()
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn accept_local(listener: &UnixListener) -> io::Result<(OwnedFd, Option<IpAddr>)> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    Ok((OwnedFd::from(stream), None))
}

fn accept_remote(listener: &TcpListener) -> io::Result<(OwnedFd, Option<IpAddr>)> {
    let (stream, from) = listener.accept()?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok((OwnedFd::from(stream), Some(from.ip().to_canonical())))
}

/// Chooses the connection that makes way, among connections by age, each with its proof and its
/// source: an unproven one, and of these the oldest one of the source with most. `None` if there
/// are no connections.
fn unseated(waiting: impl Iterator<Item = (u64, bool, Option<IpAddr>)> + Clone) -> Option<u64> {
    let strangers = waiting.clone().any(|(_, vouched, _)| !vouched);
    let candidates = waiting.filter(|(_, vouched, _)| !(strangers && *vouched));
    let mut sources: BTreeMap<Option<IpAddr>, (usize, u64)> = BTreeMap::new();
    for (token, _, source) in candidates {
        sources.entry(source).or_insert((0, token)).0 += 1;
    }
    sources
        .values()
        .max_by_key(|(count, oldest)| (*count, Reverse(*oldest)))
        .map(|(_, oldest)| *oldest)
}

/// Reads what has come to a socket that nobody uses any more, for the peer may do likewise only
/// when it has sent all; whether the socket is still needed.
fn is_needed(retired: &Retired) -> bool {
    let mut scrap = vec![0; SCRAP.0];
    for _ in 0..SCRAP.1 {
        match recv(&retired.socket, &mut scrap[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::AGAIN) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    Sight::of(&retired.socket).is_ok_and(|sight| !sight.done)
}

fn add(epoll: &OwnedFd, source: impl AsFd, token: u64) -> Result<()> {
    epoll::add(epoll, source, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
        .map_err(Error::of("epoll_ctl"))
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
        assert_eq!(unseated(waiting.into_iter()), Some(5));
        // As many from each: the oldest of all.
        assert_eq!(unseated(waiting.into_iter().filter(|one| one.0 != 6)), Some(4));
        assert_eq!(
            unseated(waiting.into_iter().filter(|one| one.1)),
            Some(3),
            "nobody else is left"
        );
        assert_eq!(unseated(std::iter::empty()), None);
    }
}
