// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A world of threads.

use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use farandole_collectives::{
    CollectiveOperation, Communicator, CrossoverTable, HostCommunicator, OperationToken, Result,
};
use farandole_transport::{Error, Link, LinkKind, MemoryRendezvous, Mesh, MeshOptions, loopback};
use farandole_world::{HostHash, Rank};

use crate::cut_after;

/// Longest time for actions that should take milliseconds.
const DEADLINE: Duration = Duration::from_secs(30);

/// Builds worlds of threads.
#[derive(Clone, Debug)]
pub struct Harness {
    size: usize,
    ring: usize,
    links: Links,
    cut: Option<Cut>,
    /// The host of every rank.
    hosts: Option<Vec<u32>>,
    crossover: CrossoverTable,
}

/// The kind of a world's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Memory of this process.
    Loopback,
    /// Segments of shared memory.
    SharedMemory,
    /// TCP connections.
    Tcp,
    /// Shared memory between ranks of one host, TCP between others; ranks of the same parity are on
    /// one host, unless the world is one of [`Harness::on_hosts`].
    TwoHosts,
    /// As `TwoHosts`; the TCP connections are opened at their first use.
    OnDemand,
}

/// All algorithms of allreduces, as [`CrossoverTable`] reads them. The first has the table choose.
pub const ALGORITHMS: [&str; 6] =
    ["auto", "direct", "doubling", "pipeline", "hierarchy", "halving"];

/// The link from one rank to another stops after some bytes.
#[derive(Clone, Copy, Debug)]
struct Cut {
    from: usize,
    to: usize,
    bytes: usize,
}

impl Harness {
    /// A world of `size` ranks with rings of 1 MiB.
    pub fn new(size: usize) -> Self {
        Self {
            size,
            ring: 1 << 20,
            links: Links::Loopback,
            cut: None,
            hosts: None,
            crossover: CrossoverTable::default(),
        }
    }

    /// A world of hosts with these many ranks each; members know of them. Over [`Links::TwoHosts`]
    /// they have shared memory each and TCP in between.
    pub fn on_hosts(ranks: &[usize]) -> Self {
        let hosts = (0..).zip(ranks).flat_map(|(host, ranks)| std::iter::repeat_n(host, *ranks));
        Self { hosts: Some(hosts.collect()), ..Self::new(ranks.iter().sum()) }
    }

    /// Other algorithms than those of the table, as [`CrossoverTable`] reads them.
    ///
    /// # Panics
    /// When it cannot.
    #[must_use]
    #[expect(clippy::expect_used, reason = "a test without its world has failed")]
    pub fn algorithms(self, text: &str) -> Self {
        Self { crossover: text.parse().expect("rules of algorithms"), ..self }
    }

    /// Rings of at least this many bytes.
    #[must_use]
    pub fn ring(self, bytes: usize) -> Self {
        Self { ring: bytes, ..self }
    }

    /// Other links than those of loopback.
    #[must_use]
    pub fn over(self, links: Links) -> Self {
        Self { links, ..self }
    }

    /// The link from one rank to another breaks after some bytes.
    #[must_use]
    pub fn cut(self, from: usize, to: usize, bytes: usize) -> Self {
        Self { cut: Some(Cut { from, to, bytes }), ..self }
    }

    /// Runs `body` on every rank, each in a thread of its own; returns what they return, in rank
    /// order.
    ///
    /// # Panics
    /// When links cannot be made, and when a rank panics: its links close, so that the others end
    /// too.
    pub fn run<T: Send>(&self, body: impl Fn(Rank, HostCommunicator) -> T + Sync) -> Vec<T> {
        self.run_changed(|_, link| link, body)
    }

    /// Like [`run`](Self::run), after `change` got each rank's end of each link between hosts and
    /// returned the one that the rank uses.
    ///
    /// # Panics
    /// Like `run`.
    #[expect(clippy::expect_used, reason = "a test without its world has failed")]
    pub fn run_changed<T: Send>(
        &self,
        mut change: impl FnMut(Rank, Link) -> Link,
        body: impl Fn(Rank, HostCommunicator) -> T + Sync,
    ) -> Vec<T> {
        // Meshes watch their peers: they live as long as the world.
        let (_meshes, links) = match self.links {
            Links::Loopback => {
                (Vec::new(), loopback::link_mesh(self.size, self.ring).expect("loopback links"))
            }
            _ => self.meshes(),
        };
        let mut changed = |own: Rank, link: Link| {
            if self.host(own) == self.host(link.peer) { link } else { change(own, link) }
        };
        let links: Vec<Vec<Link>> = (0..)
            .map(Rank)
            .zip(links)
            .map(|(own, links)| links.into_iter().map(|link| changed(own, link)).collect())
            .collect();
        let body = &body;
        std::thread::scope(|scope| {
            let start = |(rank, links): (u32, Vec<Link>)| {
                let links = links.into_iter().map(|link| self.cut_from(Rank(rank), link)).collect();
                scope.spawn(move || {
                    let communicator = match &self.hosts {
                        None => HostCommunicator::new(Rank(rank), links),
                        Some(hosts) => HostCommunicator::across_hosts(Rank(rank), links, hosts),
                    };
                    let communicator = communicator.expect("a communicator");
                    body(Rank(rank), communicator.with_crossover(self.crossover.clone()))
                })
            };
            join((0..).zip(links).map(start).collect())
        })
    }

    fn cut_from(&self, rank: Rank, link: Link) -> Link {
        match self.cut {
            Some(cut) if cut.from == rank.index() && cut.to == link.peer.index() => {
                cut_after(link, cut.bytes)
            }
            _ => link,
        }
    }

    /// Every rank's mesh and its links to all others.
    #[expect(clippy::expect_used, reason = "a test without its world has failed")]
    fn meshes(&self) -> (Vec<Mesh>, Vec<Vec<Link>>) {
        let size = u32::try_from(self.size).unwrap_or(u32::MAX);
        let peers: Vec<Rank> = (0..size).map(Rank).collect();
        let rendezvous = MemoryRendezvous::default();
        let joined = std::thread::scope(|scope| {
            let start = |rank: u32| {
                let several = matches!(self.links, Links::TwoHosts | Links::OnDemand);
                let host = if several { self.host(Rank(rank)) } else { 0 };
                let mut options =
                    MeshOptions::new(Rank(rank), size, HostHash(format!("host {host}")), [7; 32]);
                options.use_shared_memory = self.links != Links::Tcp;
                options.setup_timeout = DEADLINE;
                let (rendezvous, peers, ring) = (rendezvous.clone(), &peers, self.ring);
                scope.spawn(move || {
                    let mesh = Mesh::join(options, &rendezvous).expect("a mesh");
                    let far = |peer: &Rank| self.host(Rank(rank)) != self.host(*peer);
                    let (later, first): (Vec<Rank>, Vec<Rank>) = peers
                        .iter()
                        .copied()
                        .partition(|peer| self.links == Links::OnDemand && far(peer));
                    let mut links = mesh.open_links(1, &first, ring).expect("links");
                    let deadline = Instant::now() + DEADLINE;
                    links.extend(
                        mesh.open_links_on_demand(1, &later, ring, deadline, &mut || false)
                            .expect("heartbeats"),
                    );
                    let kinds = links.iter().map(|link| (link.peer, link.kind));
                    assert!(kinds.into_iter().all(|(peer, kind)| self.expects(rank, peer) == kind));
                    (mesh, links)
                })
            };
            join((0..size).map(start).collect())
        });
        joined.into_iter().unzip()
    }

    fn host(&self, rank: Rank) -> u32 {
        self.hosts.as_ref().and_then(|hosts| hosts.get(rank.index()).copied()).unwrap_or(rank.0 % 2)
    }

    fn expects(&self, rank: u32, peer: Rank) -> LinkKind {
        match self.links {
            Links::Loopback => LinkKind::Loopback,
            Links::Tcp => LinkKind::Tcp,
            Links::TwoHosts | Links::OnDemand if self.host(Rank(rank)) != self.host(peer) => {
                LinkKind::Tcp
            }
            Links::SharedMemory | Links::TwoHosts | Links::OnDemand => LinkKind::SharedMemory,
        }
    }
}

/// The results of all threads, or the panic of the first that has one.
fn join<T>(threads: Vec<ScopedJoinHandle<'_, T>>) -> Vec<T> {
    let joined: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    let whole: std::result::Result<Vec<T>, _> = joined.into_iter().collect();
    whole.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs `body` on every rank of a world of `size`.
///
/// # Panics
/// Like [`Harness::run`].
pub fn run_world<T: Send>(
    size: usize,
    body: impl Fn(Rank, HostCommunicator) -> T + Sync,
) -> Vec<T> {
    Harness::new(size).run(body)
}

/// Submits one operation and drives it to its end.
///
/// # Errors
/// The communicator's, and `Timeout` after half a minute.
pub fn complete(communicator: &mut dyn Communicator, operation: CollectiveOperation) -> Result<()> {
    complete_all(communicator, vec![operation])
}

/// Submits operations and drives them to their end, which they must reach in this order.
///
/// # Errors
/// The communicator's, and `Timeout` after half a minute.
///
/// # Panics
/// When tokens come back in another order.
pub fn complete_all(
    communicator: &mut dyn Communicator,
    operations: Vec<CollectiveOperation>,
) -> Result<()> {
    let start = Instant::now();
    let tokens: Vec<OperationToken> = (1..).take(operations.len()).map(OperationToken).collect();
    for (token, operation) in tokens.iter().zip(operations) {
        communicator.submit_operation(*token, operation)?;
    }
    let mut completed = Vec::new();
    while communicator.pending_count() > 0 {
        if !communicator.make_progress(&mut completed)? {
            std::thread::yield_now();
        }
        let elapsed = start.elapsed();
        if elapsed > DEADLINE {
            let what = format!(
                "{} operations of member {}",
                communicator.pending_count(),
                communicator.member_index()
            );
            return Err(Error::Timeout { what, elapsed }.into());
        }
    }
    assert_eq!(completed, tokens, "operations complete in the order of their submission");
    Ok(())
}
