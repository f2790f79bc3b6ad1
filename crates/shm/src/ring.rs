// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rings for one producer and one consumer, mapped twice back to back so that every window is
//! contiguous.
//!
//! Positions count bytes since the beginning and wrap with the word; used space is `tail - head`.
//! Each side keeps its own position privately and only publishes it, so that a peer can confuse
//! only itself (`SHM-3`).

#![expect(unsafe_code, reason = "hands out windows of mapped memory as slices")]

use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::fork::Guard;
use crate::memory::{Mapping, Shared};
use crate::signals::{Cursors, Line};
use crate::{Error, Result, Segment};

const _: () =
    assert!(size_of::<usize>() == 8, "the layout of control pages is that of 64-bit machines");

/// First page of a ring.
#[repr(C)]
struct Control {
    cursors: Cursors,
    /// Rarely written: whether each half is taken, and whether it was dropped.
    halves: Line<[Half; 2]>,
}

#[repr(C)]
struct Half {
    taken: AtomicU32,
    closed: AtomicU32,
}

// SAFETY: atomics only, 512 bytes.
unsafe impl Shared for Control {}

const PRODUCER: usize = 0;
const CONSUMER: usize = 1;

#[derive(Debug)]
pub(crate) struct Ring {
    mapping: Mapping,
    number: usize,
    capacity: usize,
    guard: Guard,
}

impl Ring {
    pub(crate) fn new(mapping: Mapping, number: usize, capacity: usize) -> Self {
        Self { mapping, number, capacity, guard: Guard::new() }
    }

    fn control(&self) -> &Control {
        self.mapping.head()
    }

    fn cursors(&self) -> &Cursors {
        &self.control().cursors
    }

    fn half(&self, half: usize) -> &Half {
        &self.control().halves.0[half]
    }

    fn take(&self, half: usize) -> Result<()> {
        if self.half(half).taken.swap(1, Ordering::AcqRel) == 0 {
            return Ok(());
        }
        Err(Error::Taken {
            half: if half == PRODUCER { "producer" } else { "consumer" },
            ring: self.number,
        })
    }

    fn used(&self, tail: usize, head: usize) -> Result<usize> {
        let used = tail.wrapping_sub(head);
        if used > self.capacity {
            Err(Error::Corrupt { capacity: self.capacity, used })
        } else {
            Ok(used)
        }
    }

    fn close(&self, half: usize) {
        if self.guard.intact() {
            self.half(half).closed.store(1, Ordering::Release);
        }
    }

    fn advanced(&self, offset: usize, bytes: usize) -> usize {
        let next = offset + bytes;
        if next >= self.capacity { next - self.capacity } else { next }
    }
}

/// Both halves of a ring of this process, sharing one mapping.
///
/// # Errors
/// `System`.
pub fn private(capacity: usize) -> Result<(Producer, Consumer)> {
    let ring = Arc::new(Segment::create(1, capacity)?.ring(0)?);
    ring.take(PRODUCER)?;
    ring.take(CONSUMER)?;
    Ok((Producer::over(Arc::clone(&ring)), Consumer::over(ring)))
}

/// Makes an empty ring of [`private`] begin at its start again, so that little of it is used while
/// little is in it. Windows handed out before are over. Does nothing when bytes are left, or when
/// these are not halves of one ring.
pub fn rewind(producer: &mut Producer, consumer: &mut Consumer) {
    if Arc::ptr_eq(&producer.ring, &consumer.ring) && producer.tail == consumer.head {
        (producer.offset, producer.granted) = (0, 0);
        (consumer.offset, consumer.granted) = (0, 0);
    }
}

/// The sending half. Dropping it closes the ring: the consumer sees the end after the last byte.
#[derive(Debug)]
pub struct Producer {
    ring: Arc<Ring>,
    tail: usize,
    offset: usize,
    granted: usize,
}

impl Producer {
    pub(crate) fn take(ring: Ring) -> Result<Self> {
        ring.take(PRODUCER)?;
        Ok(Self::over(Arc::new(ring)))
    }

    fn over(ring: Arc<Ring>) -> Self {
        Self { ring, tail: 0, offset: 0, granted: 0 }
    }

    /// Returns the bytes the ring holds.
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }

    /// Returns all free space. If the ring is not empty, the consumer is asked to signal its next
    /// release.
    ///
    /// # Errors
    /// `Corrupt`, `Forked`.
    pub fn window(&mut self) -> Result<&mut [u8]> {
        self.ring.guard.check()?;
        let cursors = self.ring.cursors();
        let mut used = self.ring.used(self.tail, cursors.released())?;
        if used > 0 {
            used = self.ring.used(self.tail, cursors.want())?;
        }
        self.granted = self.ring.capacity - used;
        // SAFETY: `offset < capacity` and `granted <= capacity`, so the range lies in the doubled
        // data of the mapping, which lives as long as `self`. The consumer reads only up to the
        // published tail, and there is one producer (SHM-2), so no other code touches these bytes
        // while `self` is borrowed; no two of them are the same memory, because the mirror repeats
        // only after `capacity`.
        Ok(unsafe { slice::from_raw_parts_mut(self.ring.mapping.data(self.offset), self.granted) })
    }

    /// Publishes the first `bytes` of the last window.
    ///
    /// # Errors
    /// `Overrun`, `Forked`.
    pub fn commit(&mut self, bytes: usize) -> Result<()> {
        self.ring.guard.check()?;
        self.granted = self
            .granted
            .checked_sub(bytes)
            .ok_or(Error::Overrun { granted: self.granted, asked: bytes })?;
        self.tail = self.tail.wrapping_add(bytes);
        self.offset = self.ring.advanced(self.offset, bytes);
        self.ring.cursors().commit(self.tail);
        Ok(())
    }

    /// Committed bytes that are not released yet.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn used(&self) -> Result<usize> {
        self.ring.used(self.tail, self.ring.cursors().released())
    }

    /// Returns whether the consumer was dropped.
    pub fn closed(&self) -> bool {
        self.ring.half(CONSUMER).closed.load(Ordering::Acquire) != 0
    }
}

impl Producer {
    /// Tells the consumer that nothing follows; a drop does the same.
    pub fn close(&self) {
        self.ring.close(PRODUCER);
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The receiving half. Dropping it tells the producer that there is no reader any more.
#[derive(Debug)]
pub struct Consumer {
    ring: Arc<Ring>,
    head: usize,
    offset: usize,
    granted: usize,
}

impl Consumer {
    pub(crate) fn take(ring: Ring) -> Result<Self> {
        ring.take(CONSUMER)?;
        Ok(Self::over(Arc::new(ring)))
    }

    fn over(ring: Arc<Ring>) -> Self {
        Self { ring, head: 0, offset: 0, granted: 0 }
    }

    /// Returns the bytes the ring holds.
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }

    /// Returns all bytes that are committed and not released.
    ///
    /// # Errors
    /// `Corrupt`, `Forked`.
    pub fn window(&mut self) -> Result<&[u8]> {
        self.ring.guard.check()?;
        self.granted = self.ring.used(self.ring.cursors().committed(), self.head)?;
        // SAFETY: `offset < capacity` and `granted <= capacity`, so the range lies in the doubled
        // data of the mapping, which lives as long as `self`. The producer writes only beyond the
        // published tail until we release, and there is one consumer (SHM-2).
        Ok(unsafe { slice::from_raw_parts(self.ring.mapping.data(self.offset), self.granted) })
    }

    /// Like [`window`](Self::window), to change the bytes where they lie: they are the consumer's
    /// until it releases them.
    ///
    /// # Errors
    /// Like `window`.
    pub fn window_mut(&mut self) -> Result<&mut [u8]> {
        let bytes = self.window()?.len();
        // SAFETY: the range of `window`, borrowed from `self` alone. The producer of this process
        // never touches what it has published, no two of the bytes are the same memory (the mirror
        // repeats only after `capacity`), and there is one consumer (SHM-2).
        Ok(unsafe { slice::from_raw_parts_mut(self.ring.mapping.data(self.offset), bytes) })
    }

    /// Gives back the first `bytes` of the last window; true when the producer asked to hear of it.
    ///
    /// # Errors
    /// `Overrun`, `Forked`.
    pub fn release(&mut self, bytes: usize) -> Result<bool> {
        self.ring.guard.check()?;
        self.granted = self
            .granted
            .checked_sub(bytes)
            .ok_or(Error::Overrun { granted: self.granted, asked: bytes })?;
        self.head = self.head.wrapping_add(bytes);
        self.offset = self.ring.advanced(self.offset, bytes);
        Ok(self.ring.cursors().release(self.head))
    }

    /// Returns the bytes that are committed and not released.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn used(&self) -> Result<usize> {
        self.ring.used(self.ring.cursors().committed(), self.head)
    }

    /// Returns whether the producer was dropped; what it had committed is still there.
    pub fn closed(&self) -> bool {
        self.ring.half(PRODUCER).closed.load(Ordering::Acquire) != 0
    }
}

impl Consumer {
    /// Tells the producer that there is no reader any more; a drop does the same.
    pub fn close(&self) {
        self.ring.close(CONSUMER);
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shm_2_a_ring_has_one_producer_and_one_consumer() {
        let segment = Segment::create(2, 1).unwrap();
        let _producer = segment.producer(1).unwrap();
        assert_eq!(segment.producer(1).unwrap_err(), Error::Taken { half: "producer", ring: 1 });
        let _consumer = segment.consumer(1).unwrap();
        assert!(segment.consumer(1).is_err());
        assert!(segment.producer(0).is_ok());
    }

    #[test]
    fn shm_3_positions_that_cannot_be_are_refused() {
        let (mut producer, mut consumer) = private(4096).unwrap();
        producer.ring.cursors().commit(4097);
        assert_eq!(consumer.window().unwrap_err(), Error::Corrupt { capacity: 4096, used: 4097 });
        producer.ring.cursors().release(1);
        assert!(producer.window().is_err());
    }

    #[test]
    fn windows_are_contiguous_at_every_offset() {
        let (mut producer, mut consumer) = private(4096).unwrap();
        for offset in 0..4096_usize {
            let window = producer.window().unwrap();
            assert_eq!(window.len(), 4096);
            for (at, byte) in window.iter_mut().enumerate() {
                *byte = ((at + offset) % 251).to_le_bytes()[0];
            }
            producer.commit(4096).unwrap();
            assert!(producer.window().unwrap().is_empty());
            let seen = consumer.window().unwrap();
            assert!(
                seen.iter().enumerate().all(|(at, byte)| usize::from(*byte) == (at + offset) % 251)
            );
            assert!(consumer.release(4096).unwrap(), "the producer had seen a full ring");
            // Shift by one byte.
            producer.window().unwrap();
            producer.commit(1).unwrap();
            consumer.window().unwrap();
            consumer.release(1).unwrap();
        }
    }

    #[test]
    fn bytes_of_a_consumer_may_be_changed_where_they_lie() {
        let (mut producer, mut consumer) = private(4096).unwrap();
        for round in 0..3_u8 {
            producer.window().unwrap()[..3000].fill(round);
            producer.commit(3000).unwrap();
            let window = consumer.window_mut().unwrap();
            assert!(window.len() == 3000 && window.iter().all(|byte| *byte == round));
            window.fill(9);
            assert!(consumer.window().unwrap().iter().all(|byte| *byte == 9));
            consumer.release(3000).unwrap();
        }
    }

    #[test]
    fn more_than_the_window_is_refused() {
        let (mut producer, mut consumer) = private(4096).unwrap();
        producer.window().unwrap();
        producer.commit(4000).unwrap();
        assert_eq!(producer.commit(97).unwrap_err(), Error::Overrun { granted: 96, asked: 97 });
        consumer.window().unwrap();
        assert_eq!(
            consumer.release(4001).unwrap_err(),
            Error::Overrun { granted: 4000, asked: 4001 }
        );
    }

    #[test]
    fn only_an_empty_ring_begins_again_and_loses_nothing_by_it() {
        let (mut producer, mut consumer) = private(4096).unwrap();
        let start = producer.window().unwrap().as_ptr();
        producer.commit(100).unwrap();
        rewind(&mut producer, &mut consumer);
        assert_ne!(producer.window().unwrap().as_ptr(), start, "bytes are left");
        assert_eq!(consumer.window().unwrap().len(), 100);
        consumer.release(100).unwrap();
        rewind(&mut producer, &mut consumer);
        assert!(producer.commit(1).is_err(), "the window before is over");
        assert_eq!(producer.window().unwrap().as_ptr(), start);
        producer.window().unwrap()[0] = 9;
        producer.commit(1).unwrap();
        assert_eq!(consumer.window().unwrap(), [9]);
        let (mut other, _) = private(4096).unwrap();
        consumer.release(1).unwrap();
        rewind(&mut other, &mut consumer);
        assert!(consumer.offset == 1, "halves of two rings");
    }

    #[test]
    fn the_end_is_seen_after_the_last_byte() {
        let (mut producer, mut consumer) = private(1).unwrap();
        producer.window().unwrap()[0] = 7;
        producer.commit(1).unwrap();
        drop(producer);
        assert!(consumer.closed());
        assert_eq!(consumer.window().unwrap(), [7]);
    }
}
