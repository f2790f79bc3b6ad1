// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The dialer's side: connects, proves the key, and has the peer prove it. Waits, with a deadline.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use farandole_shm::{Error as ShmError, handover};
use farandole_world::Rank;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv, shutdown,
    socket_with, sockopt,
};

use crate::handshake::{ACCEPTED, CHALLENGE, Carrier, Hello, Status, Transcript, VERSION, nonce};
use crate::service::PATIENCE;
use crate::shared::Shared;
use crate::{Error, Result};

/// Pause before all addresses are tried again.
const PAUSE: Duration = Duration::from_millis(50);
/// How long addresses are tried: their rank listened before it published them, so waiting longer changes nothing.
const REACH: Duration = Duration::from_secs(30);

/// Why one attempt failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Nobody listens there.
    Refused(String),
    /// It may work later.
    Unanswered(String),
    /// Somebody answered who does not hold the key.
    Stranger(String),
    /// The peer answered, and does not want this.
    Declined(String),
}

impl Failure {
    fn answered(&self) -> bool {
        matches!(self, Self::Stranger(_) | Self::Declined(_))
    }
}

type Attempt<T> = std::result::Result<T, Failure>;

/// What to ask a peer for.
pub(crate) struct Request {
    pub(crate) to: Rank,
    pub(crate) carrier: Carrier,
    pub(crate) channel: u32,
    pub(crate) capacity: u64,
}

/// Connects to a name in the abstract namespace.
pub(crate) fn local(name: &str, deadline: Instant) -> Attempt<OwnedFd> {
    let failed = |error: Errno| match error {
        Errno::CONNREFUSED => Failure::Refused(error.to_string()),
        _ => Failure::Unanswered(error.to_string()),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // The queue of the listener is full: its thread is about to empty it.
            Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(socket)
}

fn remote(address: SocketAddr, deadline: Instant) -> Attempt<OwnedFd> {
    let left = left(deadline)?;
    let stream = TcpStream::connect_timeout(&address, left).map_err(|error| match error.kind() {
        std::io::ErrorKind::ConnectionRefused => Failure::Refused(format!("{address}: {error}")),
        _ => Failure::Unanswered(format!("{address}: {error}")),
    })?;
    stream.set_nodelay(true).map_err(|error| Failure::Unanswered(error.to_string()))?;
    Ok(stream.into())
}

/// Tries the addresses in turn until one answers as the peer or the deadline passes. When every address refuses, or
/// answers as somebody else, twice, the peer is gone: it listened before it published its addresses.
pub(crate) fn any(
    shared: &Shared,
    request: &Request,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<OwnedFd> {
    let started = Instant::now();
    let deadline = deadline.min(started + REACH);
    let mut before = false;
    loop {
        let mut last = Failure::Refused("it offered no address".to_owned());
        let mut final_words = true;
        for address in addresses {
            let attempt = deadline.min(Instant::now() + PATIENCE);
            let outcome = remote(*address, attempt)
                .and_then(|socket| converse(shared, request, socket, &[], attempt).map(|(socket, _)| socket));
            match outcome {
                Ok(socket) => return Ok(socket),
                Err(failure) => {
                    final_words &= !matches!(failure, Failure::Unanswered(_));
                    // An answer says more than silence or a refused connection.
                    if failure.answered() || !last.answered() {
                        last = failure;
                    }
                }
            }
        }
        let settled = final_words && before;
        before = final_words;
        if settled || Instant::now() + PAUSE >= deadline {
            return Err(match last {
                Failure::Stranger(reason) | Failure::Declined(reason) => Error::Handshake { reason },
                Failure::Refused(reason) | Failure::Unanswered(reason) => Error::Unreachable {
                    rank: request.to,
                    addresses: addresses.iter().map(ToString::to_string).collect(),
                    elapsed: started.elapsed(),
                    reason,
                },
            });
        }
        thread::sleep(PAUSE);
    }
}

/// Whether a rank that keeps us waiting still listens; `None` when nothing answers. Says nothing to it: its service
/// thread then hangs up, which the kernel, accepting for a stopped process, does not.
pub(crate) fn listens(local_name: Option<&str>, addresses: &[SocketAddr], deadline: Instant) -> Option<bool> {
    let name = local_name.map(|name| local(name, deadline));
    let mut silent = false;
    for attempt in name.into_iter().chain(addresses.iter().map(|address| remote(*address, deadline))) {
        match attempt.and_then(|socket| hung_up(&socket, deadline)) {
            Ok(()) => return Some(true),
            Err(failure) => silent |= !matches!(failure, Failure::Refused(_)),
        }
    }
    if silent { None } else { Some(false) }
}

fn hung_up(socket: &OwnedFd, deadline: Instant) -> Attempt<()> {
    let failed = |error: Errno| Failure::Unanswered(error.to_string());
    shutdown(socket, Shutdown::Write).map_err(failed)?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left(deadline)?)).map_err(failed)?;
    recv(socket, &mut [0_u8; 1][..], RecvFlags::empty()).map(drop).map_err(failed)
}

/// The handshake on a connected socket, which blocks; returns what the peer handed over.
pub(crate) fn converse(
    shared: &Shared,
    request: &Request,
    socket: OwnedFd,
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Attempt<(OwnedFd, Vec<OwnedFd>)> {
    let hello = Hello {
        version: VERSION,
        carrier: request.carrier,
        generation: shared.generation,
        channel: request.channel,
        from: shared.rank,
        to: request.to,
        size: shared.size,
        capacity: request.capacity,
        nonce: nonce().map_err(|error| Failure::Unanswered(error.to_string()))?,
    }
    .encode();
    send(&socket, &hello, &[])?;
    let mut challenge = [0; CHALLENGE];
    // Nothing was proved yet: what comes along is closed.
    drop(receive(&socket, &mut challenge, deadline)?);
    let (transcript, status) = Transcript::read(&shared.key, hello, &challenge)
        .map_err(|reason| Failure::Stranger(format!("rank {}: {reason}", request.to)))?;
    welcome(request, status)?;
    send(&socket, &transcript.proof(), descriptors)?;
    let mut accepted = [0; ACCEPTED];
    let arrived = receive(&socket, &mut accepted, deadline)?;
    let status = transcript
        .accepted(&accepted)
        .ok_or_else(|| Failure::Stranger(format!("rank {}: the last code does not hold", request.to)))?;
    welcome(request, status)?;
    Ok((socket, arrived))
}

fn welcome(request: &Request, status: Status) -> Attempt<()> {
    match status {
        Status::Welcome => Ok(()),
        status => Err(Failure::Declined(format!("rank {} turned us away: {status}", request.to))),
    }
}

fn left(deadline: Instant) -> Attempt<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Failure::Unanswered("no answer in time".to_owned())) } else { Ok(left) }
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Attempt<()> {
    handover::send(socket.as_fd(), bytes, descriptors).map_err(|error| Failure::Unanswered(error.to_string()))
}

fn receive(socket: &OwnedFd, bytes: &mut [u8], deadline: Instant) -> Attempt<Vec<OwnedFd>> {
    let mut descriptors = Vec::new();
    let mut filled = 0;
    while filled < bytes.len() {
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left(deadline)?))
            .map_err(|error| Failure::Unanswered(error.to_string()))?;
        match handover::receive(socket, &mut bytes[filled..]) {
            Ok((0, _)) => {
                return Err(Failure::Unanswered("the connection was closed during the handshake".to_owned()));
            }
            Ok((received, arrived)) => {
                filled += received;
                descriptors.extend(arrived);
            }
            Err(ShmError::System { source: Errno::AGAIN, .. }) => {}
            Err(error) => return Err(Failure::Unanswered(error.to_string())),
        }
    }
    Ok(descriptors)
}
