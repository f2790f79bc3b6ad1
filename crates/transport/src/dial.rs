// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The dialer's side of a handshake: connects, proves the key, and verifies the peer's proof.
//! Blocks, with a deadline.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use farandole_shm::{Error as ShmError, descriptor_passing};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    shutdown, socket_with, sockopt,
};

use crate::addresses::AddressPair;
use crate::dial_failure::{DialFailure, DialResult, NO_ANSWER_REASON};
use crate::handshake::key_exchange::{ConnectionKeys, HandshakeSide};
use crate::handshake::{
    self, ACCEPTED_BYTES, CHALLENGE_BYTES, ConnectionCarrier, DialerHandshake,
    HANDSHAKE_TIME_LIMIT, HandshakeStatus, HelloMessage, OPENING_BYTES, PROTOCOL_VERSION,
    random_nonce,
};
use crate::happy_eyeballs::{ConnectOutcome, HappyEyeballs};
use crate::mesh_state::MeshState;
use crate::peer_state::PeerState;
use crate::record::CipherSuite;
use crate::secured_connection::SecuredConnection;
use crate::{Error, Result};

/// Pause before all addresses are tried again.
// Peers publish their addresses after they listen, so a retry is rare and need not be faster.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Time for which addresses are tried. A rank listens before it publishes its addresses, so longer
/// waiting does not help.
const DIAL_TIME_LIMIT: Duration = Duration::from_secs(30);

// The shortest timeout that is safe: the kernel takes zero as "wait without a limit".
const FINAL_READ_TIMEOUT: Duration = Duration::from_millis(1);
/// Time for which a peer accepts connections without an answer.
#[derive(Debug, Default)]
pub(crate) struct DialSilence {
    since: Option<Instant>,
    attempts: u32,
}

impl DialSilence {
    /// Records an attempt that began at `started` and got no answer.
    pub(crate) fn record_attempt(&mut self, started: Instant) {
        self.since.get_or_insert(started);
        self.attempts += 1;
    }

    /// Returns whether the silence has lasted too long. One attempt is not enough, because this
    /// process may have been stopped during it.
    pub(crate) fn exceeds_timeout(&self, timeout: Duration) -> bool {
        self.attempts > 1 && self.since.is_some_and(|since| since.elapsed() >= timeout)
    }
}

/// A wait that ends at a deadline, or when the caller gives up.
pub(crate) struct DialWait<'a> {
    pub(crate) deadline: Instant,
    pub(crate) give_up: &'a mut dyn FnMut() -> bool,
}

impl DialWait<'_> {
    /// Asks the caller whether to give up; fails if so.
    pub(crate) fn check_give_up(&mut self) -> Result<()> {
        if (self.give_up)() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Returns the deadline of an attempt to reach a peer. Two attempts fit into the peer timeout.
    pub(crate) fn attempt_deadline(&self, shared: &MeshState) -> Instant {
        self.deadline.min(Instant::now() + self.max_attempt_duration(shared))
    }

    /// Returns the time limit of an attempt.
    fn max_attempt_duration(&self, shared: &MeshState) -> Duration {
        // `DialSilence` counts a peer as lost only after two attempts, so both must fit into the
        // timeout.
        HANDSHAKE_TIME_LIMIT.min(shared.peer_timeout / 2)
    }
}

/// A connection to request from a peer.
pub(crate) struct DialRequest<'a> {
    pub(crate) to: &'a PeerState,
    pub(crate) carrier: ConnectionCarrier,
    pub(crate) channel: u32,
    /// Number of the connection in its link, and number of connections of the link.
    pub(crate) stream: (u16, u16),
    pub(crate) capacity: u64,
}

/// Connects to a Unix socket in the abstract namespace.
pub(crate) fn connect_unix_socket(name: &str, deadline: Instant) -> DialResult<OwnedFd> {
    let failed =
        |error: Errno| DialFailure::from_failed_call("socket", Some(error), error.to_string());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // The queue of the listener is full; its service thread will empty it soon.
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(1))
            }
            Err(Errno::AGAIN) => {
                return Err(DialFailure::Silent("its queue of connections stays full".to_owned()));
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    // The handshake waits with `SO_RCVTIMEO`, which works on blocking sockets only.
    rustix::io::ioctl_fionbio(&socket, false).map_err(failed)?;
    Ok(socket)
}

/// Tries the addresses, the last successful one first, until one answers as the peer or the
/// deadline passes. If every address refuses twice, or another process answers there twice, the
/// peer is gone, because it listened before it published its addresses. A peer that accepts
/// connections but sends nothing for the peer timeout is also gone.
pub(crate) fn dial_any_address(
    shared: &MeshState,
    request: &DialRequest<'_>,
    addresses: &[SocketAddr],
    wait: &mut DialWait<'_>,
) -> Result<SecuredConnection> {
    let started = Instant::now();
    let deadline = wait.deadline.min(started + DIAL_TIME_LIMIT.max(2 * shared.peer_timeout));
    let mut before = false;
    let mut silence = DialSilence::default();
    let reached = *request.to.last_address.lock();
    let mut addresses = addresses.to_vec();
    // Further connections of a link follow the first one, and do not repeat its failed addresses.
    addresses.sort_by_key(|address| Some(*address) != reached);
    let timeout = wait.max_attempt_duration(shared);
    loop {
        let mut last = DialFailure::Refused("it offered no address".to_owned());
        let mut final_words = true;
        let mut peer_answered = false;
        wait.check_give_up()?;
        for ConnectOutcome { address, began, socket } in
            HappyEyeballs::new(&addresses, deadline, timeout)
        {
            wait.check_give_up()?;
            // The limit starts when the connection exists, so a slow connect does not shorten the
            // handshake.
            let attempt = deadline.min(Instant::now() + timeout);
            match socket.and_then(|socket| secure_dialed_socket(shared, request, socket, attempt)) {
                Ok(secured) => {
                    *request.to.last_address.lock() = Some(address);
                    return Ok(secured);
                }
                Err(DialFailure::LocalError(error)) => return Err(error),
                Err(failure) => {
                    final_words &=
                        matches!(failure, DialFailure::Refused(_)) || failure.is_peer_answer();
                    peer_answered |=
                        matches!(failure, DialFailure::Closed(_)) || failure.is_peer_answer();
                    if matches!(failure, DialFailure::Silent(_) | DialFailure::Broken(_)) {
                        silence.record_attempt(began);
                    }
                    // An answer is more informative than silence or a refused connection.
                    if failure.is_peer_answer() || !last.is_peer_answer() {
                        last = failure;
                    }
                }
            }
        }
        // A peer that answers is not stopped, even if the answer is a refusal.
        if peer_answered {
            silence = DialSilence::default();
        } else if silence.exceeds_timeout(shared.peer_timeout) {
            return Err(request
                .to
                .loss_error_or(&format!("it accepts connections but does not answer: {last}")));
        }
        let settled = final_words && before;
        before = final_words;
        if settled || Instant::now() + RETRY_PAUSE >= deadline {
            return Err(match last {
                DialFailure::Unauthenticated(reason) | DialFailure::Declined(reason) => {
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
        thread::sleep(RETRY_PAUSE);
    }
}

/// Tries one pair of addresses, once.
///
/// # Errors
/// `Interrupted`; `System` when this process has no descriptors left.
pub(crate) fn dial_address_pair(
    shared: &MeshState,
    request: &DialRequest<'_>,
    pair: AddressPair,
    wait: &mut DialWait<'_>,
) -> Result<DialResult<SecuredConnection>> {
    wait.check_give_up()?;
    let deadline = wait.attempt_deadline(shared);
    let timeout = deadline.saturating_duration_since(Instant::now());
    let mut race = HappyEyeballs::new(&[pair.to], deadline, timeout).with_source_address(pair.from);
    let socket = race.next().map_or_else(
        || Err(DialFailure::Unanswered(format!("{}: {NO_ANSWER_REASON}", pair.to))),
        |outcome| outcome.socket,
    );
    match socket.and_then(|socket| {
        secure_dialed_socket(shared, request, socket, wait.attempt_deadline(shared))
    }) {
        Err(DialFailure::LocalError(error)) => Err(error),
        attempt => Ok(attempt),
    }
}

/// Performs the handshake of a TCP connection, which must result in keys.
fn secure_dialed_socket(
    shared: &MeshState,
    request: &DialRequest<'_>,
    socket: OwnedFd,
    deadline: Instant,
) -> DialResult<SecuredConnection> {
    let (socket, keys, _) = perform_handshake(shared, request, socket, &[], deadline)?;
    // Without keys the link would carry plain text. A key of small order gives a known secret to an
    // attacker on the path, so the connection ends here.
    let keyless =
        || DialFailure::Unauthenticated(format!("rank {}: a bad public key", request.to.rank));
    Ok(SecuredConnection { socket, keys: Box::new(keys.ok_or_else(keyless)?) })
}

/// Returns whether a rank for which this rank waits still listens; `None` if no answer comes. Sends
/// no bytes and ends the stream: the service thread of a running rank then closes the connection,
/// while the kernel, which accepts for a stopped process, does not.
pub(crate) fn probe_listener(
    local_name: Option<&str>,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<Option<bool>> {
    let name = local_name.map(|name| connect_unix_socket(name, deadline));
    let mut silent = false;
    let race =
        HappyEyeballs::new(addresses, deadline, deadline.saturating_duration_since(Instant::now()));
    for attempt in name.into_iter().chain(race.map(|outcome| outcome.socket)) {
        match attempt.and_then(|socket| await_hang_up(&socket, deadline)) {
            Ok(()) => return Ok(Some(true)),
            Err(DialFailure::LocalError(error)) => return Err(error),
            Err(failure) => silent |= !matches!(failure, DialFailure::Refused(_)),
        }
    }
    // One silent address is enough for doubt: the peer may be stopped, and a stopped peer may
    // return.
    Ok(if silent { None } else { Some(false) })
}

fn await_hang_up(socket: &OwnedFd, deadline: Instant) -> DialResult<()> {
    let failed = |error: Errno| DialFailure::Unanswered(error.to_string());
    shutdown(socket, Shutdown::Write).map_err(failed)?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(time_left(deadline)?))
        .map_err(failed)?;
    recv(socket, &mut [0_u8; 1][..], RecvFlags::empty()).map(drop).map_err(failed)
}

/// Performs the handshake on a connected, blocking socket; returns the keys and the descriptors
/// that the peer sent.
pub(crate) fn perform_handshake(
    shared: &MeshState,
    request: &DialRequest<'_>,
    socket: OwnedFd,
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> DialResult<(OwnedFd, Option<ConnectionKeys>, Vec<OwnedFd>)> {
    let own = |error: Error| DialFailure::Unanswered(error.to_string());
    let hello = HelloMessage {
        version: PROTOCOL_VERSION,
        carrier: request.carrier,
        suite: CipherSuite::fastest_local(),
        generation: shared.generation,
        channel: request.channel,
        from: shared.rank,
        to: request.to.rank,
        size: shared.size,
        stream: request.stream.0,
        streams: request.stream.1,
        capacity: request.capacity,
        nonce: random_nonce().map_err(own)?,
    };
    // The hello carries a code of the job's key, so the acceptor spends no key exchange on
    // strangers.
    let offer = DialerHandshake::new(&shared.key, &hello).map_err(own)?;
    send_handshake_message(&socket, offer.hello_message(), &[])?;
    let stranger =
        |reason: &str| DialFailure::Unauthenticated(format!("rank {}: {reason}", request.to.rank));
    let mut challenge = [0; CHALLENGE_BYTES];
    let (opening, rest) = challenge.split_at_mut(OPENING_BYTES);
    // Descriptors that come before a proof are closed.
    drop(receive_handshake_message(&socket, opening, deadline)?);
    match handshake::read_version(opening) {
        Some(PROTOCOL_VERSION) => {}
        Some(other) => {
            let reason = format!(
                "it speaks version {other} of the protocol between ranks, this process {PROTOCOL_VERSION}"
            );
            return Err(stranger(&reason));
        }
        None => return Err(stranger("what listens there speaks another protocol")),
    }
    // The version is checked before the rest is read: messages of another version may have other
    // sizes, and the read would then wait until the deadline.
    drop(receive_handshake_message(&socket, rest, deadline)?);
    let (transcript, status) = offer.read_challenge(&challenge).map_err(stranger)?;
    check_handshake_status(request, status)?;
    send_handshake_message(&socket, &transcript.dialer_proof(), descriptors)?;
    let mut accepted = [0; ACCEPTED_BYTES];
    let arrived = receive_handshake_message(&socket, &mut accepted, deadline).map_err(
        |failure| match failure {
            // The peer has the proof and may have opened its end. A second attempt would give it
            // two links.
            DialFailure::Silent(reason) | DialFailure::Unanswered(reason) => {
                DialFailure::Broken(reason)
            }
            other => other,
        },
    )?;
    let status = transcript.read_accepted_message(&accepted).ok_or_else(|| {
        DialFailure::Unauthenticated(format!(
            "rank {}: the last code does not hold",
            request.to.rank
        ))
    })?;
    check_handshake_status(request, status)?;
    Ok((socket, transcript.derive_keys(HandshakeSide::Dialer), arrived))
}

fn check_handshake_status(request: &DialRequest<'_>, status: HandshakeStatus) -> DialResult<()> {
    match status {
        HandshakeStatus::Welcome => Ok(()),
        status => {
            Err(DialFailure::Declined(format!("rank {} turned us away: {status}", request.to.rank)))
        }
    }
}

fn time_left(deadline: Instant) -> DialResult<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(DialFailure::Unanswered(NO_ANSWER_REASON.to_owned()))
    } else {
        Ok(left)
    }
}

fn send_handshake_message(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> DialResult<()> {
    descriptor_passing::send_with_descriptors(socket.as_fd(), bytes, descriptors)
        .map_err(|error| DialFailure::Unanswered(error.to_string()))
}

fn receive_handshake_message(
    socket: &OwnedFd,
    bytes: &mut [u8],
    deadline: Instant,
) -> DialResult<Vec<OwnedFd>> {
    let closed =
        || DialFailure::Closed("the connection was closed during the handshake".to_owned());
    let mut descriptors = Vec::new();
    let mut filled = 0;
    while filled < bytes.len() {
        // If this process was stopped, the answer may be waiting, so one read follows the deadline.
        let (left, last) =
            time_left(deadline).map_or((FINAL_READ_TIMEOUT, true), |left| (left, false));
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left))
            .map_err(|error| DialFailure::Unanswered(error.to_string()))?;
        match descriptor_passing::receive_with_descriptors(socket, &mut bytes[filled..]) {
            Ok((0, _)) => return Err(closed()),
            Ok((received, arrived)) => {
                filled += received;
                descriptors.extend(arrived);
            }
            Err(ShmError::System { source: Errno::AGAIN | Errno::INTR, .. }) if last => {
                return Err(DialFailure::Silent(NO_ANSWER_REASON.to_owned()));
            }
            Err(ShmError::System { source: Errno::AGAIN | Errno::INTR, .. }) => {}
            Err(ShmError::System { source: Errno::CONNRESET, .. }) => return Err(closed()),
            Err(error) => return Err(DialFailure::Unanswered(error.to_string())),
        }
    }
    Ok(descriptors)
}
