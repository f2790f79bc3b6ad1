// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A queue bounded by weight that drops its oldest records rather than block or grow.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The weight of a record in a ring.
pub trait RingWeight {
    /// Returns the bytes it counts for.
    fn weight_bytes(&self) -> usize;

    /// Returns whether it may be dropped to make room.
    fn is_droppable(&self) -> bool {
        true
    }
}

/// Everything that waited in a ring.
#[derive(Debug, PartialEq, Eq)]
pub struct DrainedRecords<T> {
    /// The records, oldest first.
    pub records: Vec<T>,
    /// Records dropped since the last drain; all were older than the first droppable one here.
    pub dropped: u64,
}

struct BoundedRingState<T> {
    records: VecDeque<T>,
    weight: usize,
    dropped: u64,
    closed: bool,
}

/// A ring of records. Any thread may push; a push never blocks.
pub struct BoundedRing<T> {
    budget: usize,
    inner: Mutex<BoundedRingState<T>>,
    arrived: Condvar,
}

impl<T: RingWeight> BoundedRing<T> {
    /// Returns a ring that holds up to `budget` bytes.
    pub fn new(budget: usize) -> Self {
        let inner =
            BoundedRingState { records: VecDeque::new(), weight: 0, dropped: 0, closed: false };
        Self { budget, inner: Mutex::new(inner), arrived: Condvar::new() }
    }

    /// Adds a record, dropping the oldest droppable ones until it fits. Nothing is added after
    /// [`BoundedRing::close_half`].
    pub fn push(&self, record: T) {
        let mut inner = self.inner.lock();
        if inner.closed {
            return;
        }
        let weight = record.weight_bytes();
        while inner.weight + weight > self.budget {
            // If nothing may be dropped, the ring exceeds its budget rather than lose the new
            // record.
            let Some(at) = inner.records.iter().position(RingWeight::is_droppable) else { break };
            if let Some(old) = inner.records.remove(at) {
                inner.weight -= old.weight_bytes();
                inner.dropped += 1;
            }
        }
        inner.weight += weight;
        inner.records.push_back(record);
        self.arrived.notify_one();
    }

    /// Waits until something waits here, or the ring is closed, or `deadline` passes; then takes
    /// everything.
    pub fn wait_and_drain(&self, deadline: Instant) -> DrainedRecords<T> {
        let mut inner = self.inner.lock();
        while inner.records.is_empty() && !inner.closed {
            if self.arrived.wait_until(&mut inner, deadline).timed_out() {
                break;
            }
        }
        inner.weight = 0;
        DrainedRecords {
            records: std::mem::take(&mut inner.records).into(),
            dropped: std::mem::take(&mut inner.dropped),
        }
    }

    /// Returns the bytes that wait here.
    pub fn queued_bytes(&self) -> usize {
        self.inner.lock().weight
    }

    /// Refuses later records and wakes the draining thread. Earlier records stay to be drained.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.arrived.notify_all();
    }

    /// Returns whether the ring is closed and empty.
    pub fn is_finished(&self) -> bool {
        let inner = self.inner.lock();
        inner.closed && inner.records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Item(u32, usize, bool);

    impl RingWeight for Item {
        fn weight_bytes(&self) -> usize {
            self.1
        }
        fn is_droppable(&self) -> bool {
            self.2
        }
    }

    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn the_oldest_droppable_records_make_room_and_are_counted() {
        // TM-2, TM-3.
        let ring = BoundedRing::new(10);
        ring.push(Item(0, 4, false));
        ring.push(Item(1, 4, true));
        ring.push(Item(2, 4, true));
        ring.push(Item(3, 4, true));
        let drained = ring.wait_and_drain(now());
        assert_eq!(drained.records, [Item(0, 4, false), Item(3, 4, true)]);
        assert_eq!(drained.dropped, 2);
        assert_eq!(ring.wait_and_drain(now()).dropped, 0);
        assert_eq!(ring.queued_bytes(), 0);
    }

    #[test]
    fn a_record_heavier_than_the_budget_still_passes_alone() {
        // TM-1.
        let ring = BoundedRing::new(10);
        ring.push(Item(0, 9, true));
        ring.push(Item(1, 50, true));
        assert_eq!(ring.wait_and_drain(now()).records, [Item(1, 50, true)]);
    }

    #[test]
    fn a_drain_ends_at_its_deadline_and_at_the_close() {
        let ring: BoundedRing<Item> = BoundedRing::new(10);
        assert!(ring.wait_and_drain(now() + Duration::from_millis(5)).records.is_empty());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ring.wait_and_drain(now() + Duration::from_secs(60)));
            ring.close();
            assert!(waiter.join().unwrap().records.is_empty());
        });
        ring.push(Item(0, 1, true));
        assert!(ring.is_finished());
    }
}
