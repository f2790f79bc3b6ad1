// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Limits of connections: strangers never displace callers with the token.
//!
//! A connection is unproven until a call on it has passed the gate. It is ended when that takes too long, and the
//! oldest of its kind makes way as soon as there is no place left; a proven one keeps its place while it lives.

use std::collections::{BTreeMap, HashSet};
use std::future::Future as _;
use std::io;
use std::net::TcpListener;
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

/// How long a connection may stay unproven.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same, more for each task: when all of a large job connect at once, their handshakes take turns.
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
    /// By age, the oldest first. Dropping what is in it ends the connection.
    unproven: BTreeMap<u64, oneshot::Sender<()>>,
    proven: HashSet<u64>,
}

impl Places {
    fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, state: Mutex::default() })
    }

    /// A place, if the proven do not have them all.
    fn take(self: &Arc<Self>) -> Option<(Seat, oneshot::Receiver<()>)> {
        let mut state = self.state.lock();
        if state.unproven.len() + state.proven.len() >= self.most {
            state.unproven.pop_first()?;
        }
        state.last += 1;
        let number = state.last;
        let (seated, unseated) = oneshot::channel();
        state.unproven.insert(number, seated);
        Some((Seat { number, proven: AtomicBool::new(false), places: Arc::clone(self) }, unseated))
    }
}

/// One place, given back when dropped.
struct Seat {
    number: u64,
    proven: AtomicBool,
    places: Arc<Places>,
}

impl Seat {
    fn prove(&self) {
        if self.proven.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.places.state.lock();
        // Whoever was unseated a moment ago stays so: the connection ends, and its caller makes another.
        if let Some(seated) = state.unproven.remove(&self.number) {
            state.proven.insert(self.number);
            self.proven.store(true, Ordering::Release);
            // Nobody listens when the connection ends at this moment.
            let _ = seated.send(());
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        state.unproven.remove(&self.number);
        state.proven.remove(&self.number);
    }
}

/// What calls know of their connection.
#[derive(Clone)]
pub(super) struct Place(Arc<Seat>);

impl Place {
    /// A call on this connection has shown the token.
    pub(super) fn prove(&self) {
        self.0.prove();
    }
}

/// How an unproven connection ends.
struct Trial {
    unseated: oneshot::Receiver<()>,
    patience: Pin<Box<Sleep>>,
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
}

/// The most connections that may be wanted: an agent and a worker for each task, twice for restarts, and a few.
pub(super) fn places(tasks: u32) -> u32 {
    tasks.saturating_mul(4).saturating_add(64)
}

/// Connections to `listener`, at most `most` at a time. What comes beyond that is closed at once, or replaces
/// one that has not shown the token.
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
        let (seat, unseated) = places.take()?;
        // Small messages, each awaited: never held back to be merged.
        stream.set_nodelay(true).ok()?;
        let trial = Trial { unseated, patience: Box::pin(tokio::time::sleep(patience)) };
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
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.judge(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.judge(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
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
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    #[test]
    fn the_oldest_unproven_makes_way_and_the_proven_never_do() {
        let places = Places::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| places.take().unwrap()).collect();
        taken[0].0.prove();
        let newcomer = places.take().unwrap();
        let ends: Vec<_> = taken.iter_mut().map(|(_, unseated)| unseated.try_recv()).collect();
        assert_eq!(ends, [Ok(()), Err(TryRecvError::Closed), Err(TryRecvError::Empty)]);
        taken[2].0.prove();
        newcomer.0.prove();
        assert!(places.take().is_none(), "the proven were unseated");
        drop(newcomer);
        assert!(places.take().is_some());
    }
}
