// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Link halves over a TCP connection: a private ring each way, pumped by whoever polls.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use farandole_shm::{Consumer, Guard, Producer, private};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt};

use crate::peer::Peer;
use crate::{Error, Link, LinkKind, LinkReceiver, LinkSender, Parker, Result};

const CLOSED: &str = "it closed the connection";

struct Connection {
    socket: OwnedFd,
    peer: Arc<Peer>,
    parker: Parker,
    guard: Guard,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.parker.unwatch(&self.socket);
    }
}

/// A link over a connected socket.
pub(crate) fn link(socket: OwnedFd, peer: Arc<Peer>, parker: Parker, capacity: usize) -> Result<Link> {
    rustix::io::ioctl_fionbio(&socket, true).map_err(Error::of("ioctl"))?;
    sockopt::set_tcp_nodelay(&socket, true).map_err(Error::of("setsockopt"))?;
    parker.watch(&socket)?;
    let rank = peer.rank;
    let connection = Arc::new(Connection { socket, peer, parker, guard: Guard::new() });
    let (outgoing, pending) = private(capacity)?;
    let (arriving, incoming) = private(capacity)?;
    Ok(Link {
        peer: rank,
        kind: LinkKind::Tcp,
        capacity: outgoing.capacity(),
        sender: Box::new(TcpSender { connection: Arc::clone(&connection), outgoing, pending, broken: None }),
        receiver: Box::new(TcpReceiver { connection, arriving, incoming, ended: None, full: false }),
    })
}

struct TcpSender {
    connection: Arc<Connection>,
    /// The caller's end of the ring.
    outgoing: Producer,
    /// The socket's end.
    pending: Consumer,
    broken: Option<String>,
}

impl TcpSender {
    fn pump(&mut self) -> Result<()> {
        let peer = &self.connection.peer;
        if let Some(reason) = &self.broken {
            return Err(peer.gone(reason));
        }
        if let Some(error) = peer.lost() {
            return Err(error);
        }
        loop {
            let window = self.pending.window()?;
            if window.is_empty() {
                return Ok(());
            }
            match send(&self.connection, window, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => {
                    self.pending.release(sent)?;
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => {
                    let reason = if error == Errno::PIPE { CLOSED.to_owned() } else { error.to_string() };
                    let lost = peer.gone(&reason);
                    self.broken = Some(reason);
                    return Err(lost);
                }
            }
        }
    }
}

impl LinkSender for TcpSender {
    fn window(&mut self) -> Result<&mut [u8]> {
        self.pump()?;
        Ok(self.outgoing.window()?)
    }

    fn commit(&mut self, bytes: usize) -> Result<()> {
        self.outgoing.commit(bytes)?;
        self.pump()
    }

    fn flush(&mut self) -> Result<bool> {
        self.pump()?;
        Ok(self.pending.used()? == 0)
    }
}

impl Drop for TcpSender {
    fn drop(&mut self) {
        if self.connection.guard.intact() {
            // What the peer no longer takes is lost, as the documentation of a drop says.
            drop(self.pump());
            let _ = shutdown(&self.connection, Shutdown::Write);
        }
    }
}

struct TcpReceiver {
    connection: Arc<Connection>,
    /// The socket's end of the ring.
    arriving: Producer,
    /// The caller's end.
    incoming: Consumer,
    /// Why nothing more will come.
    ended: Option<String>,
    /// The ring was full: bytes may wait in the socket without an edge to tell.
    full: bool,
}

impl TcpReceiver {
    fn pump(&mut self) -> Result<()> {
        while self.ended.is_none() {
            let window = self.arriving.window()?;
            let space = window.len();
            self.full = space == 0;
            if self.full {
                break;
            }
            match recv(&self.connection, window, RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.ended = Some(CLOSED.to_owned()),
                Ok((received, _)) => {
                    self.arriving.commit(received)?;
                    if received < space {
                        break;
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => self.ended = Some(error.to_string()),
            }
        }
        Ok(())
    }
}

impl LinkReceiver for TcpReceiver {
    fn window(&mut self) -> Result<&[u8]> {
        self.pump()?;
        if self.incoming.used()? == 0 {
            self.awaits()?;
        }
        Ok(self.incoming.window()?)
    }

    fn awaits(&mut self) -> Result<()> {
        let peer = &self.connection.peer;
        if let Some(reason) = &self.ended {
            return Err(peer.gone(reason));
        }
        peer.lost().map_or(Ok(()), Err)
    }

    fn release(&mut self, bytes: usize) -> Result<()> {
        self.incoming.release(bytes)?;
        if self.full { self.pump() } else { Ok(()) }
    }
}
