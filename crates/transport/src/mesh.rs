// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The mesh: the ranks of one generation, connected on demand.

mod concurrent_dials;
mod link_setup;
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
use farandole_shm::RingSegment;
use farandole_world::{Generation, HostHash, Rank};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::connection_arrivals::ArrivedConnection;
use crate::dial::{self, DialRequest, DialSilence, DialWait};
use crate::dial_failure::DialFailure;
use crate::handshake::{CONTROL_CHANNEL, ConnectionCarrier, JobKey, random_nonce};
use crate::heartbeat_topology::HeartbeatTopology;
use crate::mesh_state::{MeshParameters, MeshState};
use crate::multi_nic::{LinkRequest, PeerRoutes};
use crate::peer_addresses::PeerAddresses;
use crate::peer_state::PeerState;
use crate::peer_watch::PeerWatch;
use crate::ring_byte_budget::{RingByteBudget, RingByteReservation};
use crate::ring_link::{RingReceiver, RingSender};
use crate::secured_connection::SecuredConnection;
use crate::service::{MeshListeners, MeshService};
use crate::{
    Error, Link, LinkKind, LinkRelay, NumberedInterfaceAddress, Parker, Rendezvous,
    RendezvousParticipant, Result, addresses, multi_nic, tcp,
};

pub use concurrent_dials::max_concurrent_dials;
use on_demand::{DialQueue, capacity_mismatch_error};

/// Interval at which a wait for a peer to dial probes whether the peer still listens. Also the time
/// limit of a probe.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Smallest peer timeout. A busy host may cause shorter silences.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(100);

/// Options of a mesh.
#[derive(Clone)]
pub struct MeshOptions {
    /// Rank of this process.
    pub rank: Rank,
    /// Number of ranks in the world.
    pub size: u32,
    /// The host of this rank. Ranks of one machine try shared memory.
    pub host: HostHash,
    /// The secret of the job: a process without it is refused.
    pub key: [u8; 32],
    /// The generation of this world in the job. Ranks of other generations are refused.
    pub generation: Generation,
    /// Addresses to listen on and to publish; if empty, all addresses of this host. If there are
    /// several, links to other hosts use all of them.
    pub bind: Vec<NumberedInterfaceAddress>,
    /// Range of ports to listen on.
    pub ports: PortRange,
    /// The relay to ranks of other hosts, for hosts that can open connections but not accept them.
    /// With a relay, this process listens on the loopback only.
    pub relay: Option<Arc<dyn LinkRelay>>,
    /// Whether ranks of one host use shared memory; if false, all links use TCP.
    pub use_shared_memory: bool,
    /// Whether pidfds are used; if false, peers are watched as on kernels without pidfds.
    pub use_pidfd: bool,
    /// Largest total size in bytes of the rings that this process creates in shared memory. Further
    /// links use TCP. Callers divide the shared memory of the host by its number of ranks.
    pub shared_memory_bytes: u64,
    /// TCP connections of each link, 1 to 16. Rounded up so that each interface has the same
    /// number.
    pub streams: u16,
    /// TCP congestion control algorithm of links, if the system has it and allows it. Empty keeps
    /// the system's default.
    pub congestion: String,
    /// Time without a sign of life after which a peer is lost.
    pub peer_timeout: Duration,
    /// Time limit of `join`, and of each `open_links`.
    pub setup_timeout: Duration,
}

impl MeshOptions {
    /// Creates options with the default values.
    pub fn new(rank: Rank, size: u32, host: HostHash, key: [u8; 32]) -> Self {
        Self {
            rank,
            size,
            host,
            key,
            generation: Generation(0),
            bind: Vec::new(),
            ports: PortRange { first: 0, last: 0 },
            relay: None,
            use_shared_memory: true,
            use_pidfd: true,
            shared_memory_bytes: 256 << 20,
            streams: 1,
            congestion: "cubic".to_owned(),
            peer_timeout: Duration::from_secs(5),
            setup_timeout: Duration::from_secs(600),
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

/// A joined mesh. Dropping it leaves in order: peers are notified, and the service thread is
/// joined. Links outlive the mesh, but their peers are no longer watched.
pub struct Mesh {
    shared: Arc<MeshState>,
    options: MeshOptions,
    /// Addresses of all ranks, by rank; also of this rank.
    peer_addresses: Vec<PeerAddresses>,
    budget: RingByteBudget,
    /// Channels that were opened, with their peers.
    opened_channels: Mutex<HashSet<(u32, Rank)>>,
    /// Ranks with which this rank exchanges heartbeats, unless it shares memory with them.
    heartbeat_peers: BTreeSet<Rank>,
    /// Peers to which this rank has dialled a heartbeat connection.
    heartbeat_channels: Mutex<HashSet<Rank>>,
    /// Links that are dialled at their first use.
    dial_queue: Arc<DialQueue>,
    fallbacks: Mutex<Vec<(Rank, String)>>,
    service: Option<JoinHandle<()>>,
}

impl Mesh {
    /// Listens, publishes its addresses, and fetches the addresses of all other ranks. Collective:
    /// returns when every rank has joined.
    ///
    /// # Errors
    /// `Rendezvous`; `Timeout` naming the rank that did not join; `System` when no address can be
    /// listened on.
    pub fn join(options: MeshOptions, rendezvous: &dyn Rendezvous) -> Result<Self> {
        let deadline = Instant::now() + options.setup_timeout;
        raise_descriptor_limit(&options);
        let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST).into()];
        let bind = if options.relay.is_some() { &loopback[..] } else { &options.bind };
        let (tcp, own) = addresses::listen_on_interfaces(bind, options.ports)?;
        let (unix, local) =
            if options.use_shared_memory { bind_unix_listener() } else { (None, String::new()) };
        let shared = Arc::new(MeshState::new(MeshParameters {
            rank: options.rank,
            size: options.size,
            generation: options.generation,
            key: JobKey(options.key),
            use_shared_memory: options.use_shared_memory,
            use_pidfd: options.use_pidfd,
            peer_timeout: options.peer_timeout.max(MIN_PEER_TIMEOUT),
        })?);
        let service = MeshService::new(Arc::clone(&shared), MeshListeners { tcp, unix })?;
        // The thread runs before the addresses are published, because peers dial from then on.
        let thread = thread::Builder::new().name("farandole-mesh".to_owned());
        let service =
            thread.spawn(move || service.run()).map_err(Error::failed_call_mapper("clone"))?;
        let relay_world = options.relay.as_ref().map_or(0, |gateway| gateway.relay_world_number());
        let published = PeerAddresses {
            host: options.host.clone(),
            pid: std::process::id(),
            relay_world,
            unix_socket_name: local,
            addresses: own,
        };
        let mut mesh = Self {
            shared,
            peer_addresses: Vec::new(),
            budget: RingByteBudget::new(options.shared_memory_bytes),
            opened_channels: Mutex::new(HashSet::new()),
            heartbeat_peers: BTreeSet::new(),
            heartbeat_channels: Mutex::new(HashSet::new()),
            dial_queue: Arc::default(),
            fallbacks: Mutex::new(Vec::new()),
            service: Some(service),
            options,
        };
        if let (Some(gateway), Some(address)) = (&mesh.options.relay, published.addresses.first()) {
            // The relay must forward before the addresses are published: a peer dials as soon as it
            // reads them.
            gateway.forward_to_port(address.socket.port())?;
        }
        mesh.learn_peer_addresses(&published, rendezvous, deadline)?;
        Ok(mesh)
    }

    fn learn_peer_addresses(
        &mut self,
        own: &PeerAddresses,
        rendezvous: &dyn Rendezvous,
        deadline: Instant,
    ) -> Result<()> {
        let MeshOptions { rank, size, generation, .. } = self.options;
        let encoded = rendezvous.exchange_addresses(
            RendezvousParticipant { generation, rank, size },
            &own.encode(),
            deadline,
        )?;
        if encoded.len() != size as usize {
            let reason = format!("received the addresses of {} of {size} ranks", encoded.len());
            return Err(Error::Rendezvous {
                what: "the addresses of all ranks".to_owned(),
                reason,
            });
        }
        for (peer, bytes) in self.shared.peers.iter().zip(encoded) {
            let mut published = if peer.rank == rank {
                own.clone()
            } else {
                let what = || format!("the addresses of rank {}", peer.rank);
                PeerAddresses::decode(&bytes)
                    .map_err(|reason| Error::Rendezvous { what: what(), reason })?
            };
            if let Some(gateway) = &self.options.relay
                // Ranks of one machine reach each other without the relay, even in different
                // containers.
                && published.host.machine_name() != own.host.machine_name()
            {
                published.addresses =
                    vec![gateway.relayed_address(peer.rank, published.relay_world)?.into()];
            }
            // The host is set only here.
            drop(peer.host.set(published.host.0.clone()));
            self.peer_addresses.push(published);
        }
        let topology = HeartbeatTopology::new(
            self.peer_addresses.iter().map(|published| published.host.machine_name()),
        );
        self.heartbeat_peers = topology.heartbeat_peers(rank);
        self.shared.relies_on_loss_reports.store(!topology.is_fully_connected(), Ordering::Relaxed);
        Ok(())
    }

    /// Opens one link to each of `peers`, in their order; the own rank is skipped. Collective among
    /// them: every two ranks name each other, with the same channel and capacity. Two ranks open a
    /// channel only once.
    ///
    /// Ranks of one machine exchange a segment over an authenticated Unix socket. If both can map
    /// it, they share memory. If that fails, and between machines, the link is a TCP connection.
    /// `capacity` bytes in each direction (rounded up to pages) are allocated at their first use.
    ///
    /// # Errors
    /// `Timeout` naming the rank that did not open its end; `Unreachable`, `Handshake`, `PeerLost`,
    /// `Forked`; `System` when this process has no descriptors left.
    pub fn open_links(&self, channel: u32, peers: &[Rank], capacity: usize) -> Result<Vec<Link>> {
        self.open_links_until(
            channel,
            peers,
            capacity,
            Instant::now() + self.options.setup_timeout,
            &mut || false,
        )
    }

    /// Like [`open_links`](Self::open_links), at most until `deadline`. Calls `give_up` every few
    /// seconds; after `true`, it stops and does not call it again.
    ///
    /// # Errors
    /// Like `open_links`; `Interrupted` when `give_up` returned true.
    pub fn open_links_until(
        &self,
        channel: u32,
        peers: &[Rank],
        capacity: usize,
        deadline: Instant,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Link>> {
        self.claim_channel(channel, peers)?;
        let mut wait = DialWait { deadline, give_up };
        // The higher rank dials. A dial needs only the peer's service thread, so no order of ranks
        // can deadlock.
        let dial =
            |peer: &_, wait: &mut DialWait<'_>| self.dial_link(peer, channel, capacity, wait);
        let mut links = self.dial_lower_ranks(peers, &mut wait, dial)?;
        let places = peers.iter().copied().enumerate();
        for (place, rank) in places.filter(|(_, rank)| *rank > self.options.rank) {
            links.push((
                place,
                self.accept_link(self.find_peer(rank)?, channel, capacity, &mut wait)?,
            ));
        }
        links.sort_by_key(|(place, _)| *place);
        Ok(links.into_iter().map(|(_, link)| link).collect())
    }

    /// Like [`open_links_until`](Self::open_links_until), but each link uses TCP and is opened at
    /// its first use: a link that is never used has no connection. So `peers` should be ranks of
    /// other machines. The call itself opens the heartbeat connections that this rank dials to
    /// ranks of other machines and that are not open yet.
    ///
    /// The windows of a link are empty until it is open.
    /// [`LinkSender::request_open`](crate::LinkSender::request_open) and every call for a window
    /// request the link; it opens when both ends have requested it. If the peer cannot be reached,
    /// calls for a window return `PeerLost`.
    ///
    /// # Errors
    /// Like `open_links_until`, for the heartbeat connections.
    pub fn open_links_on_demand(
        &self,
        channel: u32,
        peers: &[Rank],
        capacity: usize,
        deadline: Instant,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Link>> {
        self.claim_channel(channel, peers)?;
        let far: Vec<Rank> = self
            .heartbeat_peers
            .iter()
            .copied()
            .filter(|rank| !self.is_same_machine(*rank))
            .collect();
        self.dial_lower_ranks(&far, &mut DialWait { deadline, give_up }, |peer, wait| {
            // A dial to a lost rank would otherwise last until its own time limit.
            peer.loss_error().map_or(Ok(()), Err)?;
            self.dial_heartbeat_channel(peer, &self.dial_addresses(peer.rank), wait)
        })?;
        let link = |rank: &Rank| {
            let capacity = RingSegment::round_capacity(capacity);
            Ok(on_demand::on_demand_link(
                &self.shared,
                &self.dial_queue,
                self.find_peer(*rank)?,
                channel,
                capacity,
                self.peer_routes(*rank),
                &self.options.congestion,
            ))
        };
        peers.iter().filter(|rank| **rank != self.options.rank).map(link).collect()
    }

    /// Dials the peers with lower ranks, and returns the results with their indices in `peers`.
    fn dial_lower_ranks<T: Send>(
        &self,
        peers: &[Rank],
        wait: &mut DialWait<'_>,
        dial: impl Fn(&Arc<PeerState>, &mut DialWait<'_>) -> Result<T> + Sync,
    ) -> Result<Vec<(usize, T)>> {
        let lower = dial_order(self.options.rank, peers);
        concurrent_dials::dial_all_peers(&lower, wait, |rank, wait| {
            dial(self.find_peer(rank)?, wait)
        })
    }

    /// Records that the channel to these ranks is opened, and fails if it was opened before.
    fn claim_channel(&self, channel: u32, peers: &[Rank]) -> Result<()> {
        self.shared.guard.check_not_forked()?;
        if channel == CONTROL_CHANNEL {
            return Err(Error::Handshake { reason: format!("channel {channel} is reserved") });
        }
        for rank in peers.iter().copied().filter(|rank| *rank != self.options.rank) {
            if !self.opened_channels.lock().insert((channel, self.find_peer(rank)?.rank)) {
                let reason = format!("channel {channel} to rank {rank} was opened before");
                return Err(Error::Handshake { reason });
            }
        }
        Ok(())
    }

    /// Returns true if a rank is on this machine.
    fn is_same_machine(&self, rank: Rank) -> bool {
        let host = self.peer_host(rank);
        host.is_some_and(|host| host.machine_name() == self.options.host.machine_name())
    }

    /// Returns the addresses at which a rank listens, in the order in which they are tried.
    fn dial_addresses(&self, rank: Rank) -> Vec<SocketAddr> {
        let peer = self.peer_addresses.get(rank.index());
        peer.map(|peer| addresses::order_for_dialing(&peer.addresses, self.is_same_machine(rank)))
            .unwrap_or_default()
    }

    /// Returns the routes of links to a rank. No interface pairs are used over a relay, or to ranks
    /// of this machine.
    fn peer_routes(&self, rank: Rank) -> PeerRoutes {
        let peer = self.peer_addresses.get(rank.index());
        let peer = peer.filter(|_| self.options.relay.is_none() && !self.is_same_machine(rank));
        let pairs =
            peer.map(|peer| multi_nic::pair_interfaces(&self.options.bind, &peer.addresses));
        PeerRoutes::new(self.dial_addresses(rank), pairs.unwrap_or_default(), self.options.streams)
    }

    fn find_peer(&self, rank: Rank) -> Result<&Arc<PeerState>> {
        let size = self.options.size;
        let unknown =
            || Error::Handshake { reason: format!("no rank {rank} in a world of {size}") };
        self.shared.peers.get(rank.index()).ok_or_else(unknown)
    }

    /// Fails if a peer was lost other than by leaving in order, with the first such loss. Costs two
    /// loads.
    ///
    /// # Errors
    /// `PeerLost`, `Forked`.
    pub fn check_peers(&self) -> Result<()> {
        self.shared.guard.check_not_forked()?;
        self.shared.first_loss().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns the peers that were lost other than by leaving in order, by rank.
    pub fn lost_ranks(&self) -> Vec<Rank> {
        self.shared.lost_ranks()
    }

    /// Shows local peers that this process runs. Calling it is optional, because the service thread
    /// also sends heartbeats; with it, progress of the caller counts, too.
    pub fn increment_own_heartbeat(&self) {
        if self.shared.guard.is_original_process() {
            self.shared.parker.own_doorbell().increment_heartbeat();
        }
    }

    /// Returns the parker in which the threads of this process sleep. The loss of a peer also wakes
    /// it.
    pub fn parker(&self) -> Parker {
        self.shared.parker.clone()
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> Rank {
        self.options.rank
    }

    /// Returns the host of a rank, as the rank itself published it.
    pub fn peer_host(&self, rank: Rank) -> Option<&HostHash> {
        self.peer_addresses.get(rank.index()).map(|peer| &peer.host)
    }

    /// Returns the links that use TCP although both ends tried shared memory: the peer and the
    /// reason.
    pub fn tcp_fallbacks(&self) -> Vec<(Rank, String)> {
        self.fallbacks.lock().clone()
    }

    /// Returns the number of connections refused so far: processes without the key, invalid data,
    /// and handshakes that took too long.
    pub fn refused_connection_count(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

/// Returns the lower ranks among the peers with their indices, the nearest first. When all ranks
/// dial at the same time, each step then spreads them over different peers; in ascending order, all
/// would begin with rank 0.
fn dial_order(own: Rank, peers: &[Rank]) -> Vec<(usize, Rank)> {
    let mut lower: Vec<(usize, Rank)> =
        peers.iter().copied().enumerate().filter(|(_, rank)| *rank < own).collect();
    lower.sort_by_key(|(_, rank)| std::cmp::Reverse(*rank));
    lower
}

/// Descriptors for each peer: doorbell page, eventfd, pidfd or socket, heartbeat connection; some
/// more while connections are made.
const DESCRIPTORS_PER_PEER: u64 = 8;
/// Descriptors for all other purposes.
const SPARE_DESCRIPTORS: u64 = 256;

/// Raises the soft limit of descriptors to the number that the peers need, at most to the hard
/// limit.
fn raise_descriptor_limit(options: &MeshOptions) {
    let limits = getrlimit(Resource::Nofile);
    let streams = multi_nic::streams_per_link(options.streams, options.bind.len());
    let needed =
        u64::from(options.size) * (DESCRIPTORS_PER_PEER + u64::from(streams)) + SPARE_DESCRIPTORS;
    let current = limits.maximum.map_or(needed, |most| needed.min(most));
    if limits.current.is_some_and(|soft| soft < current) {
        // If this fails, the shortage is reported when descriptors run out.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limits });
    }
}

/// Binds a listener to a random name in the abstract namespace; returns `None` if the system has no
/// such namespace.
fn bind_unix_listener() -> (Option<UnixListener>, String) {
    let listen = || {
        // The abstract namespace belongs to all users of the host, so a fixed name could be taken
        // by another user or another job.
        let random = random_nonce().ok()?;
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
        if !self.shared.guard.is_original_process() {
            // The thread exists in the parent only.
            std::mem::forget(service);
            return;
        }
        // Before the process ends: a local peer reads this mark to distinguish an orderly end from
        // a death.
        self.shared.parker.own_doorbell().mark_closed();
        self.shared.inbox.request_stop();
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
