// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sleeping until anything happens: a peer's commit or release, bytes on a socket, a lost peer, a
//! call of this process.
//!
//! The dance, which loses no wake-up: `prepare`, poll every link once more, then `park` (or
//! `cancel` if the poll found something). Links over TCP are watched edge-triggered: a poll reads
//! until nothing is left, as `window` does.
//!
//! Several threads may park at once; a wake wakes all of them. A thread that drives while another
//! sleeps calls `cancel` so that peers need not ring for it, and `Unparker::wake` when it hands the
//! driving over.

mod sleepers;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_shm::{Bell, Guard};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use self::sleepers::{Place, Sleepers};
use crate::{Error, Result};

/// `epoll_wait` rounds a timeout up to this. `poll` takes nanoseconds; it waits first where less is
/// left. (`epoll_pwait2` needs Linux 5.11.)
const EPOLL_UNIT: Duration = Duration::from_millis(1);

/// The reason why [`Parker::park`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Something may have happened: poll. May be said without a cause.
    Woken,
    /// The deadline passed.
    TimedOut,
}

struct Shared {
    bell: Arc<Bell>,
    epoll: OwnedFd,
    sleepers: Sleepers,
    guard: Guard,
}

/// A place in which the threads of a process sleep; clones share it.
#[derive(Clone)]
pub struct Parker {
    shared: Arc<Shared>,
}

/// Wakes the sleepers of a [`Parker`] from any thread.
#[derive(Clone)]
pub struct Unparker {
    shared: Arc<Shared>,
}

impl Parker {
    /// A parker of its own; a mesh brings one.
    ///
    /// # Errors
    /// `System`.
    pub fn new() -> Result<Self> {
        let bell = Bell::create()?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::of("epoll_create"))?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, bell.event(), data, epoll::EventFlags::IN)
            .map_err(Error::of("epoll_ctl"))?;
        let shared = Shared {
            bell: Arc::new(bell),
            epoll,
            sleepers: Sleepers::default(),
            guard: Guard::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.shared.bell
    }

    /// Also wakes for bytes that arrive on, or fit into, a socket.
    pub(crate) fn watch(&self, socket: impl AsFd) -> Result<()> {
        let flags = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        epoll::add(&self.shared.epoll, socket, epoll::EventData::new_u64(1), flags)
            .map_err(Error::of("epoll_ctl"))
    }

    pub(crate) fn unwatch(&self, socket: impl AsFd) {
        // In a forked child this would take the socket from the parent's epoll, which is the same.
        if self.shared.guard.intact() {
            // A socket that is not there needs no removal.
            let _ = epoll::delete(&self.shared.epoll, socket);
        }
    }

    /// Asks peers to ring from now on. Poll every link once more before [`Parker::park`].
    pub fn prepare(&self) {
        if self.shared.guard.intact() {
            self.shared.bell.park();
        }
    }

    /// Peers need not ring: for the thread that drives, also on behalf of sleepers.
    pub fn cancel(&self) {
        if self.shared.guard.intact() {
            self.shared.bell.unpark();
        }
    }

    /// Sleeps until woken or `deadline`. Returns at once if there was a ring or a cancellation
    /// since [`Parker::prepare`]. A signal that is handled in this thread counts as a wake.
    ///
    /// # Errors
    /// `Forked`, `System`.
    pub fn park(&self, deadline: Instant) -> Result<Wake> {
        self.shared.guard.check()?;
        let place = Until { shared: &self.shared, deadline: Some(deadline) };
        self.shared.sleepers.park(&place).map_err(Error::of("epoll_wait"))
    }

    /// Wakes from other threads.
    pub fn unparker(&self) -> Unparker {
        Unparker { shared: Arc::clone(&self.shared) }
    }
}

impl Unparker {
    /// Wakes every thread that sleeps or has prepared to; costs a fence when none has.
    pub fn wake(&self) {
        self.shared.sleepers.wake(&Until { shared: &self.shared, deadline: None });
    }
}

/// The bell and everything that is watched, until a deadline; one that is there only to be woken
/// has none.
struct Until<'a> {
    shared: &'a Shared,
    deadline: Option<Instant>,
}

impl Place for Until<'_> {
    type Outcome = Wake;
    type Error = Errno;

    fn unpark(&self) {
        self.shared.bell.unpark();
    }

    fn parked(&self) -> bool {
        self.shared.bell.parked()
    }

    fn ring(&self) {
        // An eventfd of this process is refused only when it is full: then it is rung. No thread
        // sleeps in a forked child.
        let _ = self.shared.bell.ring();
    }

    fn answer(&self) {
        self.shared.bell.answer();
    }

    fn wait(&self) -> Result<bool, Errno> {
        let deadline = self.deadline.unwrap_or_else(Instant::now);
        let mut left = deadline.saturating_duration_since(Instant::now());
        let mut woken = false;
        if left < EPOLL_UNIT {
            let nanoseconds = Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut watched = [PollFd::new(&self.shared.epoll, PollFlags::IN)];
            match poll(&mut watched, Some(&nanoseconds)) {
                Ok(0) => return Ok(false),
                // Another sleeper may answer before the event is taken below.
                Ok(_) => (left, woken) = (Duration::ZERO, true),
                Err(Errno::INTR) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        let timeout = Timespec::try_from(left)
            .unwrap_or(Timespec { tv_sec: i64::from(u32::MAX), tv_nsec: 0 });
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        match epoll::wait(&self.shared.epoll, &mut events[..], Some(&timeout)) {
            Ok(0) => Ok(woken),
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn outcome(woken: bool) -> Wake {
        if woken { Wake::Woken } else { Wake::TimedOut }
    }
}

impl std::fmt::Debug for Parker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parker").field("sleepers", &self.shared.sleepers).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Unparker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unparker").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn park_ends_at_the_deadline() {
        let parker = Parker::new().unwrap();
        parker.prepare();
        assert_eq!(parker.park(Instant::now() + Duration::from_millis(5)).unwrap(), Wake::TimedOut);
    }

    #[test]
    fn a_sleep_shorter_than_a_millisecond_does_not_take_one() {
        let parker = Parker::new().unwrap();
        let sleep = || {
            parker.prepare();
            let began = Instant::now();
            assert_eq!(parker.park(began + Duration::from_micros(50)).unwrap(), Wake::TimedOut);
            began.elapsed()
        };
        let shortest = (0..100).map(|_| sleep()).min().unwrap();
        assert!(shortest >= Duration::from_micros(50), "{shortest:?}");
        assert!(shortest < Duration::from_micros(800), "{shortest:?}");
    }

    #[test]
    fn a_wake_ends_a_short_sleep() {
        let parker = Parker::new().unwrap();
        parker.prepare();
        parker.unparker().wake();
        let limit = Instant::now() + Duration::from_micros(900);
        assert_eq!(parker.park(limit).unwrap(), Wake::Woken);
        parker.prepare();
        let limit = Instant::now() + Duration::from_micros(50);
        assert_eq!(parker.park(limit).unwrap(), Wake::TimedOut, "the wake was taken");
    }

    #[test]
    fn a_wake_between_prepare_and_park_is_not_lost() {
        let parker = Parker::new().unwrap();
        parker.prepare();
        parker.unparker().wake();
        assert_eq!(parker.park(soon()).unwrap(), Wake::Woken);
    }

    #[test]
    fn a_cancel_on_behalf_of_a_thread_that_is_not_yet_asleep_keeps_it_awake() {
        let parker = Parker::new().unwrap();
        parker.prepare();
        parker.cancel();
        assert_eq!(parker.park(soon()).unwrap(), Wake::Woken);
    }

    #[test]
    fn a_wake_reaches_every_sleeper_though_peers_need_not_ring() {
        let parker = Parker::new().unwrap();
        let sleepers: Vec<_> = (0..4)
            .map(|_| {
                let parker = parker.clone();
                thread::spawn(move || {
                    parker.prepare();
                    parker.park(soon()).unwrap()
                })
            })
            .collect();
        while parker.shared.sleepers.count() < 4 && sleepers.iter().all(|one| !one.is_finished()) {
            thread::yield_now();
        }
        parker.cancel();
        parker.unparker().wake();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().unwrap(), Wake::Woken);
        }
    }

    #[test]
    fn tr_3_no_wake_is_lost_between_two_threads() {
        const ROUNDS: u64 = 200_000;
        let (here, there) = (Parker::new().unwrap(), Parker::new().unwrap());
        let turn = Arc::new(AtomicU64::new(0));
        let end = Instant::now() + Duration::from_secs(3);
        let play = |own: Parker, other: Unparker, turn: Arc<AtomicU64>, parity: u64| {
            move || {
                loop {
                    let now = turn.load(Ordering::Acquire);
                    if now >= ROUNDS {
                        return;
                    }
                    if now % 2 == parity {
                        let next = if Instant::now() > end { ROUNDS } else { now + 1 };
                        turn.store(next, Ordering::Release);
                        other.wake();
                        continue;
                    }
                    own.prepare();
                    if turn.load(Ordering::Acquire) == now {
                        assert_eq!(
                            own.park(soon()).unwrap(),
                            Wake::Woken,
                            "lost a wake-up in round {now}"
                        );
                    } else {
                        own.cancel();
                    }
                }
            }
        };
        let first = thread::spawn(play(here.clone(), there.unparker(), Arc::clone(&turn), 0));
        let second = thread::spawn(play(there, here.unparker(), turn, 1));
        first.join().unwrap();
        second.join().unwrap();
    }
}
