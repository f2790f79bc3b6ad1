// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events that wait for another logger.
//!
//! The lock is the standard library's: it is only a word in memory, so that a forked child may try
//! it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use std::{process, thread};

use super::event::Event;
use crate::ring::Weight as _;

/// Bytes of events that may wait: some thousands.
const BUDGET: usize = 1 << 20;

/// Longest attempt to take the lock: threads of this process hold it for some microseconds.
const PATIENCE: Duration = Duration::from_millis(200);

/// The events of this process.
pub(super) static KEPT: Queue = Queue::new(BUDGET);

/// Events that waited.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Oldest first.
    pub events: Vec<Event>,
    /// Events that were dropped since the last time, all older than these.
    pub dropped: u64,
}

struct State {
    events: VecDeque<Event>,
    weight: usize,
    dropped: u64,
    /// The process that takes them.
    taker: Option<u32>,
}

/// A queue bounded by weight.
pub(super) struct Queue {
    budget: usize,
    state: Mutex<State>,
    arrived: Condvar,
}

impl Queue {
    pub(super) const fn new(budget: usize) -> Self {
        let state = State { events: VecDeque::new(), weight: 0, dropped: 0, taker: None };
        Self { budget, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Keeps events from now on. Whether this process did not do so before; `None` when the lock
    /// was lost by a fork.
    pub(super) fn open(&self) -> Option<bool> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = loop {
            match self.state.try_lock() {
                Ok(state) => break state,
                Err(TryLockError::Poisoned(error)) => break error.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => return None,
                Err(TryLockError::WouldBlock) => thread::yield_now(),
            }
        };
        let me = Some(process::id());
        if state.taker == me {
            return Some(false);
        }
        // What a forked child finds here belongs to its parent.
        *state = State { events: VecDeque::new(), weight: 0, dropped: 0, taker: me };
        Some(true)
    }

    /// Adds an event, dropping the oldest ones until it fits. False if no thread takes events.
    pub(super) fn push(&self, event: Event) -> bool {
        let mut state = self.lock();
        if state.taker.is_none() {
            return false;
        }
        let weight = event.weight();
        while state.weight + weight > self.budget {
            let Some(old) = state.events.pop_front() else { break };
            state.weight -= old.weight();
            state.dropped += 1;
        }
        state.weight += weight;
        state.events.push_back(event);
        drop(state);
        self.arrived.notify_one();
        true
    }

    pub(super) fn take(&self, limit: Duration) -> Option<Taken> {
        let waits = |state: &mut State| state.events.is_empty() && state.taker.is_some();
        let (mut state, _) = self
            .arrived
            .wait_timeout_while(self.lock(), limit, waits)
            .unwrap_or_else(PoisonError::into_inner);
        if state.events.is_empty() && state.taker.is_none() {
            return None;
        }
        state.weight = 0;
        let events = std::mem::take(&mut state.events).into();
        Some(Taken { events, dropped: std::mem::take(&mut state.dropped) })
    }

    pub(super) fn close(&self) {
        self.lock().taker = None;
        self.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use farandole_config::LogLevel;

    use super::*;

    fn event(text: &str) -> Event {
        Event {
            time: SystemTime::UNIX_EPOCH,
            level: LogLevel::Info,
            logger: String::new(),
            text: text.to_owned(),
            has_rank: false,
            thread: None,
            file: None,
            line: None,
        }
    }

    fn texts(taken: Option<Taken>) -> (Vec<String>, u64) {
        let taken = taken.unwrap();
        (taken.events.into_iter().map(|event| event.text).collect(), taken.dropped)
    }

    #[test]
    fn the_oldest_events_make_room_and_are_counted() {
        let queue = Queue::new(2 * event("a").weight());
        assert!(!queue.push(event("nobody takes it")));
        assert_eq!((queue.open(), queue.open()), (Some(true), Some(false)));
        for text in ["a", "b", "c"] {
            assert!(queue.push(event(text)));
        }
        assert_eq!(texts(queue.take(Duration::ZERO)), (vec!["b".to_owned(), "c".to_owned()], 1));
        assert_eq!(texts(queue.take(Duration::ZERO)), (vec![], 0));
    }

    #[test]
    fn a_lock_that_is_never_released_is_given_up() {
        let queue = Queue::new(BUDGET);
        let held = queue.lock();
        thread::scope(|scope| assert_eq!(scope.spawn(|| queue.open()).join().unwrap(), None));
        drop(held);
        assert_eq!(queue.open(), Some(true));
    }

    #[test]
    fn a_close_wakes_the_taker_after_the_last_events() {
        let queue = Queue::new(BUDGET);
        queue.open();
        queue.push(event("last"));
        let started = Instant::now();
        thread::scope(|scope| {
            let taker = scope.spawn(|| {
                let limit = Duration::from_secs(60);
                (texts(queue.take(limit)), queue.take(limit))
            });
            queue.close();
            assert_eq!(taker.join().unwrap(), ((vec!["last".to_owned()], 0), None));
        });
        assert!(started.elapsed() < Duration::from_secs(30));
        assert_eq!(queue.open(), Some(true), "it may begin again");
    }
}
