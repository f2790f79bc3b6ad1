// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Limits of connections: connections without the token never displace callers with the token.
//!
//! A connection is unproven until a call on it has passed the authentication. An unproven
//! connection is closed after a timeout, or when another connection needs its slot; a proven one
//! keeps its slot while it lives. The first to be closed are connections at the handshake stage
//! with the most connections (the earliest such stage), and among them the oldest one of the source
//! with the most connections. So a stranger that fills one stage does not displace callers at
//! another.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::future::Future as _;
use std::io;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::Connected;

use crate::accept_retry::AcceptRetry;

/// Longest life of an unproven connection.
// Enough for a TLS handshake over a slow network. A silent stranger holds a slot for that long.
const PROOF_TIMEOUT: Duration = Duration::from_secs(5);
/// Additional time for each task: when all tasks of a large job connect at once, their handshakes
/// are served in turn.
const PROOF_TIMEOUT_PER_TASK: Duration = Duration::from_millis(1);

/// Length of the queue of connections that wait to be accepted; the system may limit it further.
const LISTEN_BACKLOG: i32 = 4096;

/// The connection slots of a registrar.
struct AdmissionSlots {
    max_connections: usize,
    state: Mutex<AdmissionState>,
}

#[derive(Default)]
struct AdmissionState {
    last: u64,
    unproven: usize,
    /// Unproven connections by stage and source, then by age. Dropping a sender ends the
    /// connection.
    groups: BTreeMap<(HandshakeStage, IpAddr), BTreeMap<u64, oneshot::Sender<()>>>,
    proven: HashSet<u64>,
}

/// Progress of an unproven connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum HandshakeStage {
    /// The peer has sent nothing.
    #[default]
    Silent,
    /// The peer has sent data.
    Spoken,
    /// The peer has sent data after an answer, so the handshake is in its second half.
    Answered,
}

impl AdmissionState {
    fn insert_unproven_connection(
        &mut self,
        stage: HandshakeStage,
        source: IpAddr,
        number: u64,
        seated: oneshot::Sender<()>,
    ) {
        self.unproven += 1;
        self.groups.entry((stage, source)).or_default().insert(number, seated);
    }

    fn remove_unproven_connection(
        &mut self,
        stage: HandshakeStage,
        source: IpAddr,
        number: u64,
    ) -> Option<oneshot::Sender<()>> {
        let group = self.groups.get_mut(&(stage, source))?;
        let seated = group.remove(&number)?;
        if group.is_empty() {
            self.groups.remove(&(stage, source));
        }
        self.unproven -= 1;
        Some(seated)
    }

    /// Ends one unproven connection, and returns whether there was one.
    fn evict_unproven_connection(&mut self) -> bool {
        let mut sizes = BTreeMap::<HandshakeStage, usize>::new();
        for ((stage, _), group) in &self.groups {
            *sizes.entry(*stage).or_default() += group.len();
        }
        // Later stages cost a stranger more work, so the earliest of equally full stages goes
        // first.
        let fullest = sizes.into_iter().map(|(stage, size)| (size, Reverse(stage))).max();
        let Some((_, Reverse(fullest))) = fullest else { return false };
        let candidates = self.groups.iter().filter(|((stage, _), _)| *stage == fullest);
        let oldest = candidates.filter_map(|((_, source), group)| {
            group.keys().next().map(|number| (group.len(), Reverse(*number), *source))
        });
        oldest.max().is_some_and(|(_, Reverse(number), source)| {
            self.remove_unproven_connection(fullest, source, number).is_some()
        })
    }
}

/// Returns the source of an address: an IPv4 address, or a /64 network, which every IPv6 site has
/// at least.
fn admission_source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => {
            // A host may choose any address of its /64, so single addresses would not limit it.
            let [a, b, c, d, ..] = six.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        four @ IpAddr::V4(_) => four,
    }
}

impl AdmissionSlots {
    fn new(max_connections: usize) -> Arc<Self> {
        Arc::new(Self { max_connections, state: Mutex::default() })
    }

    /// Returns a slot, unless proven connections have all slots.
    fn take_connection_slot(
        self: &Arc<Self>,
        source: IpAddr,
    ) -> Option<(ConnectionSlot, oneshot::Receiver<()>)> {
        let mut state = self.state.lock();
        if state.unproven + state.proven.len() >= self.max_connections
            && !state.evict_unproven_connection()
        {
            return None;
        }
        state.last += 1;
        let number = state.last;
        let (seated, unseated) = oneshot::channel();
        state.insert_unproven_connection(HandshakeStage::default(), source, number, seated);
        let (proven, stage) = (AtomicBool::new(false), Mutex::default());
        Some((ConnectionSlot { number, source, stage, proven, places: Arc::clone(self) }, unseated))
    }
}

/// A slot of one connection, which is released on drop.
struct ConnectionSlot {
    number: u64,
    source: IpAddr,
    stage: Mutex<HandshakeStage>,
    proven: AtomicBool,
    places: Arc<AdmissionSlots>,
}

impl ConnectionSlot {
    /// Records that the connection has reached this stage.
    fn record_handshake_stage(&self, reached: HandshakeStage) {
        let mut stage = self.stage.lock();
        // A stage never goes back: data that follows an answer must not count as a first message.
        if *stage >= reached {
            return;
        }
        let mut state = self.places.state.lock();
        if let Some(seated) = state.remove_unproven_connection(*stage, self.source, self.number) {
            state.insert_unproven_connection(reached, self.source, self.number, seated);
        }
        *stage = reached;
    }

    fn mark_proven(&self) {
        // Each call on the connection comes here, so proven ones must not take the lock of all
        // slots.
        if self.proven.load(Ordering::Acquire) {
            return;
        }
        let stage = self.stage.lock();
        let mut state = self.places.state.lock();
        // A connection that was evicted a moment ago stays evicted: it ends, and its caller opens
        // another one.
        if let Some(seated) = state.remove_unproven_connection(*stage, self.source, self.number) {
            state.proven.insert(self.number);
            self.proven.store(true, Ordering::Release);
            // Sending fails if the connection ends at this moment.
            let _ = seated.send(());
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let stage = self.stage.lock();
        let mut state = self.places.state.lock();
        state.remove_unproven_connection(*stage, self.source, self.number);
        state.proven.remove(&self.number);
    }
}

/// The handle to a connection's slot for the calls on it.
#[derive(Clone)]
pub(super) struct ConnectionSlotHandle(Arc<ConnectionSlot>);

impl ConnectionSlotHandle {
    /// Marks the connection as proven, because a call on it has shown the token.
    pub(super) fn mark_proven(&self) {
        self.0.mark_proven();
    }
}

/// The limits of an unproven connection.
struct UnprovenLimits {
    unseated: oneshot::Receiver<()>,
    timeout: Pin<Box<Sleep>>,
    is_answered: bool,
}

/// A connection that releases its slot when it ends.
pub(super) struct AdmittedConnection {
    stream: TcpStream,
    trial: Option<UnprovenLimits>,
    place: ConnectionSlotHandle,
}

impl AdmittedConnection {
    /// Returns an error once the connection must end.
    fn check_unproven_limits(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(trial) = &mut self.trial else { return Ok(()) };
        match Pin::new(&mut trial.unseated).poll(context) {
            Poll::Ready(Ok(())) => {
                // A proven connection has no time limit any more.
                self.trial = None;
                Ok(())
            }
            Poll::Ready(Err(_)) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending if trial.timeout.as_mut().poll(context).is_ready() => {
                Err(io::ErrorKind::TimedOut.into())
            }
            Poll::Pending => Ok(()),
        }
    }

    fn note_written_answer(&mut self, written: &Poll<io::Result<usize>>) {
        if let Some(trial) = &mut self.trial {
            trial.is_answered |= matches!(written, Poll::Ready(Ok(_)));
        }
    }
}

/// Returns the largest useful number of connections: one for each agent and each worker, twice
/// because of restarts, and a few more.
pub(super) fn max_wanted_connections(tasks: u32) -> u32 {
    tasks.saturating_mul(4).saturating_add(64)
}

/// Returns the connections to `listener`, at most `max_connections` at a time. Further connections
/// are closed at once, or replace a connection that has not shown the token.
pub(super) fn admit_connections(
    listener: TcpListener,
    max_connections: usize,
    tasks: u32,
) -> io::Result<impl Stream<Item = io::Result<AdmittedConnection>>> {
    listener.set_nonblocking(true)?;
    // If the queue were full, many callers would retry only after one, three, and seven seconds.
    rustix::net::listen(&listener, LISTEN_BACKLOG)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = AdmissionSlots::new(max_connections);
    let timeout = PROOF_TIMEOUT + PROOF_TIMEOUT_PER_TASK * tasks;
    let mut failing = AcceptRetry::new("the registrar");
    let accepted = TcpListenerStream::new(listener).then(move |accepted| {
        let pause =
            accepted.as_ref().err().map(|error| failing.delay_after_error(error, Instant::now()));
        async move {
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
            accepted
        }
    });
    Ok(accepted.filter_map(move |accepted| {
        let stream = accepted.ok()?;
        // `peer_addr` fails if the caller is gone.
        let (seat, unseated) =
            places.take_connection_slot(admission_source(stream.peer_addr().ok()?.ip()))?;
        // Messages are small, and each is awaited: the kernel must not hold them back to merge
        // them.
        stream.set_nodelay(true).ok()?;
        let timeout = Box::pin(tokio::time::sleep(timeout));
        let trial = UnprovenLimits { unseated, timeout, is_answered: false };
        Some(Ok(AdmittedConnection {
            stream,
            trial: Some(trial),
            place: ConnectionSlotHandle(Arc::new(seat)),
        }))
    }))
}

impl Connected for AdmittedConnection {
    type ConnectInfo = ConnectionSlotHandle;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.place.clone()
    }
}

impl AsyncRead for AdmittedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_unproven_limits(context)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Some(trial) = &self.trial
            && buffer.filled().len() > before
        {
            self.place.0.record_handshake_stage(if trial.is_answered {
                HandshakeStage::Answered
            } else {
                HandshakeStage::Spoken
            });
        }
        read
    }
}

impl AsyncWrite for AdmittedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_unproven_limits(context)?;
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note_written_answer(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_unproven_limits(context)?;
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.note_written_answer(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    fn is_open((_, unseated): &mut (ConnectionSlot, oneshot::Receiver<()>)) -> bool {
        unseated.try_recv() != Err(TryRecvError::Closed)
    }

    #[test]
    fn the_oldest_unproven_makes_way_and_the_proven_never_do() {
        let places = AdmissionSlots::new(3);
        let mut taken: Vec<_> =
            (0..3).map(|_| places.take_connection_slot(HERE).unwrap()).collect();
        taken[0].0.mark_proven();
        let newcomer = places.take_connection_slot(HERE).unwrap();
        let ends: Vec<_> = taken.iter_mut().map(|(_, unseated)| unseated.try_recv()).collect();
        assert_eq!(ends, [Ok(()), Err(TryRecvError::Closed), Err(TryRecvError::Empty)]);
        taken[2].0.mark_proven();
        newcomer.0.mark_proven();
        assert!(places.take_connection_slot(HERE).is_none(), "the proven were unseated");
        drop(newcomer);
        assert!(places.take_connection_slot(HERE).is_some());
    }

    #[test]
    fn a_connection_of_the_largest_source_makes_way_before_older_ones_of_other_sources() {
        let places = AdmissionSlots::new(4);
        let mut honest = places.take_connection_slot(HERE).unwrap();
        let mut flood: Vec<_> =
            (0..100).map(|_| places.take_connection_slot(THERE).unwrap()).collect();
        assert!(is_open(&mut honest));
        assert_eq!(flood.iter_mut().filter_map(|one| is_open(one).then_some(())).count(), 3);
        assert!(is_open(flood.last_mut().unwrap()));
    }

    #[test]
    fn a_connection_in_an_earlier_stage_makes_way_before_older_ones_of_the_same_source() {
        let places = AdmissionSlots::new(3);
        let (mut spoken, mut answered) = (
            places.take_connection_slot(HERE).unwrap(),
            places.take_connection_slot(HERE).unwrap(),
        );
        spoken.0.record_handshake_stage(HandshakeStage::Spoken);
        answered.0.record_handshake_stage(HandshakeStage::Answered);
        let _flood: Vec<_> = (0..100).map(|_| places.take_connection_slot(HERE).unwrap()).collect();
        assert!(is_open(&mut spoken) && is_open(&mut answered));
        let _newcomers: Vec<_> = (0..3)
            .map(|_| {
                let newcomer = places.take_connection_slot(HERE).unwrap();
                newcomer.0.record_handshake_stage(HandshakeStage::Answered);
                newcomer
            })
            .collect();
        assert!(is_open(&mut spoken), "it is alone at its stage");
        assert!(!is_open(&mut answered), "it is the oldest at the stage where most are");
    }

    #[test]
    fn a_newcomer_is_not_displaced_by_strangers_at_a_later_stage() {
        let places = AdmissionSlots::new(8);
        let held: Vec<_> = (0..7)
            .map(|_| {
                let stranger = places.take_connection_slot(THERE).unwrap();
                stranger.0.record_handshake_stage(HandshakeStage::Spoken);
                stranger
            })
            .collect();
        let mut honest = places.take_connection_slot(HERE).unwrap();
        let _flood: Vec<_> = (0..3).map(|_| places.take_connection_slot(THERE).unwrap()).collect();
        assert!(is_open(&mut honest));
        drop(held);
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let [one, other, third] = ["2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"]
            .map(|text| admission_source(text.parse().unwrap()));
        assert_eq!(one, other);
        assert_ne!(one, third);
        assert_eq!(admission_source("::ffff:10.0.0.1".parse().unwrap()), THERE);
    }
}
