// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The dialer's side: connects, proves the key, and has the peer prove it. Waits, with a deadline.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use farandole_shm::{Error as ShmError, handover};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    shutdown, socket_with, sockopt,
};

use crate::handshake::exchange::{Keys, Side};
use crate::handshake::{
    self, ACCEPTED, CHALLENGE, Carrier, Hello, OPENING, Offer, Status, VERSION, nonce,
};
use crate::peer::Peer;
use crate::race::{Outcome, Race};
use crate::record::Suite;
use crate::service::PATIENCE;
use crate::shared::{Secured, Shared};
use crate::spread::Pair;
use crate::{Error, Result};

/// Pause before all addresses are tried again.
const PAUSE: Duration = Duration::from_millis(50);
/// Time for which addresses are tried: their rank listened before it published them, so waiting
/// longer changes nothing.
const REACH: Duration = Duration::from_secs(30);

const LAST_LOOK: Duration = Duration::from_millis(1);
pub(crate) const LATE: &str = "no answer in time";

/// The reason why one attempt failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No process listens there.
    Refused(String),
    /// It may work later.
    Unanswered(String),
    /// The connection was made, and then nothing was heard: so does the kernel accept for a stopped
    /// process.
    Silent(String),
    /// It hung up, and so has not taken its end.
    Closed(String),
    /// The peer said welcome and may have taken its end; then the exchange broke.
    Broken(String),
    /// Not the peer's doing.
    Own(Error),
    /// A process without the key answered.
    Stranger(String),
    /// The peer answered, and does not want this.
    Declined(String),
}

impl Failure {
    /// A failed call of ours. Without free descriptors no peer can be asked, which says nothing
    /// about the peer.
    pub(crate) fn call(what: &'static str, errno: Option<Errno>, reason: String) -> Self {
        match errno {
            Some(Errno::MFILE | Errno::NFILE) => Self::Own(Error::System { what, reason }),
            Some(Errno::CONNREFUSED) => Self::Refused(reason),
            _ => Self::Unanswered(reason),
        }
    }

    fn answered(&self) -> bool {
        matches!(self, Self::Stranger(_) | Self::Declined(_))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(reason)
            | Self::Unanswered(reason)
            | Self::Silent(reason)
            | Self::Closed(reason)
            | Self::Broken(reason)
            | Self::Stranger(reason)
            | Self::Declined(reason) => f.write_str(reason),
            Self::Own(error) => error.fmt(f),
        }
    }
}

/// The silence of a peer that accepts connections.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    since: Option<Instant>,
    attempts: u32,
}

impl Silence {
    /// An attempt that began at `started` met with silence.
    pub(crate) fn goes_on(&mut self, started: Instant) {
        self.since.get_or_insert(started);
        self.attempts += 1;
    }

    /// Returns whether it lasts too long. One attempt is not enough: we may have been stopped
    /// ourselves in it.
    pub(crate) fn is_death(&self, timeout: Duration) -> bool {
        self.attempts > 1 && self.since.is_some_and(|since| since.elapsed() >= timeout)
    }
}

/// A wait that ends at a deadline, or when the caller no longer wants it.
pub(crate) struct Wait<'a> {
    pub(crate) deadline: Instant,
    pub(crate) give_up: &'a mut dyn FnMut() -> bool,
}

impl Wait<'_> {
    /// Asks the caller.
    pub(crate) fn ask(&mut self) -> Result<()> {
        if (self.give_up)() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Returns the time at which an attempt to reach a peer ends. A silent peer is met twice within
    /// the timeout.
    pub(crate) fn attempt(&self, shared: &Shared) -> Instant {
        self.deadline.min(Instant::now() + self.patience(shared))
    }

    /// The longest attempt.
    fn patience(&self, shared: &Shared) -> Duration {
        PATIENCE.min(shared.peer_timeout / 2)
    }
}

pub(crate) type Attempt<T> = std::result::Result<T, Failure>;

/// The request to a peer.
pub(crate) struct Request<'a> {
    pub(crate) to: &'a Peer,
    pub(crate) carrier: Carrier,
    pub(crate) channel: u32,
    /// Number of the connection, and of all connections of the link.
    pub(crate) stream: (u16, u16),
    pub(crate) capacity: u64,
}

/// Connects to a name in the abstract namespace.
pub(crate) fn local(name: &str, deadline: Instant) -> Attempt<OwnedFd> {
    let failed = |error: Errno| Failure::call("socket", Some(error), error.to_string());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // The queue of the listener is full: its thread is about to empty it.
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1))
            }
            Err(Errno::AGAIN) => {
                return Err(Failure::Silent("its queue of connections stays full".to_owned()));
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(socket)
}

/// Tries the addresses, the one that led to the peer before first, until one answers as the peer or
/// the deadline passes. If every address refuses, or answers as another process, twice, the peer is
/// gone: it listened before it published its addresses. So is one that can be connected to and says
/// nothing for the peer timeout.
pub(crate) fn any(
    shared: &Shared,
    request: &Request<'_>,
    addresses: &[SocketAddr],
    wait: &mut Wait<'_>,
) -> Result<Secured> {
    let started = Instant::now();
    let deadline = wait.deadline.min(started + REACH.max(2 * shared.peer_timeout));
    let mut before = false;
    let mut silence = Silence::default();
    let reached = *request.to.reached.lock();
    let mut addresses = addresses.to_vec();
    addresses.sort_by_key(|address| Some(*address) != reached);
    let patience = wait.patience(shared);
    loop {
        let mut last = Failure::Refused("it offered no address".to_owned());
        let mut final_words = true;
        let mut heard = false;
        wait.ask()?;
        for Outcome { address, began, socket } in Race::new(&addresses, deadline, patience) {
            wait.ask()?;
            let attempt = deadline.min(Instant::now() + patience);
            match socket.and_then(|socket| secure(shared, request, socket, attempt)) {
                Ok(secured) => {
                    *request.to.reached.lock() = Some(address);
                    return Ok(secured);
                }
                Err(Failure::Own(error)) => return Err(error),
                Err(failure) => {
                    final_words &= matches!(failure, Failure::Refused(_)) || failure.answered();
                    heard |= matches!(failure, Failure::Closed(_)) || failure.answered();
                    if matches!(failure, Failure::Silent(_) | Failure::Broken(_)) {
                        silence.goes_on(began);
                    }
                    // An answer says more than silence or a refused connection.
                    if failure.answered() || !last.answered() {
                        last = failure;
                    }
                }
            }
        }
        if heard {
            silence = Silence::default();
        } else if silence.is_death(shared.peer_timeout) {
            return Err(request
                .to
                .gone(&format!("it accepts connections but does not answer: {last}")));
        }
        let settled = final_words && before;
        before = final_words;
        if settled || Instant::now() + PAUSE >= deadline {
            return Err(match last {
                Failure::Stranger(reason) | Failure::Declined(reason) => {
                    Error::Handshake { reason }
                }
                other => Error::Unreachable {
                    rank: request.to.rank,
                    addresses: addresses.iter().map(ToString::to_string).collect(),
                    elapsed: started.elapsed(),
                    reason: other.to_string(),
                },
            });
        }
        thread::sleep(PAUSE);
    }
}

/// Tries one pair of addresses, once.
///
/// # Errors
/// `Interrupted`; `System` when this process has no descriptors left.
pub(crate) fn over(
    shared: &Shared,
    request: &Request<'_>,
    pair: Pair,
    wait: &mut Wait<'_>,
) -> Result<Attempt<Secured>> {
    wait.ask()?;
    let deadline = wait.attempt(shared);
    let patience = deadline.saturating_duration_since(Instant::now());
    let mut race = Race::new(&[pair.to], deadline, patience).with_source(pair.from);
    let socket = race.next().map_or_else(
        || Err(Failure::Unanswered(format!("{}: {LATE}", pair.to))),
        |outcome| outcome.socket,
    );
    match socket.and_then(|socket| secure(shared, request, socket, wait.attempt(shared))) {
        Err(Failure::Own(error)) => Err(error),
        attempt => Ok(attempt),
    }
}

/// The handshake of a connection over TCP.
fn secure(
    shared: &Shared,
    request: &Request<'_>,
    socket: OwnedFd,
    deadline: Instant,
) -> Attempt<Secured> {
    let (socket, keys, _) = converse(shared, request, socket, &[], deadline)?;
    let keyless = || Failure::Stranger(format!("rank {}: a bad public key", request.to.rank));
    Ok(Secured { socket, keys: Box::new(keys.ok_or_else(keyless)?) })
}

/// Returns whether a rank that keeps us waiting still listens; `None` when nothing answers. Says
/// nothing to it: its service thread then hangs up, which the kernel, accepting for a stopped
/// process, does not.
pub(crate) fn listens(
    local_name: Option<&str>,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<Option<bool>> {
    let name = local_name.map(|name| local(name, deadline));
    let mut silent = false;
    let race = Race::new(addresses, deadline, deadline.saturating_duration_since(Instant::now()));
    for attempt in name.into_iter().chain(race.map(|outcome| outcome.socket)) {
        match attempt.and_then(|socket| hung_up(&socket, deadline)) {
            Ok(()) => return Ok(Some(true)),
            Err(Failure::Own(error)) => return Err(error),
            Err(failure) => silent |= !matches!(failure, Failure::Refused(_)),
        }
    }
    Ok(if silent { None } else { Some(false) })
}

fn hung_up(socket: &OwnedFd, deadline: Instant) -> Attempt<()> {
    let failed = |error: Errno| Failure::Unanswered(error.to_string());
    shutdown(socket, Shutdown::Write).map_err(failed)?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left(deadline)?))
        .map_err(failed)?;
    recv(socket, &mut [0_u8; 1][..], RecvFlags::empty()).map(drop).map_err(failed)
}

/// The handshake on a connected socket, which blocks; returns what the peer handed over.
pub(crate) fn converse(
    shared: &Shared,
    request: &Request<'_>,
    socket: OwnedFd,
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Attempt<(OwnedFd, Option<Keys>, Vec<OwnedFd>)> {
    let own = |error: Error| Failure::Unanswered(error.to_string());
    let hello = Hello {
        version: VERSION,
        carrier: request.carrier,
        suite: Suite::own(),
        generation: shared.generation,
        channel: request.channel,
        from: shared.rank,
        to: request.to.rank,
        size: shared.size,
        stream: request.stream.0,
        streams: request.stream.1,
        capacity: request.capacity,
        nonce: nonce().map_err(own)?,
    };
    let offer = Offer::new(&shared.key, &hello).map_err(own)?;
    send(&socket, offer.hello(), &[])?;
    let stranger = |reason: &str| Failure::Stranger(format!("rank {}: {reason}", request.to.rank));
    let mut challenge = [0; CHALLENGE];
    let (opening, rest) = challenge.split_at_mut(OPENING);
    // Nothing was proved yet: what comes along is closed.
    drop(receive(&socket, opening, deadline)?);
    match handshake::version(opening) {
        Some(VERSION) => {}
        Some(other) => {
            let reason = format!(
                "it speaks version {other} of the protocol between ranks, this process {VERSION}"
            );
            return Err(stranger(&reason));
        }
        None => return Err(stranger("what listens there speaks another protocol")),
    }
    drop(receive(&socket, rest, deadline)?);
    let (transcript, status) = offer.read(&challenge).map_err(stranger)?;
    welcome(request, status)?;
    send(&socket, &transcript.proof(), descriptors)?;
    let mut accepted = [0; ACCEPTED];
    let arrived = receive(&socket, &mut accepted, deadline).map_err(|failure| match failure {
        Failure::Silent(reason) | Failure::Unanswered(reason) => Failure::Broken(reason),
        other => other,
    })?;
    let status = transcript.accepted(&accepted).ok_or_else(|| {
        Failure::Stranger(format!("rank {}: the last code does not hold", request.to.rank))
    })?;
    welcome(request, status)?;
    Ok((socket, transcript.keys(Side::Dialer), arrived))
}

fn welcome(request: &Request<'_>, status: Status) -> Attempt<()> {
    match status {
        Status::Welcome => Ok(()),
        status => {
            Err(Failure::Declined(format!("rank {} turned us away: {status}", request.to.rank)))
        }
    }
}

fn left(deadline: Instant) -> Attempt<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Failure::Unanswered(LATE.to_owned())) } else { Ok(left) }
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Attempt<()> {
    handover::send(socket.as_fd(), bytes, descriptors)
        .map_err(|error| Failure::Unanswered(error.to_string()))
}

fn receive(socket: &OwnedFd, bytes: &mut [u8], deadline: Instant) -> Attempt<Vec<OwnedFd>> {
    let closed = || Failure::Closed("the connection was closed during the handshake".to_owned());
    let mut descriptors = Vec::new();
    let mut filled = 0;
    while filled < bytes.len() {
        // If we were stopped ourselves the answer may lie here, so there is a look after the
        // deadline too.
        let (left, last) = left(deadline).map_or((LAST_LOOK, true), |left| (left, false));
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left))
            .map_err(|error| Failure::Unanswered(error.to_string()))?;
        match handover::receive(socket, &mut bytes[filled..]) {
            Ok((0, _)) => return Err(closed()),
            Ok((received, arrived)) => {
                filled += received;
                descriptors.extend(arrived);
            }
            Err(ShmError::System { source: Errno::AGAIN | Errno::INTR, .. }) if last => {
                return Err(Failure::Silent(LATE.to_owned()));
            }
            Err(ShmError::System { source: Errno::AGAIN | Errno::INTR, .. }) => {}
            Err(ShmError::System { source: Errno::CONNRESET, .. }) => return Err(closed()),
            Err(error) => return Err(Failure::Unanswered(error.to_string())),
        }
    }
    Ok(descriptors)
}
