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

use super::event::LogEvent;
use crate::ring::RingWeight as _;

/// Bytes of events that may wait: some thousands.
const EVENT_QUEUE_BUDGET_BYTES: usize = 1 << 20;

/// Longest attempt to take the lock: threads of this process hold it for some microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// The events of this process.
pub(super) static EVENT_QUEUE: EventQueue = EventQueue::new(EVENT_QUEUE_BUDGET_BYTES);

/// Events that waited.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DrainedEvents {
    /// Oldest first.
    pub events: Vec<LogEvent>,
    /// Events that were dropped since the last time, all older than these.
    pub dropped: u64,
}

struct EventQueueState {
    events: VecDeque<LogEvent>,
    weight: usize,
    dropped: u64,
    /// The process that takes them.
    taker_process: Option<u32>,
}

/// A queue bounded by weight.
pub(super) struct EventQueue {
    budget: usize,
    state: Mutex<EventQueueState>,
    arrived: Condvar,
}

impl EventQueue {
    pub(super) const fn new(budget: usize) -> Self {
        let state =
            EventQueueState { events: VecDeque::new(), weight: 0, dropped: 0, taker_process: None };
        Self { budget, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Keeps events from now on. Whether this process did not do so before; `None` when the lock
    /// was lost by a fork.
    pub(super) fn start_keeping_events(&self) -> Option<bool> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let mut state = loop {
            // Not `lock`: in a forked child, a thread that does not exist there may hold the lock.
            match self.state.try_lock() {
                Ok(state) => break state,
                Err(TryLockError::Poisoned(error)) => break error.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => return None,
                Err(TryLockError::WouldBlock) => thread::yield_now(),
            }
        };
        let me = Some(process::id());
        if state.taker_process == me {
            return Some(false);
        }
        // In a forked child, the events in the queue belong to the parent.
        *state =
            EventQueueState { events: VecDeque::new(), weight: 0, dropped: 0, taker_process: me };
        Some(true)
    }

    /// Adds an event, dropping the oldest ones until it fits. False if no thread takes events.
    pub(super) fn push(&self, event: LogEvent) -> bool {
        let mut state = self.lock_state();
        if state.taker_process.is_none() {
            return false;
        }
        let weight = event.weight_bytes();
        while state.weight + weight > self.budget {
            // An event that is heavier than the budget passes alone.
            let Some(old) = state.events.pop_front() else { break };
            state.weight -= old.weight_bytes();
            state.dropped += 1;
        }
        state.weight += weight;
        state.events.push_back(event);
        // Before the wake-up: the reader would only wait for the lock.
        drop(state);
        self.arrived.notify_one();
        true
    }

    pub(super) fn take_events(&self, limit: Duration) -> Option<DrainedEvents> {
        let waits =
            |state: &mut EventQueueState| state.events.is_empty() && state.taker_process.is_some();
        let (mut state, _) = self
            .arrived
            .wait_timeout_while(self.lock_state(), limit, waits)
            .unwrap_or_else(PoisonError::into_inner);
        // After the end, the last events are still read once.
        if state.events.is_empty() && state.taker_process.is_none() {
            return None;
        }
        state.weight = 0;
        let events = std::mem::take(&mut state.events).into();
        Some(DrainedEvents { events, dropped: std::mem::take(&mut state.dropped) })
    }

    pub(super) fn close(&self) {
        self.lock_state().taker_process = None;
        self.arrived.notify_all();
    }

    fn lock_state(&self) -> MutexGuard<'_, EventQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use farandole_config::LogLevel;

    use super::*;

    fn event(text: &str) -> LogEvent {
        LogEvent {
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

    fn texts(taken: Option<DrainedEvents>) -> (Vec<String>, u64) {
        let taken = taken.unwrap();
        (taken.events.into_iter().map(|event| event.text).collect(), taken.dropped)
    }

    #[test]
    fn the_oldest_events_make_room_and_are_counted() {
        let queue = EventQueue::new(2 * event("a").weight_bytes());
        assert!(!queue.push(event("nobody takes it")));
        assert_eq!(
            (queue.start_keeping_events(), queue.start_keeping_events()),
            (Some(true), Some(false))
        );
        for text in ["a", "b", "c"] {
            assert!(queue.push(event(text)));
        }
        assert_eq!(
            texts(queue.take_events(Duration::ZERO)),
            (vec!["b".to_owned(), "c".to_owned()], 1)
        );
        assert_eq!(texts(queue.take_events(Duration::ZERO)), (vec![], 0));
    }

    #[test]
    fn a_lock_that_is_never_released_is_given_up() {
        let queue = EventQueue::new(EVENT_QUEUE_BUDGET_BYTES);
        let held = queue.lock_state();
        thread::scope(|scope| {
            assert_eq!(scope.spawn(|| queue.start_keeping_events()).join().unwrap(), None)
        });
        drop(held);
        assert_eq!(queue.start_keeping_events(), Some(true));
    }

    #[test]
    fn a_close_wakes_the_taker_after_the_last_events() {
        let queue = EventQueue::new(EVENT_QUEUE_BUDGET_BYTES);
        queue.start_keeping_events();
        queue.push(event("last"));
        let started = Instant::now();
        thread::scope(|scope| {
            let taker = scope.spawn(|| {
                let limit = Duration::from_secs(60);
                (texts(queue.take_events(limit)), queue.take_events(limit))
            });
            queue.close();
            assert_eq!(taker.join().unwrap(), ((vec!["last".to_owned()], 0), None));
        });
        assert!(started.elapsed() < Duration::from_secs(30));
        assert_eq!(queue.start_keeping_events(), Some(true), "it may begin again");
    }
}
