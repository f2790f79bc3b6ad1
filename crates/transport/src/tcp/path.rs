// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whether what is sent on a connection still arrives, as far as the kernel at the other end
//! confirms it.
//!
//! The kernel's own limit (`TCP_USER_TIMEOUT`) does not serve: it counts from the first repetition
//! on, which a slow round trip puts off by as much as half a second, and it also ends a connection
//! whose other end confirms everything and only does not read.

#![expect(unsafe_code, reason = "what the kernel knows of a connection has no safe call")]

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;

/// The kernel's view of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Something was sent that is not confirmed.
    awaits: bool,
    /// Questions whether the other end takes more, sent one after the other without an answer.
    unanswered: u8,
    /// Time since the last confirmation.
    heard: Duration,
    /// The other end has all bytes sent, and knows that nothing follows.
    pub(crate) done: bool,
}

/// States of a connection whose end the other side has confirmed: `FIN_WAIT2`, `TIME_WAIT`,
/// `CLOSE`.
const DONE: std::ops::RangeInclusive<u8> = 5..=7;

impl Sight {
    /// Looks at a connected socket.
    ///
    /// # Errors
    /// The kernel's error for a socket that is not TCP.
    pub(crate) fn of(socket: impl AsFd) -> Result<Self, Errno> {
        let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
        let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).unwrap_or(0);
        // SAFETY: the kernel writes at most `length` bytes, the size of what `info` has room for,
        // and the descriptor is borrowed for as long.
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
        // SAFETY: numbers only, for which all bits are valid; what the kernel left alone was zeroed
        // above.
        let info = unsafe { info.assume_init() };
        Ok(Self {
            awaits: info.tcpi_unacked > 0 || info.tcpi_probes > 0,
            unanswered: info.tcpi_probes,
            heard: Duration::from_millis(info.tcpi_last_ack_recv.into()),
            done: DONE.contains(&info.tcpi_state),
        })
    }
}

/// Lets the kernel probe the other end now and then while nothing is sent: otherwise an end that
/// only waits would never notice that packets vanish. What is sent and vanishes is repeated often
/// enough, where the kernel can be told so, that a network that comes back within the peer timeout
/// is noticed.
///
/// # Errors
/// The kernel's error for a socket that is not TCP.
pub(crate) fn keep_asking(socket: impl AsFd, peer_timeout: Duration) -> Result<(), Errno> {
    repeat_within(&socket, LONGEST_PAUSE);
    // The kernel counts in seconds.
    let pause = Duration::from_secs((peer_timeout / 5).as_secs().clamp(1, 60));
    sockopt::set_tcp_keepidle(&socket, pause)?;
    sockopt::set_tcp_keepintvl(&socket, pause)?;
    // This process judges it, as long as the kernel allows that.
    sockopt::set_tcp_keepcnt(&socket, 127)?;
    sockopt::set_socket_keepalive(&socket, true)
}

/// The longest pause between two repetitions of what was not confirmed: the kernel's least. Without
/// a limit each pause is twice the one before, and what vanished just before a network came back
/// after 3 s is repeated after 6.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// `TCP_RTO_MAX_MS` of `linux/tcp.h`, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// Limits the pauses between repetitions. Older kernels have no limit below two minutes, and take
/// none.
fn repeat_within(socket: impl AsFd, pause: Duration) {
    let milliseconds = libc::c_int::try_from(pause.as_millis()).unwrap_or(libc::c_int::MAX);
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(0);
    // SAFETY: the kernel reads `length` bytes, the size of the number, and the descriptor is
    // borrowed for as long.
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

/// A kernel answers a question whether it takes more at most every half second
/// (`tcp_invalid_ratelimit`). The first one follows what was last confirmed by 0.2 s at least and
/// each other one by twice the pause before it, so that one stays without an answer, and the next
/// comes at most this long after the answer before.
const ANSWERS: Duration = Duration::from_millis(1600);

/// The time for which a connection has confirmed no pending bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Silence(Duration);

impl Silence {
    /// Returns whether something waited for its confirmation at the last look.
    pub(crate) fn lasts(self) -> bool {
        !self.0.is_zero()
    }

    /// `lived` of our own life has passed since the last look. Never less than the true silence,
    /// and more by at most twice `lived`.
    pub(crate) fn after(&mut self, lived: Duration, sight: Sight) -> Duration {
        self.0 = match sight {
            Sight { awaits: false, .. } => Duration::ZERO,
            Sight { heard, .. } if heard < lived => heard,
            Sight { unanswered: 1, heard, .. } if heard < ANSWERS => Duration::ZERO,
            // Two questions without an answer mean a dead path, which has been dead since the last
            // answer: there was nothing to confirm before the first question.
            Sight { unanswered: 2.., heard, .. } => heard.max(self.0 + lived),
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

    /// Makes every packet to a socket vanish.
    fn deafen(socket: &TcpStream) {
        let mut nothing = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut nothing };
        // SAFETY: the kernel copies the program, which lives until then.
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

    /// Looks again and again until the silence has lasted for `limit`; how long that took.
    fn until(limit: Duration, socket: &TcpStream) -> Duration {
        let (started, mut last, mut silence) = (Instant::now(), Instant::now(), Silence::default());
        loop {
            std::thread::sleep(TICK);
            let lived = std::mem::replace(&mut last, Instant::now()).elapsed();
            if silence.after(lived, Sight::of(socket).unwrap()) >= limit {
                return started.elapsed();
            }
            assert!(started.elapsed() < 20 * limit, "heard {:?}", Sight::of(socket));
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
        keep_asking(&one, Duration::from_secs(5)).unwrap();
        deafen(&other);
        let elapsed = until(limit, &one);
        assert!(elapsed > limit / 2, "{elapsed:?}");
    }

    #[test]
    fn a_connection_with_nothing_to_say_is_not_silent() {
        let (one, other) = pair();
        deafen(&other);
        let mut silence = Silence::default();
        assert_eq!(silence.after(TICK, Sight::of(&one).unwrap()), Duration::ZERO);
    }

    /// The second question remains without an answer for 0.9 s: asked too soon after the first.
    #[test]
    fn a_connection_without_room_is_not_silent_between_its_answers() {
        let (mut one, other) = pair();
        one.set_nonblocking(true).unwrap();
        while one.write(&[0; 65536]).is_ok() {}
        let (mut last, mut silence, started) = (Instant::now(), Silence::default(), Instant::now());
        let mut unanswered = 0;
        while started.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(TICK);
            let lived = std::mem::replace(&mut last, Instant::now()).elapsed();
            let sight = Sight::of(&one).unwrap();
            unanswered = unanswered.max(sight.unanswered);
            let silent = silence.after(lived, sight);
            assert!(silent < Duration::from_millis(300), "{silent:?}: {sight:?}");
        }
        assert!(unanswered > 0, "this kernel answers everything");
        drop(other);
    }

    #[test]
    fn an_end_counts_when_the_other_side_has_confirmed_it() {
        let (one, other) = pair();
        let done = || Sight::of(&one).unwrap().done;
        assert!(!done());
        deafen(&other);
        one.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!done());
        let (one, _other) = pair();
        one.shutdown(std::net::Shutdown::Write).unwrap();
        let limit = Instant::now() + Duration::from_secs(10);
        while !Sight::of(&one).unwrap().done {
            assert!(Instant::now() < limit);
        }
    }

    #[test]
    fn silence_is_what_follows_the_last_confirmation() {
        let sight = |awaits, unanswered, heard| Sight {
            awaits,
            unanswered,
            heard: TICK * heard,
            done: false,
        };
        let mut silence = Silence::default();
        assert_eq!(silence.after(TICK, sight(true, 0, 50)), TICK);
        assert_eq!(silence.after(TICK, sight(true, 0, 51)), 2 * TICK);
        assert_eq!(silence.after(TICK, sight(true, 0, 0)), Duration::ZERO);
        assert_eq!(silence.after(TICK, sight(true, 1, 9)), Duration::ZERO, "answers are rationed");
        assert_eq!(silence.after(TICK, sight(true, 2, 10)), 10 * TICK);
        assert_eq!(silence.after(TICK, sight(true, 0, 0)), Duration::ZERO);
        assert_eq!(silence.after(TICK, sight(true, 1, 200)), TICK);
        assert_eq!(silence.after(TICK, sight(false, 0, 11)), Duration::ZERO);
    }
}
