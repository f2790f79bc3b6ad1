// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Puts threads to sleep until an event: a commit or release of a peer, bytes on a socket, a lost
//! peer, or a wake from another thread of this process.
//!
//! This sequence loses no wake-up: `prepare_park`, poll every link once more, then `park` (or
//! `cancel_park` if the poll found something). TCP links are watched edge-triggered, so a poll must
//! read until the socket is empty, as `window` does.
//!
//! Several threads may park at once; a wake wakes all of them. A thread that polls while others
//! sleep calls `cancel_park`, so that peers need not ring for it, and `Unparker::wake_all` when it
//! stops polling.

mod parked_threads;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_shm::{ForkGuard, ProcessDoorbell};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use self::parked_threads::{ParkedThreads, ParkerSystemCalls};
use crate::{Error, Result};

/// Resolution of the timeout of `epoll_wait`. If less time is left, `poll` waits first, because it
/// takes nanoseconds. (`epoll_pwait2` needs Linux 5.11.)
const EPOLL_TIMEOUT_UNIT: Duration = Duration::from_millis(1);

/// The reason why [`Parker::park`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
    /// Something may have happened: poll all links. May be spurious.
    Woken,
    /// The deadline passed.
    TimedOut,
}

struct ParkerState {
    bell: Arc<ProcessDoorbell>,
    epoll: OwnedFd,
    sleepers: ParkedThreads,
    guard: ForkGuard,
}

/// Sleeping place of the threads of a process; clones share it.
#[derive(Clone)]
pub struct Parker {
    shared: Arc<ParkerState>,
}

/// Wakes the threads that sleep in a [`Parker`], from any thread.
#[derive(Clone)]
pub struct Unparker {
    shared: Arc<ParkerState>,
}

impl Parker {
    /// Creates a parker without a mesh; a mesh has one.
    ///
    /// # Errors
    /// `System`.
    pub fn new() -> Result<Self> {
        let bell = ProcessDoorbell::create()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(Error::failed_call_mapper("epoll_create"))?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, bell.event_descriptor(), data, epoll::EventFlags::IN)
            .map_err(Error::failed_call_mapper("epoll_ctl"))?;
        let shared = ParkerState {
            bell: Arc::new(bell),
            epoll,
            sleepers: ParkedThreads::default(),
            guard: ForkGuard::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn own_doorbell(&self) -> &Arc<ProcessDoorbell> {
        &self.shared.bell
    }

    /// Also wakes when bytes arrive on the socket or it has space to send.
    pub(crate) fn watch_socket(&self, socket: impl AsFd) -> Result<()> {
        let flags = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            // Level-triggered OUT would always be ready, so no thread could sleep.
            | epoll::EventFlags::ET;
        epoll::add(&self.shared.epoll, socket, epoll::EventData::new_u64(1), flags)
            .map_err(Error::failed_call_mapper("epoll_ctl"))
    }

    pub(crate) fn unwatch_socket(&self, socket: impl AsFd) {
        // In a forked child this would remove the socket from the parent's epoll, because both
        // share it.
        if self.shared.guard.is_original_process() {
            // An error means that the socket was not watched.
            let _ = epoll::delete(&self.shared.epoll, socket);
        }
    }

    /// Asks peers to ring from now on. Poll every link once more before calling [`Parker::park`].
    pub fn prepare_park(&self) {
        if self.shared.guard.is_original_process() {
            self.shared.bell.mark_parked();
        }
    }

    /// Stops asking peers to ring. For a thread that polls, also while other threads sleep.
    pub fn cancel_park(&self) {
        if self.shared.guard.is_original_process() {
            self.shared.bell.clear_parked();
        }
    }

    /// Sleeps until a wake or `deadline`. Returns at once if there was a ring or a `cancel_park`
    /// since [`Parker::prepare_park`]. A signal that is handled in this thread counts as a wake.
    ///
    /// # Errors
    /// `Forked`, `System`.
    pub fn park(&self, deadline: Instant) -> Result<WakeReason> {
        self.shared.guard.check_not_forked()?;
        let place = EpollWait { shared: &self.shared, deadline: Some(deadline) };
        self.shared.sleepers.park_thread(&place).map_err(Error::failed_call_mapper("epoll_wait"))
    }

    /// Returns a handle that wakes the sleeping threads.
    pub fn unparker(&self) -> Unparker {
        Unparker { shared: Arc::clone(&self.shared) }
    }
}

impl Unparker {
    /// Wakes every thread that sleeps or has prepared to. Costs only a fence if there is none.
    pub fn wake_all(&self) {
        self.shared.sleepers.wake_all(&EpollWait { shared: &self.shared, deadline: None });
    }
}

/// The doorbell and the watched sockets, until a deadline; `None` for a caller that only wakes.
struct EpollWait<'a> {
    shared: &'a ParkerState,
    deadline: Option<Instant>,
}

impl ParkerSystemCalls for EpollWait<'_> {
    type Outcome = WakeReason;
    type Error = Errno;

    fn clear_parked(&self) {
        self.shared.bell.clear_parked();
    }

    fn is_parked(&self) -> bool {
        self.shared.bell.is_parked()
    }

    fn ring_doorbell(&self) {
        // Writing to this process's eventfd fails only when it is full, which also wakes, or in a
        // forked child, in which no thread sleeps.
        let _ = self.shared.bell.ring_doorbell();
    }

    fn clear_rings(&self) {
        self.shared.bell.clear_rings();
    }

    fn wait_for_ring(&self) -> Result<bool, Errno> {
        let deadline = self.deadline.unwrap_or_else(Instant::now);
        let mut left = deadline.saturating_duration_since(Instant::now());
        let mut woken = false;
        // A rounded-up timeout would oversleep by up to a millisecond, which short waits would
        // notice.
        if left < EPOLL_TIMEOUT_UNIT {
            let nanoseconds = Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut watched = [PollFd::new(&self.shared.epoll, PollFlags::IN)];
            match poll(&mut watched, Some(&nanoseconds)) {
                Ok(0) => return Ok(false),
                // Another sleeper may clear the event before `epoll_wait` below sees it.
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
            // A signal handler of Python may have something to do, so the caller gets control.
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn park_outcome(woken: bool) -> WakeReason {
        if woken { WakeReason::Woken } else { WakeReason::TimedOut }
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

    fn soon_deadline() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn park_ends_at_the_deadline() {
        let parker = Parker::new().unwrap();
        parker.prepare_park();
        assert_eq!(
            parker.park(Instant::now() + Duration::from_millis(5)).unwrap(),
            WakeReason::TimedOut
        );
    }

    #[test]
    fn a_sleep_shorter_than_a_millisecond_does_not_take_one() {
        let parker = Parker::new().unwrap();
        let sleep = || {
            parker.prepare_park();
            let began = Instant::now();
            assert_eq!(
                parker.park(began + Duration::from_micros(50)).unwrap(),
                WakeReason::TimedOut
            );
            began.elapsed()
        };
        let shortest = (0..100).map(|_| sleep()).min().unwrap();
        assert!(shortest >= Duration::from_micros(50), "{shortest:?}");
        assert!(shortest < Duration::from_micros(800), "{shortest:?}");
    }

    #[test]
    fn a_wake_ends_a_short_sleep() {
        let parker = Parker::new().unwrap();
        parker.prepare_park();
        parker.unparker().wake_all();
        let limit = Instant::now() + Duration::from_micros(900);
        assert_eq!(parker.park(limit).unwrap(), WakeReason::Woken);
        parker.prepare_park();
        let limit = Instant::now() + Duration::from_micros(50);
        assert_eq!(parker.park(limit).unwrap(), WakeReason::TimedOut, "the wake was taken");
    }

    #[test]
    fn a_wake_between_prepare_and_park_is_not_lost() {
        let parker = Parker::new().unwrap();
        parker.prepare_park();
        parker.unparker().wake_all();
        assert_eq!(parker.park(soon_deadline()).unwrap(), WakeReason::Woken);
    }

    #[test]
    fn a_cancel_on_behalf_of_a_thread_that_is_not_yet_asleep_keeps_it_awake() {
        let parker = Parker::new().unwrap();
        parker.prepare_park();
        parker.cancel_park();
        assert_eq!(parker.park(soon_deadline()).unwrap(), WakeReason::Woken);
    }

    #[test]
    fn a_wake_reaches_every_sleeper_though_peers_need_not_ring() {
        let parker = Parker::new().unwrap();
        let sleepers: Vec<_> = (0..4)
            .map(|_| {
                let parker = parker.clone();
                thread::spawn(move || {
                    parker.prepare_park();
                    parker.park(soon_deadline()).unwrap()
                })
            })
            .collect();
        while parker.shared.sleepers.thread_count() < 4
            && sleepers.iter().all(|one| !one.is_finished())
        {
            thread::yield_now();
        }
        parker.cancel_park();
        parker.unparker().wake_all();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().unwrap(), WakeReason::Woken);
        }
    }

    #[test]
    fn tr_3_no_wake_is_lost_between_two_threads() {
        const MAX_ROUNDS: u64 = 200_000;
        let (here, there) = (Parker::new().unwrap(), Parker::new().unwrap());
        let turn = Arc::new(AtomicU64::new(0));
        let end = Instant::now() + Duration::from_secs(3);
        let play = |own: Parker, other: Unparker, turn: Arc<AtomicU64>, parity: u64| {
            move || {
                loop {
                    let now = turn.load(Ordering::Acquire);
                    if now >= MAX_ROUNDS {
                        return;
                    }
                    if now % 2 == parity {
                        let next = if Instant::now() > end { MAX_ROUNDS } else { now + 1 };
                        turn.store(next, Ordering::Release);
                        other.wake_all();
                        continue;
                    }
                    own.prepare_park();
                    if turn.load(Ordering::Acquire) == now {
                        assert_eq!(
                            own.park(soon_deadline()).unwrap(),
                            WakeReason::Woken,
                            "lost a wake-up in round {now}"
                        );
                    } else {
                        own.cancel_park();
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
