// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links to tasks that accept no connections: all pass through the registrar, on one connection of
//! this process.
//!
//! Both ends of a link stay plain TCP connections, to this host's loopback: one door for each task
//! that is called, and the port of this process for those who call it. An end that closes its
//! connection closes the other's; one that is lost resets it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use farandole_world::{JobId, TaskId};
use parking_lot::{Condvar, Mutex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::caller::is_own;
use super::{Caller, Client, dial};
use crate::accepting::Failing;
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::generated::relay_piece::What;

/// Bytes of a piece at most.
const PIECE: usize = 64 << 10;
/// Pieces of a link that wait for their way.
const WAITING: usize = 4;
/// Longest time to tell the registrar that this task takes calls.
const PATIENCE: Duration = Duration::from_secs(20);
/// Callers of a door whose user is looked up at the same time; further ones wait in the queue of
/// the socket.
const LOOKUPS: usize = 4;
/// Longest time in which links must end when their relay does.
const ENDING: Duration = Duration::from_secs(1);

/// This process's links through the registrar, in one of its worlds. Dropping it takes no more
/// calls, and gives links that are about to end a moment for it.
pub struct Relay {
    caller: Caller,
    handle: Handle,
    job: JobId,
    door: u64,
    links: Arc<Links>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// Counts links.
#[derive(Default)]
struct Links {
    open: Mutex<usize>,
    closed: Condvar,
}

/// One of them, counted.
struct Counted(Arc<Links>);

impl Counted {
    fn new(links: &Arc<Links>) -> Self {
        *links.open.lock() += 1;
        Self(Arc::clone(links))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *self.0.open.lock() -= 1;
        self.0.closed.notify_all();
    }
}

impl Client {
    /// Links through the registrar for the world of this process that `door` tells apart from its
    /// others, on a connection of their own.
    ///
    /// # Errors
    /// `Unreachable`.
    pub fn relay(&self, door: u64) -> Result<Relay> {
        let Self { inner } = self;
        let channel = inner.handle.block_on(dial::again(&inner.ticket, &inner.address))?;
        Ok(Relay {
            caller: Caller { channel, ..inner.caller.clone() },
            handle: inner.handle.clone(),
            job: inner.ticket.job_id().clone(),
            door,
            links: Arc::default(),
            tasks: Mutex::default(),
        })
    }
}

impl Relay {
    /// Takes calls from now on: each becomes a connection to `port` of the loopback.
    ///
    /// # Errors
    /// `Refused` where the driver does not relay, `Lost`, `Timeout`.
    pub fn answer(&self, port: u16) -> Result<()> {
        let request = self.caller.request(wire::CallsRequest { door: self.door });
        let mut stub = self.caller.stub();
        let started = Instant::now();
        let mut calls = self
            .handle
            .block_on(async { tokio::time::timeout(PATIENCE, stub.calls(request)).await })
            .map_err(|_| Error::Timeout {
                what: "the registrar to take calls".to_owned(),
                elapsed: started.elapsed(),
            })?
            .map_err(|status| Error::Refused {
                job: self.job.0.clone(),
                call: "taking calls",
                reason: status.message().to_owned(),
            })?
            .into_inner();
        let (caller, links) = (self.caller.clone(), Arc::clone(&self.links));
        let answering = self.handle.spawn(async move {
            while let Ok(Some(call)) = calls.message().await {
                let (caller, counted) = (caller.clone(), Counted::new(&links));
                tokio::spawn(async move {
                    if let Ok(socket) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                        link(&caller, What::Answer(call.id), socket).await;
                    }
                    drop(counted);
                });
            }
        });
        self.tasks.lock().push(answering);
        Ok(())
    }

    /// Returns an address of the loopback behind which `task` is, in its world of this door, for
    /// this process's user alone.
    ///
    /// # Errors
    /// `Runtime` where nothing can be listened on.
    pub fn door(&self, task: TaskId, door: u64) -> Result<SocketAddr> {
        let failed = |error: io::Error| Error::Runtime { reason: error.to_string() };
        let listener =
            self.handle.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (caller, links) = (self.caller.clone(), Arc::clone(&self.links));
        let listening = self.handle.spawn(async move {
            let mut failing = Failing::of("a door to another host");
            let lookups = Arc::new(Semaphore::new(LOOKUPS));
            // Nothing closes the semaphore.
            while let Ok(lookup) = Arc::clone(&lookups).acquire_owned().await {
                let (socket, from) = failing.next(&listener).await;
                let (caller, counted) = (caller.clone(), Counted::new(&links));
                tokio::spawn(async move {
                    // The table may be long.
                    let own = tokio::task::spawn_blocking(move || is_own(address, from)).await;
                    drop(lookup);
                    if !matches!(own, Ok(true)) {
                        return;
                    }
                    link(&caller, What::Dial(wire::Dial { task: task.0, door }), socket).await;
                    drop(counted);
                });
            }
        });
        self.tasks.lock().push(listening);
        Ok(address)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        for task in self.tasks.lock().drain(..) {
            task.abort();
        }
        let deadline = Instant::now() + ENDING;
        let mut open = self.links.open.lock();
        while *open > 0 && !self.links.closed.wait_until(&mut open, deadline).timed_out() {}
    }
}

/// One link, from its first byte to its last.
async fn link(caller: &Caller, first: What, socket: TcpStream) {
    // Small messages, each awaited: never held back to be merged.
    let ready = socket.set_nodelay(true);
    let (to_registrar, pieces) = mpsc::channel(WAITING);
    let first = wire::RelayPiece { what: Some(first) };
    let request = caller.request(ReceiverStream::new(pieces));
    let joined = match (ready, to_registrar.try_send(first)) {
        (Ok(()), Ok(())) => caller.stub().relay(request).await.ok(),
        _ => None,
    };
    let (from_socket, mut to_socket) = socket.into_split();
    let whole = match joined {
        // Whichever way breaks, the other breaks with it.
        Some(heard) => tokio::try_join!(
            say(from_socket, to_registrar),
            hear(heard.into_inner(), &mut to_socket)
        )
        .is_ok(),
        None => false,
    };
    if !whole {
        // Not the end of the data, but of the connection: the reader must see the difference.
        drop(to_socket.as_ref().set_zero_linger());
        to_socket.forget();
    }
}

/// Sends the bytes that come from the socket.
async fn say(
    mut socket: OwnedReadHalf,
    pieces: mpsc::Sender<wire::RelayPiece>,
) -> std::result::Result<(), Status> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        let ends = socket.read_buf(&mut buffer).await? == 0;
        let what = Some(if ends { What::End(true) } else { What::Data(buffer.split().freeze()) });
        if pieces.send(wire::RelayPiece { what }).await.is_err() {
            return Err(Status::aborted("the registrar takes no more"));
        }
        if ends {
            return Ok(());
        }
    }
}

/// Hands on what the other end sends.
async fn hear(
    mut pieces: Streaming<wire::RelayPiece>,
    socket: &mut OwnedWriteHalf,
) -> std::result::Result<(), Status> {
    while let Some(piece) = pieces.message().await? {
        match piece.what {
            Some(What::Data(data)) => socket.write_all(&data).await?,
            Some(What::End(_)) => return Ok(socket.shutdown().await?),
            _ => {}
        }
    }
    Err(Status::aborted("the other end is gone"))
}
