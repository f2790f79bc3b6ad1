// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks whether bytes sent on a connection still arrive, by the acknowledgements of the kernel at
//! the other end.
//!
//! The kernel's own limit (`TCP_USER_TIMEOUT`) is not suitable. It counts from the first
//! retransmission, which a long round trip delays by up to half a second. It also ends a connection
//! whose other end acknowledges everything but does not read.

#![expect(unsafe_code, reason = "what the kernel knows of a connection has no safe call")]

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;

/// The kernel's view of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpInfoSnapshot {
    /// Whether sent bytes are unacknowledged.
    has_unconfirmed: bool,
    /// Window probes in a row without an answer.
    unanswered_probes: u8,
    /// Time since the last acknowledgement.
    since_last_ack: Duration,
    /// Whether the other end has acknowledged all bytes and the end of the stream.
    pub(crate) end_confirmed: bool,
}

/// TCP states in which the other side has acknowledged the end of the stream: `FIN_WAIT2`,
/// `TIME_WAIT`, `CLOSE`.
const CONFIRMED_END_STATES: std::ops::RangeInclusive<u8> = 5..=7;

impl TcpInfoSnapshot {
    /// Reads `TCP_INFO` of a connected socket.
    ///
    /// # Errors
    /// The kernel's error for a socket that is not TCP.
    pub(crate) fn query_tcp_info(socket: impl AsFd) -> Result<Self, Errno> {
        // Zeroed, because an older kernel writes a shorter struct.
        let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
        let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).unwrap_or(0);
        // SAFETY: the kernel writes at most `length` bytes, which is the size of `info`, and the
        // descriptor is borrowed during the call.
        let status = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if status != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
        }
        // SAFETY: the struct has only integers, for which all bit patterns are valid; bytes that
        // the kernel did not write were zeroed above.
        let info = unsafe { info.assume_init() };
        Ok(Self {
            // A keep-alive or window probe is no data, so `tcpi_unacked` does not count it.
            has_unconfirmed: info.tcpi_unacked > 0 || info.tcpi_probes > 0,
            unanswered_probes: info.tcpi_probes,
            since_last_ack: Duration::from_millis(info.tcpi_last_ack_recv.into()),
            end_confirmed: CONFIRMED_END_STATES.contains(&info.tcpi_state),
        })
    }
}

/// Lets the kernel probe the other end while nothing is sent: otherwise an end that only waits
/// would never notice that packets are lost. Also limits the pause between retransmissions, on
/// kernels that support it, so a network that recovers within the peer timeout is noticed in time.
///
/// # Errors
/// The kernel's error for a socket that is not TCP.
pub(crate) fn enable_keepalive(socket: impl AsFd, peer_timeout: Duration) -> Result<(), Errno> {
    limit_retransmission_pause(&socket, MAX_RETRANSMISSION_PAUSE);
    // The kernel counts in seconds.
    let pause = Duration::from_secs((peer_timeout / 5).as_secs().clamp(1, 60));
    sockopt::set_tcp_keepidle(&socket, pause)?;
    sockopt::set_tcp_keepintvl(&socket, pause)?;
    // The largest count that the kernel allows, because this process decides when the peer is lost.
    sockopt::set_tcp_keepcnt(&socket, 127)?;
    sockopt::set_socket_keepalive(&socket, true)
}

/// Longest pause between two retransmissions: the smallest limit that the kernel allows. Without a
/// limit each pause is twice as long as the one before, so a packet that was lost just before a
/// network recovers after 3 s is sent again only after 6 s.
const MAX_RETRANSMISSION_PAUSE: Duration = Duration::from_secs(1);
/// `TCP_RTO_MAX_MS` of `linux/tcp.h`, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Limits the pauses between retransmissions. Older kernels have a fixed limit of two minutes and
/// refuse the option; the error is ignored.
fn limit_retransmission_pause(socket: impl AsFd, pause: Duration) {
    let milliseconds = libc::c_int::try_from(pause.as_millis()).unwrap_or(libc::c_int::MAX);
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(0);
    // SAFETY: the kernel reads `length` bytes, the size of the number, and the descriptor is
    // borrowed during the call.
    let _ignored = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const milliseconds).cast(),
            length,
        )
    };
}

/// Longest time between two answers of a kernel with a full window. A kernel answers at most one
/// window probe every half second (`tcp_invalid_ratelimit`). The first probe follows the last
/// acknowledgement after at least 0.2 s, and each later pause is twice as long. So one probe may
/// stay unanswered.
const PROBE_ANSWER_INTERVAL: Duration = Duration::from_millis(1600);

/// Time for which a connection has acknowledged none of its pending bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathSilence(Duration);

impl PathSilence {
    /// Returns whether bytes were unacknowledged at the last check.
    pub(crate) fn is_ongoing(self) -> bool {
        !self.0.is_zero()
    }

    /// Updates and returns the silence. `lived` is the time since the last check that this process
    /// ran. The result is never shorter than the true silence, and longer by at most twice `lived`.
    pub(crate) fn update_silence(&mut self, lived: Duration, sight: TcpInfoSnapshot) -> Duration {
        self.0 = match sight {
            TcpInfoSnapshot { has_unconfirmed: false, .. } => Duration::ZERO,
            // An acknowledgement came since the last check, so earlier silence is over.
            TcpInfoSnapshot { since_last_ack: since_ack, .. } if since_ack < lived => since_ack,
            TcpInfoSnapshot { unanswered_probes: 1, since_last_ack: since_ack, .. }
                if since_ack < PROBE_ANSWER_INTERVAL =>
            {
                Duration::ZERO
            }
            // Two unanswered probes mean a dead path. It has been dead since the last answer,
            // because there was nothing to acknowledge before the first probe.
            TcpInfoSnapshot { unanswered_probes: 2.., since_last_ack: since_ack, .. } => {
                since_ack.max(self.0 + lived)
            }
            _ => self.0 + lived,
        };
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    const TICK: Duration = Duration::from_millis(10);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    /// Drops every packet to a socket.
    fn deafen(socket: &TcpStream) {
        let mut nothing = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut nothing };
        // SAFETY: the kernel copies the program during the call, and the program lives until then.
        let status = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                libc::socklen_t::try_from(size_of::<libc::sock_fprog>()).unwrap(),
            )
        };
        assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    }

    /// Checks until the silence has lasted for `limit`; returns the elapsed time.
    fn until(limit: Duration, socket: &TcpStream) -> Duration {
        let (started, mut last, mut silence) =
            (Instant::now(), Instant::now(), PathSilence::default());
        loop {
            std::thread::sleep(TICK);
            let lived = std::mem::replace(&mut last, Instant::now()).elapsed();
            if silence.update_silence(lived, TcpInfoSnapshot::query_tcp_info(socket).unwrap())
                >= limit
            {
                return started.elapsed();
            }
            assert!(
                started.elapsed() < 20 * limit,
                "heard {:?}",
                TcpInfoSnapshot::query_tcp_info(socket)
            );
        }
    }

    #[test]
    fn packets_that_vanish_are_noticed_within_the_time_given() {
        let limit = Duration::from_millis(300);
        let (mut one, other) = pair();
        one.write_all(b"heard").unwrap();
        deafen(&other);
        one.write_all(b"unheard").unwrap();
        let elapsed = until(limit, &one);
        assert!(elapsed > limit / 2 && elapsed <= limit + 5 * TICK, "{elapsed:?}");
    }

    #[test]
    fn an_idle_caller_that_polls_rarely_notices_lost_packets() {
        let limit = Duration::from_millis(2200);
        let (one, other) = pair();
        enable_keepalive(&one, Duration::from_secs(5)).unwrap();
        deafen(&other);
        let elapsed = until(limit, &one);
        assert!(elapsed > limit / 2, "{elapsed:?}");
    }

    #[test]
    fn a_connection_with_nothing_to_say_is_not_silent() {
        let (one, other) = pair();
        deafen(&other);
        let mut silence = PathSilence::default();
        assert_eq!(
            silence.update_silence(TICK, TcpInfoSnapshot::query_tcp_info(&one).unwrap()),
            Duration::ZERO
        );
    }

    /// The second probe stays unanswered for 0.9 s, because it follows the first too soon.
    #[test]
    fn a_connection_without_room_is_not_silent_between_its_answers() {
        let (mut one, other) = pair();
        one.set_nonblocking(true).unwrap();
        while one.write(&[0; 65536]).is_ok() {}
        let (mut last, mut silence, started) =
            (Instant::now(), PathSilence::default(), Instant::now());
        let mut unanswered = 0;
        while started.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(TICK);
            let lived = std::mem::replace(&mut last, Instant::now()).elapsed();
            let sight = TcpInfoSnapshot::query_tcp_info(&one).unwrap();
            unanswered = unanswered.max(sight.unanswered_probes);
            let silent = silence.update_silence(lived, sight);
            assert!(silent < Duration::from_millis(300), "{silent:?}: {sight:?}");
        }
        assert!(unanswered > 0, "this kernel answers everything");
        drop(other);
    }

    #[test]
    fn an_end_counts_when_the_other_side_has_confirmed_it() {
        let (one, other) = pair();
        let done = || TcpInfoSnapshot::query_tcp_info(&one).unwrap().end_confirmed;
        assert!(!done());
        deafen(&other);
        one.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!done());
        let (one, _other) = pair();
        one.shutdown(std::net::Shutdown::Write).unwrap();
        let limit = Instant::now() + Duration::from_secs(10);
        while !TcpInfoSnapshot::query_tcp_info(&one).unwrap().end_confirmed {
            assert!(Instant::now() < limit);
        }
    }

    #[test]
    fn silence_is_what_follows_the_last_confirmation() {
        let sight = |awaits, unanswered, since_ack| TcpInfoSnapshot {
            has_unconfirmed: awaits,
            unanswered_probes: unanswered,
            since_last_ack: TICK * since_ack,
            end_confirmed: false,
        };
        let mut silence = PathSilence::default();
        assert_eq!(silence.update_silence(TICK, sight(true, 0, 50)), TICK);
        assert_eq!(silence.update_silence(TICK, sight(true, 0, 51)), 2 * TICK);
        assert_eq!(silence.update_silence(TICK, sight(true, 0, 0)), Duration::ZERO);
        assert_eq!(
            silence.update_silence(TICK, sight(true, 1, 9)),
            Duration::ZERO,
            "answers are rationed"
        );
        assert_eq!(silence.update_silence(TICK, sight(true, 2, 10)), 10 * TICK);
        assert_eq!(silence.update_silence(TICK, sight(true, 0, 0)), Duration::ZERO);
        assert_eq!(silence.update_silence(TICK, sight(true, 1, 200)), TICK);
        assert_eq!(silence.update_silence(TICK, sight(false, 0, 11)), Duration::ZERO);
    }
}
