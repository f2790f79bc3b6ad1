// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links to tasks that accept no connections. All these links pass through the registrar, on one
//! connection of this process.
//!
//! Both ends of a link are plain TCP connections on the loopback of their host. For each called
//! task there is a loopback listener, to which callers connect. At the called task, this process
//! connects to a loopback port of the task. If one end closes its connection, the other connection
//! is closed too. If one end is lost, the other connection is reset.

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

use super::authenticated_channel::AuthenticatedChannel;
use super::socket_owner::is_own_user_connection;
use super::{TaskClient, dial};
use crate::accept_retry::AcceptRetry;
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::generated::relay_piece::What;

/// Largest number of bytes in a piece.
const MAX_PIECE_BYTES: usize = 64 << 10;
/// Pieces of a link that may wait to be sent.
// Few pieces, so that a slow reader slows the sender down through the socket.
const MAX_QUEUED_PIECES: usize = 4;
/// Timeout of the request that makes this task reachable for calls.
const CALLS_REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Callers of one listener whose user is looked up at the same time. Further callers wait in the
/// queue of the socket.
const MAX_OWNER_LOOKUPS: usize = 4;
/// Longest time that links get to close after their relay is dropped.
const LINK_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Links of this process through the registrar, in one of its worlds. Dropping it accepts no more
/// calls, and gives open links up to `LINK_CLOSE_TIMEOUT` to close.
pub struct RelayedLinks {
    caller: AuthenticatedChannel,
    handle: Handle,
    job: JobId,
    relay_world: u64,
    links: Arc<OpenLinkCounter>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

/// The number of open links, and a signal when one closes.
#[derive(Default)]
struct OpenLinkCounter {
    open: Mutex<usize>,
    closed: Condvar,
}

/// An open link, counted while the guard lives.
struct OpenLinkGuard(Arc<OpenLinkCounter>);

impl OpenLinkGuard {
    fn new(links: &Arc<OpenLinkCounter>) -> Self {
        *links.open.lock() += 1;
        Self(Arc::clone(links))
    }
}

impl Drop for OpenLinkGuard {
    fn drop(&mut self) {
        *self.0.open.lock() -= 1;
        self.0.closed.notify_all();
    }
}

impl TaskClient {
    /// Opens links through the registrar, on a separate connection, for one world of this process.
    /// `relay_world` distinguishes that world from the other worlds of this process.
    ///
    /// # Errors
    /// `Unreachable`.
    pub fn open_relay(&self, relay_world: u64) -> Result<RelayedLinks> {
        let Self { inner } = self;
        let channel =
            inner.handle.block_on(dial::open_link_channel(&inner.ticket, &inner.address))?;
        Ok(RelayedLinks {
            caller: AuthenticatedChannel { channel, ..inner.caller.clone() },
            handle: inner.handle.clone(),
            job: inner.ticket.job_id().clone(),
            relay_world,
            links: Arc::default(),
            tasks: Mutex::default(),
        })
    }
}

impl RelayedLinks {
    /// Starts to accept calls: each call becomes a connection to `port` of the loopback.
    ///
    /// # Errors
    /// `Refused` if the driver does not relay, `Lost`, `Timeout`.
    pub fn accept_relay_calls(&self, port: u16) -> Result<()> {
        let request =
            self.caller.build_request(wire::CallsRequest { relay_world: self.relay_world });
        let mut stub = self.caller.grpc_stub();
        let started = Instant::now();
        let mut calls = self
            .handle
            .block_on(async {
                tokio::time::timeout(CALLS_REQUEST_TIMEOUT, stub.calls(request)).await
            })
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
                let (caller, counted) = (caller.clone(), OpenLinkGuard::new(&links));
                tokio::spawn(async move {
                    if let Ok(socket) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                        relay_link(&caller, What::Answer(call.id), socket).await;
                    }
                    drop(counted);
                });
            }
        });
        self.tasks.lock().push(answering);
        Ok(())
    }

    /// Opens a loopback listener that leads to `task`, in the world `relay_world` of that task, and
    /// returns its address. Only the user of this process may connect.
    ///
    /// # Errors
    /// `Runtime` if no listener can be opened.
    pub fn open_listener_to_task(&self, task: TaskId, relay_world: u64) -> Result<SocketAddr> {
        let failed = |error: io::Error| Error::Runtime { reason: error.to_string() };
        let listener =
            self.handle.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (caller, links) = (self.caller.clone(), Arc::clone(&self.links));
        let listening = self.handle.spawn(async move {
            let mut failing = AcceptRetry::new("the loopback listener of a relayed link");
            let lookups = Arc::new(Semaphore::new(MAX_OWNER_LOOKUPS));
            // Nothing closes the semaphore.
            while let Ok(lookup) = Arc::clone(&lookups).acquire_owned().await {
                let (socket, from) = failing.accept_next(&listener).await;
                let (caller, counted) = (caller.clone(), OpenLinkGuard::new(&links));
                tokio::spawn(async move {
                    // The kernel's table may be long, so it is read on a blocking thread.
                    let own =
                        tokio::task::spawn_blocking(move || is_own_user_connection(address, from))
                            .await;
                    // Released before the link, which may last as long as the job.
                    drop(lookup);
                    // The loopback is open to all users of the host, but this listener leads into
                    // the job.
                    if !matches!(own, Ok(true)) {
                        return;
                    }
                    relay_link(
                        &caller,
                        What::Dial(wire::Dial { task: task.0, relay_world }),
                        socket,
                    )
                    .await;
                    drop(counted);
                });
            }
        });
        self.tasks.lock().push(listening);
        Ok(address)
    }
}

impl Drop for RelayedLinks {
    fn drop(&mut self) {
        for task in self.tasks.lock().drain(..) {
            // First no new links, then the wait: otherwise the number of open links could grow
            // meanwhile.
            task.abort();
        }
        let deadline = Instant::now() + LINK_CLOSE_TIMEOUT;
        let mut open = self.links.open.lock();
        while *open > 0 && !self.links.closed.wait_until(&mut open, deadline).timed_out() {}
    }
}

/// Relays one link from its first byte to its last.
async fn relay_link(caller: &AuthenticatedChannel, first: What, socket: TcpStream) {
    // Messages are small, and each is awaited: the kernel must not hold them back to merge them.
    let ready = socket.set_nodelay(true);
    let (to_registrar, pieces) = mpsc::channel(MAX_QUEUED_PIECES);
    let first = wire::RelayPiece { what: Some(first) };
    let request = caller.build_request(ReceiverStream::new(pieces));
    let joined = match (ready, to_registrar.try_send(first)) {
        (Ok(()), Ok(())) => caller.grpc_stub().relay(request).await.ok(),
        _ => None,
    };
    let (from_socket, mut to_socket) = socket.into_split();
    let whole = match joined {
        // If one direction breaks, end the other one too.
        Some(receiver) => tokio::try_join!(
            forward_from_socket(from_socket, to_registrar),
            forward_to_socket(receiver.into_inner(), &mut to_socket)
        )
        .is_ok(),
        None => false,
    };
    if !whole {
        // Reset the connection: the reader must distinguish a broken link from the end of the data.
        drop(to_socket.as_ref().set_zero_linger());
        to_socket.forget();
    }
}

/// Forwards the bytes of the socket to the other end.
async fn forward_from_socket(
    mut socket: OwnedReadHalf,
    pieces: mpsc::Sender<wire::RelayPiece>,
) -> std::result::Result<(), Status> {
    let mut buffer = BytesMut::new();
    loop {
        // `split` has given the earlier bytes away, so they are not copied when the buffer grows.
        buffer.reserve(MAX_PIECE_BYTES);
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

/// Forwards the pieces of the other end to the socket.
async fn forward_to_socket(
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
