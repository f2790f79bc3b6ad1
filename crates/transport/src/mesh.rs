// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ranks of one generation, connected on demand.

mod dial_many;
mod on_demand;

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use farandole_config::PortRange;
use farandole_shm::Segment;
use farandole_world::{Generation, HostHash, Rank};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::budget::{Budget, Lease};
use crate::card::Card;
use crate::circle::Circle;
use crate::dial::{self, Failure, Request, Silence, Wait};
use crate::handshake::{CONTROL, Carrier, Key, nonce};
use crate::peer::Peer;
use crate::ring::{RingReceiver, RingSender};
use crate::service::{Listeners, Service};
use crate::shared::{Arrival, Facts, Secured, Shared};
use crate::spread::{Call, Way};
use crate::watch::Watch;
use crate::{
    Error, Gateway, Interface, Link, LinkKind, Parker, Place, Rendezvous, Result, addresses,
    spread, tcp,
};

pub use dial_many::dials_at_once;
use on_demand::Dials;

/// Time after which a wait for a peer's call probes whether the peer listens, and the limit of the
/// probe.
const PROBE: Duration = Duration::from_secs(1);
/// A shorter silence than this happens on any busy host.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(100);

/// Options of a mesh.
#[derive(Clone)]
pub struct MeshOptions {
    /// This process's rank.
    pub rank: Rank,
    /// Ranks in the world.
    pub size: u32,
    /// Ranks of one machine try shared memory.
    pub host: HostHash,
    /// The secret of the job: a process without it is refused.
    pub key: [u8; 32],
    /// The world among the worlds of the job; others are turned away.
    pub generation: Generation,
    /// Addresses to listen on and to publish; all of this host's if there are none. If there are
    /// several, links to other hosts use all of them.
    pub bind: Vec<Interface>,
    /// Ports to listen on.
    pub ports: PortRange,
    /// The way to ranks of other hosts where hosts open connections and take none; then only the
    /// loopback is listened on.
    pub gateway: Option<Arc<dyn Gateway>>,
    /// Off: TCP everywhere.
    pub use_shared_memory: bool,
    /// Off: as on kernels without pidfds.
    pub use_pidfd: bool,
    /// Bytes of this process's own rings, the ones towards its peers, that it may have in segments
    /// at a time; links beyond go over TCP. The host's bytes divided by its ranks.
    pub shared_memory_bytes: u64,
    /// TCP connections of each link, 1 to 16, rounded up to as many over each interface.
    pub streams: u16,
    /// TCP's congestion control of links, where the system has it and allows it; empty takes the
    /// system's own.
    pub congestion: String,
    /// A peer that shows no life for so long is lost.
    pub peer_timeout: Duration,
    /// The longest `join`, and each `open`, may take.
    pub patience: Duration,
}

impl MeshOptions {
    /// Options with the defaults of the knobs.
    pub fn new(rank: Rank, size: u32, host: HostHash, key: [u8; 32]) -> Self {
        Self {
            rank,
            size,
            host,
            key,
            generation: Generation(0),
            bind: Vec::new(),
            ports: PortRange { first: 0, last: 0 },
            gateway: None,
            use_shared_memory: true,
            use_pidfd: true,
            shared_memory_bytes: 256 << 20,
            streams: 1,
            congestion: "cubic".to_owned(),
            peer_timeout: Duration::from_secs(5),
            patience: Duration::from_secs(600),
        }
    }
}

impl std::fmt::Debug for MeshOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MeshOptions")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("host", &self.host)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// A joined mesh. Dropping it leaves in order: peers are told, and the service thread is joined.
/// Links outlive it, but their peers are not watched any more.
pub struct Mesh {
    shared: Arc<Shared>,
    options: MeshOptions,
    /// By rank; the own card too.
    cards: Vec<Card>,
    budget: Budget,
    /// Channels that were opened, by peer.
    opened: Mutex<HashSet<(u32, Rank)>>,
    /// Ranks to exchange heartbeats with where they share no memory with this one.
    heartbeats: BTreeSet<Rank>,
    /// Peers that a control connection was dialled to.
    controlled: Mutex<HashSet<Rank>>,
    /// Links that are dialled at their first use.
    dials: Arc<Dials>,
    fallbacks: Mutex<Vec<(Rank, String)>>,
    service: Option<JoinHandle<()>>,
}

impl Mesh {
    /// Listens, publishes where, and learns where all other ranks are. Collective: returns when
    /// every rank joined.
    ///
    /// # Errors
    /// `Rendezvous`; `Timeout` naming the rank that did not come; `System` when nothing can be
    /// listened on.
    pub fn join(options: MeshOptions, rendezvous: &dyn Rendezvous) -> Result<Self> {
        let deadline = Instant::now() + options.patience;
        allow_descriptors(&options);
        let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST).into()];
        let bind = if options.gateway.is_some() { &loopback[..] } else { &options.bind };
        let (tcp, own) = addresses::listen(bind, options.ports)?;
        let (unix, local) = if options.use_shared_memory { unix() } else { (None, String::new()) };
        let shared = Arc::new(Shared::new(Facts {
            rank: options.rank,
            size: options.size,
            generation: options.generation,
            key: Key(options.key),
            use_shared_memory: options.use_shared_memory,
            use_pidfd: options.use_pidfd,
            peer_timeout: options.peer_timeout.max(SHORTEST_TIMEOUT),
        })?);
        let service = Service::new(Arc::clone(&shared), Listeners { tcp, unix })?;
        let thread = thread::Builder::new().name("farandole-mesh".to_owned());
        let service = thread.spawn(move || service.run()).map_err(Error::of("clone"))?;
        let door = options.gateway.as_ref().map_or(0, |gateway| gateway.door());
        let card = Card {
            host: options.host.clone(),
            pid: std::process::id(),
            door,
            local,
            addresses: own,
        };
        let mut mesh = Self {
            shared,
            cards: Vec::new(),
            budget: Budget::new(options.shared_memory_bytes),
            opened: Mutex::new(HashSet::new()),
            heartbeats: BTreeSet::new(),
            controlled: Mutex::new(HashSet::new()),
            dials: Arc::default(),
            fallbacks: Mutex::new(Vec::new()),
            service: Some(service),
            options,
        };
        if let (Some(gateway), Some(address)) = (&mesh.options.gateway, card.addresses.first()) {
            gateway.open(address.socket.port())?;
        }
        mesh.meet(&card, rendezvous, deadline)?;
        Ok(mesh)
    }

    fn meet(&mut self, own: &Card, rendezvous: &dyn Rendezvous, deadline: Instant) -> Result<()> {
        let MeshOptions { rank, size, generation, .. } = self.options;
        let cards = rendezvous.meet(Place { generation, rank, size }, &own.encode(), deadline)?;
        if cards.len() != size as usize {
            let reason = format!("{} cards came for {size} ranks", cards.len());
            return Err(Error::Rendezvous { what: "all cards".to_owned(), reason });
        }
        for (peer, bytes) in self.shared.peers.iter().zip(cards) {
            let mut card = if peer.rank == rank {
                own.clone()
            } else {
                let what = || format!("the card of rank {}", peer.rank);
                Card::decode(&bytes).map_err(|reason| Error::Rendezvous { what: what(), reason })?
            };
            if let Some(gateway) = &self.options.gateway
                && card.host.machine() != own.host.machine()
            {
                card.addresses = vec![gateway.to(peer.rank, card.door)?.into()];
            }
            // Set once, here.
            drop(peer.host.set(card.host.0.clone()));
            self.cards.push(card);
        }
        let circle = Circle::new(self.cards.iter().map(|card| card.host.machine()));
        self.heartbeats = circle.peers(rank);
        self.shared.hearsay.store(!circle.is_complete(), Ordering::Relaxed);
        Ok(())
    }

    /// Opens one link to each of `peers` (the own rank is passed over), in their order. Collective
    /// among them: every two ranks name each other, with one channel and one capacity. A channel is
    /// opened once between two ranks.
    ///
    /// Ranks of one machine exchange a segment over an authenticated Unix socket; that both map it
    /// is the proof that they share memory. Where that fails, and elsewhere, the link is a TCP
    /// connection. Memory of `capacity` bytes each way (rounded up to pages) is taken when first
    /// touched.
    ///
    /// # Errors
    /// `Timeout` naming the rank that did not open its end; `Unreachable`, `Handshake`, `PeerLost`,
    /// `Forked`; `System` when this process has no descriptors left.
    pub fn open(&self, channel: u32, peers: &[Rank], capacity: usize) -> Result<Vec<Link>> {
        self.open_until(
            channel,
            peers,
            capacity,
            Instant::now() + self.options.patience,
            &mut || false,
        )
    }

    /// As [`open`](Self::open), at most until `deadline`. Every few seconds it asks whether to give
    /// up; after a yes it asks no more.
    ///
    /// # Errors
    /// Those of `open`; `Interrupted` when asked to give up.
    pub fn open_until(
        &self,
        channel: u32,
        peers: &[Rank],
        capacity: usize,
        deadline: Instant,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Link>> {
        self.claim(channel, peers)?;
        let mut wait = Wait { deadline, give_up };
        // The higher rank dials. Dialling needs the other's service thread only, so no order of
        // ranks can lock up.
        let dial = |peer: &_, wait: &mut Wait<'_>| self.dial(peer, channel, capacity, wait);
        let mut links = self.dial_lower(peers, &mut wait, dial)?;
        let places = peers.iter().copied().enumerate();
        for (place, rank) in places.filter(|(_, rank)| *rank > self.options.rank) {
            links.push((place, self.answer(self.peer(rank)?, channel, capacity, &mut wait)?));
        }
        links.sort_by_key(|(place, _)| *place);
        Ok(links.into_iter().map(|(_, link)| link).collect())
    }

    /// As [`open_until`](Self::open_until), with links over TCP that are opened at their first use:
    /// a rank that never uses one has no connection for it. So peers should be ranks of other
    /// machines. The call itself opens the connections for heartbeats with ranks of other machines
    /// that this rank dials and that are not open yet.
    ///
    /// The windows of a link are empty until it is open.
    /// [`LinkSender::ask`](crate::LinkSender::ask) and every call for one of its windows ask for
    /// it, and it opens when both ends have asked. If the peer cannot be reached, its windows are
    /// `PeerLost`.
    ///
    /// # Errors
    /// Those of `open_until`, for the heartbeats.
    pub fn open_on_demand(
        &self,
        channel: u32,
        peers: &[Rank],
        capacity: usize,
        deadline: Instant,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Link>> {
        self.claim(channel, peers)?;
        let far: Vec<Rank> =
            self.heartbeats.iter().copied().filter(|rank| !self.is_near(*rank)).collect();
        self.dial_lower(&far, &mut Wait { deadline, give_up }, |peer, wait| {
            peer.lost().map_or(Ok(()), Err)?;
            self.exchange_heartbeats(peer, &self.addresses(peer.rank), wait)
        })?;
        let link = |rank: &Rank| {
            let capacity = Segment::round(capacity);
            Ok(on_demand::link(
                &self.shared,
                &self.dials,
                self.peer(*rank)?,
                channel,
                capacity,
                self.way(*rank),
                &self.options.congestion,
            ))
        };
        peers.iter().filter(|rank| **rank != self.options.rank).map(link).collect()
    }

    /// Dials those of `peers` that are lower ranks, and returns the results with their places.
    fn dial_lower<T: Send>(
        &self,
        peers: &[Rank],
        wait: &mut Wait<'_>,
        dial: impl Fn(&Arc<Peer>, &mut Wait<'_>) -> Result<T> + Sync,
    ) -> Result<Vec<(usize, T)>> {
        let lower = dialled(self.options.rank, peers);
        dial_many::dial_all(&lower, wait, |rank, wait| dial(self.peer(rank)?, wait))
    }

    /// Notes that the channel to these ranks is opened.
    fn claim(&self, channel: u32, peers: &[Rank]) -> Result<()> {
        self.shared.guard.check()?;
        if channel == CONTROL {
            return Err(Error::Handshake { reason: format!("channel {channel} is reserved") });
        }
        for rank in peers.iter().copied().filter(|rank| *rank != self.options.rank) {
            if !self.opened.lock().insert((channel, self.peer(rank)?.rank)) {
                let reason = format!("channel {channel} to rank {rank} was opened before");
                return Err(Error::Handshake { reason });
            }
        }
        Ok(())
    }

    /// Returns true if a rank is on this machine.
    fn is_near(&self, rank: Rank) -> bool {
        let host = self.host(rank);
        host.is_some_and(|host| host.machine() == self.options.host.machine())
    }

    /// Returns the addresses at which a rank listens, in the order in which they are tried.
    fn addresses(&self, rank: Rank) -> Vec<SocketAddr> {
        let card = self.cards.get(rank.index());
        card.map(|card| addresses::ordered(&card.addresses, self.is_near(rank))).unwrap_or_default()
    }

    /// Returns the way of a link to a rank. Over a gateway, and to ranks of this machine, bytes
    /// cross no interface.
    fn way(&self, rank: Rank) -> Way {
        let card = self.cards.get(rank.index());
        let card = card.filter(|_| self.options.gateway.is_none() && !self.is_near(rank));
        let pairs = card.map(|card| spread::pairs(&self.options.bind, &card.addresses));
        Way::new(self.addresses(rank), pairs.unwrap_or_default(), self.options.streams)
    }

    fn peer(&self, rank: Rank) -> Result<&Arc<Peer>> {
        let size = self.options.size;
        let unknown =
            || Error::Handshake { reason: format!("no rank {rank} in a world of {size}") };
        self.shared.peers.get(rank.index()).ok_or_else(unknown)
    }

    fn answer(
        &self,
        peer: &Arc<Peer>,
        channel: u32,
        capacity: usize,
        wait: &mut Wait<'_>,
    ) -> Result<Link> {
        let (theirs, arrival) = self.await_arrival((channel, 0), peer, wait)?;
        let capacity = Segment::round(capacity);
        if theirs != capacity as u64 {
            return Err(other_capacity(peer.rank, channel, theirs, capacity));
        }
        match arrival {
            Arrival::Shared { sender, receiver, bell } => Ok(Link {
                peer: peer.rank,
                kind: LinkKind::SharedMemory,
                capacity,
                sender: Box::new(RingSender::new(
                    sender,
                    Arc::clone(peer),
                    Some(Arc::clone(&bell)),
                )),
                receiver: Box::new(RingReceiver::new(receiver, Arc::clone(peer), Some(bell))),
            }),
            Arrival::Tcp { secured, streams } => {
                let mut connections = vec![secured];
                for stream in 1..streams {
                    match self.await_arrival((channel, stream), peer, wait)? {
                        (_, Arrival::Tcp { secured, .. }) => connections.push(secured),
                        (_, Arrival::Shared { .. }) => {
                            return Err(peer.gone("it mixed two kinds of links"));
                        }
                    }
                }
                self.over_tcp(peer, channel, connections, capacity)
            }
        }
    }

    /// Waits for the peer to dial. It may be too early for it to be watched, so a long wait asks
    /// whether it listens.
    fn await_arrival(
        &self,
        place: (u32, u16),
        peer: &Arc<Peer>,
        wait: &mut Wait<'_>,
    ) -> Result<(u64, Arrival)> {
        let started = Instant::now();
        let deadline = wait.deadline;
        let mut heard = started;
        loop {
            let pause = deadline.min(Instant::now() + PROBE);
            let waited = match self.shared.await_arrival(place, peer, pause) {
                Err(Error::Timeout { what, .. }) => what,
                other => return other,
            };
            if pause == deadline {
                return Err(Error::Timeout { what: waited, elapsed: started.elapsed() });
            }
            wait.ask()?;
            match self.listens(peer, deadline)? {
                Some(true) => heard = Instant::now(),
                Some(false) => {
                    return Err(peer.gone("it no longer listens at any of its addresses"));
                }
                None if heard.elapsed() > self.shared.peer_timeout => {
                    return Err(peer.gone("nothing answers at any of its addresses"));
                }
                None => {}
            }
        }
    }

    fn listens(&self, peer: &Peer, deadline: Instant) -> Result<Option<bool>> {
        let Some(card) = self.cards.get(peer.rank.index()) else { return Ok(None) };
        let same_host = card.host.machine() == self.options.host.machine();
        let local = (same_host && !card.local.is_empty()).then_some(card.local.as_str());
        dial::listens(
            local,
            &addresses::ordered(&card.addresses, same_host),
            deadline.min(Instant::now() + PROBE),
        )
    }

    fn dial(
        &self,
        peer: &Arc<Peer>,
        channel: u32,
        capacity: usize,
        wait: &mut Wait<'_>,
    ) -> Result<Link> {
        let capacity = Segment::round(capacity);
        let card = self.cards.get(peer.rank.index()).ok_or_else(|| peer.gone("it never joined"))?;
        let same_host = card.host.machine() == self.options.host.machine();
        if let Some(error) = peer.lost() {
            return Err(error);
        }
        if same_host
            && !card.local.is_empty()
            && let Some(link) = self.dial_shared(peer, &card.local, channel, capacity, wait)?
        {
            return Ok(link);
        }
        let way = self.way(peer.rank);
        self.exchange_heartbeats(peer, way.addresses(), wait)?;
        let call = Call { to: peer, channel, capacity: capacity as u64 };
        let connections = way.connect(&self.shared, &call, wait)?;
        self.over_tcp(peer, channel, connections, capacity)
    }

    /// Dials the connection of heartbeats to a peer, if there is to be one and is none.
    fn exchange_heartbeats(
        &self,
        peer: &Arc<Peer>,
        addresses: &[SocketAddr],
        wait: &mut Wait<'_>,
    ) -> Result<()> {
        // Two channels to a peer may be opened at the same time.
        let _one_at_a_time = peer.handover.lock();
        if !self.heartbeats.contains(&peer.rank) || self.controlled.lock().contains(&peer.rank) {
            return Ok(());
        }
        let carrier = Carrier::Control;
        let request = Request { to: peer, carrier, channel: CONTROL, stream: (0, 1), capacity: 0 };
        let secured = dial::any(&self.shared, &request, addresses, wait)?;
        rustix::io::ioctl_fionbio(&secured.socket, true).map_err(Error::of("ioctl"))?;
        self.shared.watch(Watch::remote(Arc::clone(peer), secured));
        self.controlled.lock().insert(peer.rank);
        Ok(())
    }

    fn over_tcp(
        &self,
        peer: &Arc<Peer>,
        channel: u32,
        connections: Vec<Secured>,
        capacity: usize,
    ) -> Result<Link> {
        let congestion = &self.options.congestion;
        let (link, below) =
            tcp::link(connections, Arc::clone(peer), &self.shared, channel, capacity, congestion)?;
        self.shared.follow(&below);
        Ok(link)
    }

    /// `None` where shared memory is not to be had; TCP then serves. Once the peer may have taken
    /// its end, it must not: the two would hold different links.
    fn dial_shared(
        &self,
        peer: &Arc<Peer>,
        name: &str,
        channel: u32,
        capacity: usize,
        wait: &mut Wait<'_>,
    ) -> Result<Option<Link>> {
        if !self.options.use_shared_memory {
            return Ok(None);
        }
        let fall_back = |reason: String| {
            self.fallbacks.lock().push((peer.rank, reason));
            Ok(None)
        };
        let lease = match self.budget.take(capacity as u64) {
            Ok(lease) => Arc::new(lease),
            Err(reason) => return fall_back(reason),
        };
        // Both ends take the first socket of theirs for the one whose end tells of a death: one
        // after the other.
        let _one_at_a_time = peer.handover.lock();
        let mut silence = Silence::default();
        loop {
            wait.ask()?;
            let began = Instant::now();
            match self.exchange(peer, name, channel, capacity, &lease, wait.attempt(&self.shared)) {
                Ok(link) => return Ok(Some(link)),
                // A peer that holds another key is no matter of memory.
                Err(Failure::Stranger(reason)) => return Err(Error::Handshake { reason }),
                Err(Failure::Own(error)) => return Err(error),
                Err(Failure::Broken(reason)) => {
                    return Err(
                        peer.gone(&format!("the handover of shared memory broke off: {reason}"))
                    );
                }
                Err(Failure::Silent(_)) if Instant::now() < wait.deadline => {
                    silence.goes_on(began);
                    if silence.is_death(self.shared.peer_timeout) {
                        return Err(peer.gone("it accepts connections but does not answer"));
                    }
                }
                Err(failure) => return fall_back(failure.to_string()),
            }
        }
    }

    fn exchange(
        &self,
        peer: &Arc<Peer>,
        name: &str,
        channel: u32,
        capacity: usize,
        lease: &Arc<Lease>,
        deadline: Instant,
    ) -> std::result::Result<Link, Failure> {
        let failed = |error: farandole_shm::Error| Failure::Unanswered(error.to_string());
        let segment = Segment::create(2, capacity).map_err(failed)?;
        let (sender, receiver) =
            (segment.producer(0).map_err(failed)?, segment.consumer(1).map_err(failed)?);
        let request = Request {
            to: peer,
            carrier: Carrier::SharedMemory,
            channel,
            stream: (0, 1),
            capacity: capacity as u64,
        };
        let mut own = vec![segment.as_fd()];
        own.extend(self.shared.parker.bell().descriptors());
        own.extend(self.shared.pidfd.as_ref().map(AsFd::as_fd));
        let socket = dial::local(name, deadline)?;
        let (socket, _, theirs) = dial::converse(&self.shared, &request, socket, &own, deadline)?;
        let mut theirs = theirs.into_iter();
        let (Some(memory), Some(event)) = (theirs.next(), theirs.next()) else {
            return Err(Failure::Broken("no bell was handed over".to_owned()));
        };
        let (bell, first) =
            peer.adopt(memory, event).map_err(|error| Failure::Own(peer.fault(error)))?;
        let end = self.shared.end_of(theirs.next(), socket, first);
        if first {
            self.shared.watch(Watch::local(Arc::clone(peer), Arc::clone(&bell), end));
        }
        let sender = RingSender::new(sender, Arc::clone(peer), Some(Arc::clone(&bell)));
        let receiver = RingReceiver::new(receiver, Arc::clone(peer), Some(bell));
        Ok(Link {
            peer: peer.rank,
            kind: LinkKind::SharedMemory,
            capacity,
            sender: Box::new(sender.leased(lease)),
            receiver: Box::new(receiver.leased(lease)),
        })
    }

    /// Returns whether a peer was lost otherwise than by leaving in order: the first one. Costs two
    /// loads.
    ///
    /// # Errors
    /// `PeerLost`, `Forked`.
    pub fn check(&self) -> Result<()> {
        self.shared.guard.check()?;
        self.shared.first_loss().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Peers that were lost otherwise than by leaving in order, by rank.
    pub fn lost(&self) -> Vec<Rank> {
        self.shared.lost()
    }

    /// Shows local peers that this process runs. The service thread does so by itself, so this is
    /// for a caller whose own progress should count too; it is never needed.
    pub fn beat(&self) {
        if self.shared.guard.intact() {
            self.shared.parker.bell().beat();
        }
    }

    /// Returns the place in which the threads of this process sleep; it is also woken when a peer
    /// is lost.
    pub fn parker(&self) -> Parker {
        self.shared.parker.clone()
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.options.rank
    }

    /// Ranks in the world.
    pub fn size(&self) -> u32 {
        self.options.size
    }

    /// The host of a rank, as it said itself.
    pub fn host(&self, rank: Rank) -> Option<&HostHash> {
        self.cards.get(rank.index()).map(|card| &card.host)
    }

    /// The process id of a rank on its host.
    pub fn pid(&self, rank: Rank) -> Option<u32> {
        self.cards.get(rank.index()).map(|card| card.pid)
    }

    /// Links that go over TCP although both ends tried shared memory, by peer, with the reason.
    pub fn fallbacks(&self) -> Vec<(Rank, String)> {
        self.fallbacks.lock().clone()
    }

    /// Connections turned away so far: strangers, garbage, handshakes that took too long.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

/// The rings of the two ends of a link differ.
fn other_capacity(rank: Rank, channel: u32, theirs: u64, own: usize) -> Error {
    let reason =
        format!("rank {rank} opened channel {channel} with {theirs} bytes a ring, here: {own}");
    Error::Handshake { reason }
}

/// The lower ranks among the peers with their places, the nearest first: when all ranks dial at the
/// same time, each step leads every one of them to another peer. All would begin with the lowest
/// rank otherwise.
fn dialled(own: Rank, peers: &[Rank]) -> Vec<(usize, Rank)> {
    let mut lower: Vec<(usize, Rank)> =
        peers.iter().copied().enumerate().filter(|(_, rank)| *rank < own).collect();
    lower.sort_by_key(|(_, rank)| std::cmp::Reverse(*rank));
    lower
}

/// Descriptors for each peer: bell, event, pidfd or socket, heartbeats, connections; some more
/// while they are made.
const EACH: u64 = 8;
/// Descriptors for all else.
const SPARE: u64 = 256;

/// Raises the soft limit of descriptors where the peers need it, as far as the hard one goes.
fn allow_descriptors(options: &MeshOptions) {
    let limits = getrlimit(Resource::Nofile);
    let streams = spread::rounded(options.streams, options.bind.len());
    let needed = u64::from(options.size) * (EACH + u64::from(streams)) + SPARE;
    let current = limits.maximum.map_or(needed, |most| needed.min(most));
    if limits.current.is_some_and(|soft| soft < current) {
        // What is not allowed shows when descriptors run out, with their number.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limits });
    }
}

/// A listener under a random name in the abstract namespace; none where there is no such namespace.
fn unix() -> (Option<UnixListener>, String) {
    let listen = || {
        let random = nonce().ok()?;
        let name: String = random[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("farandole-{name}");
        let address = UnixAddr::from_abstract_name(&name).ok()?;
        Some((UnixListener::bind_addr(&address).ok()?, name))
    };
    listen().map_or((None, String::new()), |(listener, name)| (Some(listener), name))
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let Some(service) = self.service.take() else { return };
        if !self.shared.guard.intact() {
            // The thread exists in the parent only.
            std::mem::forget(service);
            return;
        }
        self.shared.parker.bell().close();
        self.shared.stop();
        // A panic of the thread was reported when it happened.
        drop(service.join());
    }
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mesh").field("options", &self.options).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
