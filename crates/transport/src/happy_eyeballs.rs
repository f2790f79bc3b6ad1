// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Connects to the addresses of one peer (RFC 8305). If an address has not answered after a quarter
//! of a second, the next one is tried concurrently; after a refusal, it is tried at once.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};

use crate::dial_failure::{DialFailure, DialResult, NO_ANSWER_REASON};

/// Head start of an address over the next one.
// The value that RFC 8305 recommends.
const CONNECT_STAGGER: Duration = Duration::from_millis(250);

/// A connection attempt without an answer yet.
struct PendingConnect {
    address: SocketAddr,
    socket: OwnedFd,
    began: Instant,
    deadline: Instant,
}

/// Result of an attempt to connect to an address.
pub(crate) struct ConnectOutcome {
    pub(crate) address: SocketAddr,
    pub(crate) began: Instant,
    /// The connected socket, in blocking mode.
    pub(crate) socket: DialResult<OwnedFd>,
}

/// Iterator over the outcomes in the order in which they become known, one for each address.
pub(crate) struct HappyEyeballs {
    waiting: VecDeque<SocketAddr>,
    running: Vec<PendingConnect>,
    /// Local address of the connections; the kernel chooses if there is none.
    source: Option<IpAddr>,
    /// Latest start of the attempt for the next address.
    next: Instant,
    deadline: Instant,
    /// Time limit of each address.
    timeout: Duration,
}

impl HappyEyeballs {
    pub(crate) fn new(addresses: &[SocketAddr], deadline: Instant, timeout: Duration) -> Self {
        let waiting = addresses.iter().copied().collect();
        let next = Instant::now();
        Self { waiting, running: Vec::new(), source: None, next, deadline, timeout }
    }

    /// Sets the local address of the connections.
    pub(crate) fn with_source_address(self, source: IpAddr) -> Self {
        Self { source: Some(source), ..self }
    }

    /// Begins to connect to an address; returns the outcome if it is known at once.
    fn begin_connect(&mut self, address: SocketAddr, now: Instant) -> Option<ConnectOutcome> {
        self.next = now + CONNECT_STAGGER;
        let outcome = |socket| Some(ConnectOutcome { address, began: now, socket });
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let begun = socket_with(family, SocketType::STREAM, flags, None).and_then(|socket| {
            if let Some(source) = self.source {
                // The kernel chooses the route by the source address, so the connection uses the
                // named interface.
                bind(&socket, &SocketAddr::new(source, 0))?;
            }
            match connect(&socket, &address) {
                Ok(()) => Ok((socket, true)),
                // An interrupted connect continues in the kernel; a second call would return
                // `EALREADY`.
                Err(Errno::INPROGRESS | Errno::INTR) => Ok((socket, false)),
                Err(errno) => Err(errno),
            }
        });
        match begun {
            Ok((socket, true)) => outcome(finish_connect(socket)),
            Ok((socket, false)) => {
                let deadline = self.deadline.min(now + self.timeout);
                self.running.push(PendingConnect { address, socket, began: now, deadline });
                None
            }
            Err(errno) => outcome(Err(connect_failure(address, errno))),
        }
    }

    /// Waits until an attempt ends, or until the next address is due.
    fn wait_for_outcome(&mut self, now: Instant) -> Option<ConnectOutcome> {
        let over = self.running.iter().position(|runner| runner.deadline <= now);
        if let Some(over) = over {
            let PendingConnect { address, began, .. } = self.running.remove(over);
            let late = DialFailure::Unanswered(format!("{address}: {NO_ANSWER_REASON}"));
            return Some(ConnectOutcome { address, began, socket: Err(late) });
        }
        let next = (!self.waiting.is_empty()).then_some(self.next);
        let until = self.running.iter().map(|runner| runner.deadline).chain(next).min()?;
        // One microsecond more, so that the next check is not too early.
        let limit = until.saturating_duration_since(now) + Duration::from_micros(1);
        let mut polled: Vec<PollFd<'_>> =
            self.running.iter().map(|runner| PollFd::new(&runner.socket, PollFlags::OUT)).collect();
        poll(&mut polled, Timespec::try_from(limit).ok().as_ref()).ok()?;
        let done = polled.iter().position(|polled| !polled.revents().is_empty())?;
        let PendingConnect { address, socket, began, .. } = self.running.remove(done);
        let connected = sockopt::socket_error(&socket).and_then(|result| result);
        let socket = connected
            .map_err(|errno| connect_failure(address, errno))
            .and_then(|()| finish_connect(socket));
        Some(ConnectOutcome { address, began, socket })
    }
}

impl Iterator for HappyEyeballs {
    type Item = ConnectOutcome;

    fn next(&mut self) -> Option<ConnectOutcome> {
        loop {
            let now = Instant::now();
            let due = self.running.is_empty() || now >= self.next;
            let outcome = match due.then(|| self.waiting.pop_front()).flatten() {
                Some(address) => self.begin_connect(address, now),
                None if self.running.is_empty() => return None,
                None => self.wait_for_outcome(now),
            };
            if let Some(outcome) = outcome {
                if outcome.socket.is_err() {
                    // The next address need not wait for its head start after a failure.
                    self.next = now;
                }
                return Some(outcome);
            }
        }
    }
}

fn connect_failure(address: SocketAddr, errno: Errno) -> DialFailure {
    DialFailure::from_failed_call(
        "socket",
        Some(errno),
        format!("{address}: {}", io::Error::from(errno)),
    )
}

fn finish_connect(socket: OwnedFd) -> DialResult<OwnedFd> {
    let stream = TcpStream::from(socket);
    stream
        .set_nonblocking(false)
        // Ranks exchange small messages in turn. Nagle's algorithm would delay each by a round
        // trip.
        .and_then(|()| stream.set_nodelay(true))
        .map_err(|error| DialFailure::Unanswered(error.to_string()))?;
    Ok(stream.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    /// An address that never answers, like an address of a host that is down: its accept queue is
    /// full, so the kernel drops connection requests.
    pub(crate) struct UnresponsiveAddress {
        pub(crate) address: SocketAddr,
        _held: (TcpListener, Vec<TcpStream>),
    }

    pub(crate) fn dead() -> UnresponsiveAddress {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let call = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let calls: Vec<TcpStream> = std::iter::from_fn(call).take(64).collect();
        assert!(calls.len() < 64, "its queue is never full");
        UnresponsiveAddress { address, _held: (listener, calls) }
    }

    fn race(addresses: &[SocketAddr]) -> (Vec<(SocketAddr, bool)>, Duration) {
        let began = Instant::now();
        let timeout = Duration::from_millis(1500);
        let outcomes = HappyEyeballs::new(addresses, began + Duration::from_secs(20), timeout);
        let all = outcomes.map(|outcome| (outcome.address, outcome.socket.is_ok())).collect();
        (all, began.elapsed())
    }

    #[test]
    fn an_address_that_answers_is_not_kept_waiting_by_those_that_do_not() {
        let (dead, listener) =
            ([dead(), dead()], TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let alive = listener.local_addr().unwrap();
        let began = Instant::now();
        let addresses = [dead[0].address, dead[1].address, alive];
        let first = HappyEyeballs::new(
            &addresses,
            began + Duration::from_secs(20),
            Duration::from_secs(10),
        )
        .next()
        .unwrap();
        assert!(first.address == alive && first.socket.is_ok());
        let took = began.elapsed();
        assert!(took >= 2 * CONNECT_STAGGER && took < Duration::from_millis(1500), "{took:?}");
    }

    #[test]
    fn an_address_that_refuses_gives_way_at_once() {
        let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let alive = listener.local_addr().unwrap();
        let (outcomes, took) = race(&[gone, alive]);
        assert_eq!(outcomes, [(gone, false), (alive, true)]);
        assert!(took < CONNECT_STAGGER, "{took:?}");
    }

    #[test]
    fn every_address_has_its_own_time_and_is_reported_once() {
        let dead = [dead(), dead()];
        let (outcomes, took) = race(&[dead[0].address, dead[1].address]);
        assert_eq!(outcomes, [(dead[0].address, false), (dead[1].address, false)]);
        assert!(took < Duration::from_millis(2500), "{took:?}");
        assert_eq!(race(&[]).0, []);
    }
}
