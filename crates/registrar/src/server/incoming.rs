// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Limits of connections: strangers never displace callers with the token.
//!
//! A connection is unproven until a call on it has passed the gate. It is ended when that takes too
//! long, and one of its kind makes way as soon as there is no place left; a proven one keeps its
//! place while it lives. The first to make way are those at the stage of the handshake where most
//! are (the earliest such stage), and of these the oldest from where most come. So a stranger that
//! fills one stage does not displace callers at another.

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

use crate::accepting::Failing;

/// Longest life of an unproven connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same, more for each task: when all of a large job connect at once, their handshakes take
/// turns.
const TURN: Duration = Duration::from_millis(1);

/// Connections that wait to be accepted, as far as the system lets them.
const QUEUE: i32 = 4096;

/// The places of a registrar.
struct Places {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: u64,
    unproven: usize,
    /// By stage and source, then by age. Dropping a sender ends the connection.
    groups: BTreeMap<(Stage, IpAddr), BTreeMap<u64, oneshot::Sender<()>>>,
    proven: HashSet<u64>,
}

/// Progress of an unproven connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// It has sent nothing.
    #[default]
    Silent,
    /// It has sent something.
    Spoken,
    /// It has sent something after it was answered, so the handshake has reached its second half.
    Answered,
}

impl State {
    fn insert(&mut self, stage: Stage, source: IpAddr, number: u64, seated: oneshot::Sender<()>) {
        self.unproven += 1;
        self.groups.entry((stage, source)).or_default().insert(number, seated);
    }

    fn remove(&mut self, stage: Stage, source: IpAddr, number: u64) -> Option<oneshot::Sender<()>> {
        let group = self.groups.get_mut(&(stage, source))?;
        let seated = group.remove(&number)?;
        if group.is_empty() {
            self.groups.remove(&(stage, source));
        }
        self.unproven -= 1;
        Some(seated)
    }

    /// Ends one unproven connection; whether there was one.
    fn unseat(&mut self) -> bool {
        let mut sizes = BTreeMap::<Stage, usize>::new();
        for ((stage, _), group) in &self.groups {
            *sizes.entry(*stage).or_default() += group.len();
        }
        let fullest = sizes.into_iter().map(|(stage, size)| (size, Reverse(stage))).max();
        let Some((_, Reverse(fullest))) = fullest else { return false };
        let candidates = self.groups.iter().filter(|((stage, _), _)| *stage == fullest);
        let oldest = candidates.filter_map(|((_, source), group)| {
            group.keys().next().map(|number| (group.len(), Reverse(*number), *source))
        });
        oldest.max().is_some_and(|(_, Reverse(number), source)| {
            self.remove(fullest, source, number).is_some()
        })
    }
}

/// Returns one source: an IPv4 address, or the network of 64 bits that an IPv6 site has at least.
fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => {
            let [a, b, c, d, ..] = six.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        four @ IpAddr::V4(_) => four,
    }
}

impl Places {
    fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, state: Mutex::default() })
    }

    /// Returns a place, if the proven do not have them all.
    fn take(self: &Arc<Self>, source: IpAddr) -> Option<(Seat, oneshot::Receiver<()>)> {
        let mut state = self.state.lock();
        if state.unproven + state.proven.len() >= self.most && !state.unseat() {
            return None;
        }
        state.last += 1;
        let number = state.last;
        let (seated, unseated) = oneshot::channel();
        state.insert(Stage::default(), source, number, seated);
        let (proven, stage) = (AtomicBool::new(false), Mutex::default());
        Some((Seat { number, source, stage, proven, places: Arc::clone(self) }, unseated))
    }
}

/// One place, given back when dropped.
struct Seat {
    number: u64,
    source: IpAddr,
    stage: Mutex<Stage>,
    proven: AtomicBool,
    places: Arc<Places>,
}

impl Seat {
    /// The connection has come so far.
    fn reach(&self, reached: Stage) {
        let mut stage = self.stage.lock();
        if *stage >= reached {
            return;
        }
        let mut state = self.places.state.lock();
        if let Some(seated) = state.remove(*stage, self.source, self.number) {
            state.insert(reached, self.source, self.number, seated);
        }
        *stage = reached;
    }

    fn prove(&self) {
        if self.proven.load(Ordering::Acquire) {
            return;
        }
        let stage = self.stage.lock();
        let mut state = self.places.state.lock();
        // Whoever was unseated a moment ago stays so: the connection ends, and its caller makes
        // another.
        if let Some(seated) = state.remove(*stage, self.source, self.number) {
            state.proven.insert(self.number);
            self.proven.store(true, Ordering::Release);
            // There is no receiver if the connection ends at this moment.
            let _ = seated.send(());
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let stage = self.stage.lock();
        let mut state = self.places.state.lock();
        state.remove(*stage, self.source, self.number);
        state.proven.remove(&self.number);
    }
}

/// The data of a connection that its calls can use.
#[derive(Clone)]
pub(super) struct Place(Arc<Seat>);

impl Place {
    /// A call on this connection has shown the token.
    pub(super) fn prove(&self) {
        self.0.prove();
    }
}

/// The limits of an unproven connection.
struct Trial {
    unseated: oneshot::Receiver<()>,
    patience: Pin<Box<Sleep>>,
    is_answered: bool,
}

/// A connection that gives its place back when it ends.
pub(super) struct Counted {
    stream: TcpStream,
    trial: Option<Trial>,
    place: Place,
}

impl Counted {
    /// An error once the connection has to end.
    fn judge(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(trial) = &mut self.trial else { return Ok(()) };
        match Pin::new(&mut trial.unseated).poll(context) {
            Poll::Ready(Ok(())) => {
                self.trial = None;
                Ok(())
            }
            Poll::Ready(Err(_)) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending if trial.patience.as_mut().poll(context).is_ready() => {
                Err(io::ErrorKind::TimedOut.into())
            }
            Poll::Pending => Ok(()),
        }
    }

    fn answered(&mut self, written: &Poll<io::Result<usize>>) {
        if let Some(trial) = &mut self.trial {
            trial.is_answered |= matches!(written, Poll::Ready(Ok(_)));
        }
    }
}

/// Returns the most connections that may be wanted: an agent and a worker for each task, twice for
/// restarts, and a few.
pub(super) fn places(tasks: u32) -> u32 {
    tasks.saturating_mul(4).saturating_add(64)
}

/// Connections to `listener`, at most `most` at a time. Connections beyond that are closed at once,
/// or replace one that has not shown the token.
pub(super) fn accept(
    listener: TcpListener,
    most: usize,
    tasks: u32,
) -> io::Result<impl Stream<Item = io::Result<Counted>>> {
    listener.set_nonblocking(true)?;
    // A crowd that finds the queue full would try again only after a second, and three, and seven.
    rustix::net::listen(&listener, QUEUE)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Places::new(most);
    let patience = PATIENCE + TURN * tasks;
    let mut failing = Failing::of("the registrar");
    let accepted = TcpListenerStream::new(listener).then(move |accepted| {
        let pause = accepted.as_ref().err().map(|error| failing.met(error, Instant::now()));
        async move {
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
            accepted
        }
    });
    Ok(accepted.filter_map(move |accepted| {
        let stream = accepted.ok()?;
        // An address is an error if the caller is gone.
        let (seat, unseated) = places.take(source_of(stream.peer_addr().ok()?.ip()))?;
        // Small messages, each awaited: never held back to be merged.
        stream.set_nodelay(true).ok()?;
        let patience = Box::pin(tokio::time::sleep(patience));
        let trial = Trial { unseated, patience, is_answered: false };
        Some(Ok(Counted { stream, trial: Some(trial), place: Place(Arc::new(seat)) }))
    }))
}

impl Connected for Counted {
    type ConnectInfo = Place;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.place.clone()
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.judge(context)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Some(trial) = &self.trial
            && buffer.filled().len() > before
        {
            self.place.0.reach(if trial.is_answered { Stage::Answered } else { Stage::Spoken });
        }
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.judge(context)?;
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.answered(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.judge(context)?;
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.answered(&written);
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

    fn is_open((_, unseated): &mut (Seat, oneshot::Receiver<()>)) -> bool {
        unseated.try_recv() != Err(TryRecvError::Closed)
    }

    #[test]
    fn the_oldest_unproven_makes_way_and_the_proven_never_do() {
        let places = Places::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| places.take(HERE).unwrap()).collect();
        taken[0].0.prove();
        let newcomer = places.take(HERE).unwrap();
        let ends: Vec<_> = taken.iter_mut().map(|(_, unseated)| unseated.try_recv()).collect();
        assert_eq!(ends, [Ok(()), Err(TryRecvError::Closed), Err(TryRecvError::Empty)]);
        taken[2].0.prove();
        newcomer.0.prove();
        assert!(places.take(HERE).is_none(), "the proven were unseated");
        drop(newcomer);
        assert!(places.take(HERE).is_some());
    }

    #[test]
    fn a_connection_of_the_largest_source_makes_way_before_older_ones_of_other_sources() {
        let places = Places::new(4);
        let mut honest = places.take(HERE).unwrap();
        let mut flood: Vec<_> = (0..100).map(|_| places.take(THERE).unwrap()).collect();
        assert!(is_open(&mut honest));
        assert_eq!(flood.iter_mut().filter_map(|one| is_open(one).then_some(())).count(), 3);
        assert!(is_open(flood.last_mut().unwrap()));
    }

    #[test]
    fn a_connection_in_an_earlier_stage_makes_way_before_older_ones_of_the_same_source() {
        let places = Places::new(3);
        let (mut spoken, mut answered) = (places.take(HERE).unwrap(), places.take(HERE).unwrap());
        spoken.0.reach(Stage::Spoken);
        answered.0.reach(Stage::Answered);
        let _flood: Vec<_> = (0..100).map(|_| places.take(HERE).unwrap()).collect();
        assert!(is_open(&mut spoken) && is_open(&mut answered));
        let _newcomers: Vec<_> = (0..3)
            .map(|_| {
                let newcomer = places.take(HERE).unwrap();
                newcomer.0.reach(Stage::Answered);
                newcomer
            })
            .collect();
        assert!(is_open(&mut spoken), "it is alone at its stage");
        assert!(!is_open(&mut answered), "it is the oldest at the stage where most are");
    }

    #[test]
    fn a_newcomer_is_not_displaced_by_strangers_at_a_later_stage() {
        let places = Places::new(8);
        let held: Vec<_> = (0..7)
            .map(|_| {
                let stranger = places.take(THERE).unwrap();
                stranger.0.reach(Stage::Spoken);
                stranger
            })
            .collect();
        let mut honest = places.take(HERE).unwrap();
        let _flood: Vec<_> = (0..3).map(|_| places.take(THERE).unwrap()).collect();
        assert!(is_open(&mut honest));
        drop(held);
    }

    #[test]
    fn a_network_of_ipv6_is_one_source() {
        let [one, other, third] = ["2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"]
            .map(|text| source_of(text.parse().unwrap()));
        assert_eq!(one, other);
        assert_ne!(one, third);
        assert_eq!(source_of("::ffff:10.0.0.1".parse().unwrap()), THERE);
    }
}
