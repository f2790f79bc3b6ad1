// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rings for one producer and one consumer, mapped twice back to back so that every window is
//! contiguous.
//!
//! Positions count bytes since the creation of the ring and wrap around at the end of `usize`; the
//! used space is `tail - head`. Each side keeps its position privately and only publishes it, so
//! that a peer can confuse only itself (`SHM-3`).

#![expect(unsafe_code, reason = "hands out windows of mapped memory as slices")]

use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::control_words::{CacheLinePadded, RingCursors};
use crate::fork_detection::ForkGuard;
use crate::memory::{MemoryMapping, SharedAtomics};
use crate::{Error, Result};

const _: () =
    assert!(size_of::<usize>() == 8, "the layout of control pages is that of 64-bit machines");

/// The first page of a ring.
#[repr(C)]
struct RingControlPage {
    cursors: RingCursors,
    /// Whether each half is taken, and whether it was dropped. Rarely written.
    halves: CacheLinePadded<[RingHalfState; 2]>,
}

#[repr(C)]
struct RingHalfState {
    taken: AtomicU32,
    closed: AtomicU32,
}

// SAFETY: atomics only, 512 bytes.
unsafe impl SharedAtomics for RingControlPage {}

const PRODUCER_HALF: usize = 0;
const CONSUMER_HALF: usize = 1;

#[derive(Debug)]
pub(crate) struct MirroredRing {
    mapping: MemoryMapping,
    number: usize,
    capacity: usize,
    guard: ForkGuard,
}

impl MirroredRing {
    pub(crate) fn new(mapping: MemoryMapping, number: usize, capacity: usize) -> Self {
        Self { mapping, number, capacity, guard: ForkGuard::new() }
    }

    fn control_page(&self) -> &RingControlPage {
        self.mapping.shared_header()
    }

    fn ring_cursors(&self) -> &RingCursors {
        &self.control_page().cursors
    }

    fn half_state(&self, half: usize) -> &RingHalfState {
        &self.control_page().halves.0[half]
    }

    /// Takes both halves for this process.
    pub(crate) fn claim_both_halves(self) -> Result<(RingProducer, RingConsumer)> {
        let ring = Arc::new(self);
        ring.claim_ring_half(PRODUCER_HALF)?;
        ring.claim_ring_half(CONSUMER_HALF)?;
        Ok((
            RingProducer::from_claimed_half(Arc::clone(&ring)),
            RingConsumer::from_claimed_half(ring),
        ))
    }

    fn claim_ring_half(&self, half: usize) -> Result<()> {
        // The mark lies in the segment, so it also refuses a second process (SHM-2).
        if self.half_state(half).taken.swap(1, Ordering::AcqRel) == 0 {
            return Ok(());
        }
        Err(Error::HalfTaken {
            half: if half == PRODUCER_HALF { "producer" } else { "consumer" },
            ring: self.number,
        })
    }

    fn check_used_bytes(&self, tail: usize, head: usize) -> Result<usize> {
        let used = tail.wrapping_sub(head);
        // The peer may write any number into its position. A larger one would lead out of the
        // mapping.
        if used > self.capacity {
            Err(Error::Corrupt { capacity: self.capacity, used })
        } else {
            Ok(used)
        }
    }

    fn close_half(&self, half: usize) {
        // A child inherits the halves. Its drop must not end the stream of its parent.
        if self.guard.is_original_process() {
            self.half_state(half).closed.store(1, Ordering::Release);
        }
    }

    fn advance_offset(&self, offset: usize, bytes: usize) -> usize {
        let next = offset + bytes;
        if next >= self.capacity { next - self.capacity } else { next }
    }
}

/// Rewinds an empty ring of [`create_private_ring`](crate::create_private_ring) to its start, so
/// that a ring with few bytes touches only little memory. Earlier windows become invalid. Does
/// nothing if bytes are left, or if these are not the halves of one ring.
pub fn rewind_ring(producer: &mut RingProducer, consumer: &mut RingConsumer) {
    // The published positions stay, because they only grow. Only the place in the data changes.
    if Arc::ptr_eq(&producer.ring, &consumer.ring) && producer.tail == consumer.head {
        (producer.offset, producer.granted) = (0, 0);
        (consumer.offset, consumer.granted) = (0, 0);
    }
}

/// The sending half. Dropping it closes the ring: the consumer sees the end after the last byte.
#[derive(Debug)]
pub struct RingProducer {
    ring: Arc<MirroredRing>,
    tail: usize,
    offset: usize,
    granted: usize,
}

impl RingProducer {
    pub(crate) fn claim_producer(ring: MirroredRing) -> Result<Self> {
        ring.claim_ring_half(PRODUCER_HALF)?;
        Ok(Self::from_claimed_half(Arc::new(ring)))
    }

    fn from_claimed_half(ring: Arc<MirroredRing>) -> Self {
        Self { ring, tail: 0, offset: 0, granted: 0 }
    }

    /// Returns the capacity of the ring in bytes.
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }

    /// Returns all free space. If the ring is not empty, the consumer is asked to signal its next
    /// release.
    ///
    /// # Errors
    /// `Corrupt`, `Forked`.
    pub fn window(&mut self) -> Result<&mut [u8]> {
        self.ring.guard.check_not_forked()?;
        let cursors = self.ring.ring_cursors();
        let mut used = self.ring.check_used_bytes(self.tail, cursors.released_position())?;
        // An empty ring can release nothing, so a request would wait in vain. This look comes
        // first, because the request costs a store and a full fence.
        if used > 0 {
            // Checked again: the ring may have been emptied before the consumer could see the
            // request.
            used = self.ring.check_used_bytes(self.tail, cursors.request_release_signal())?;
        }
        self.granted = self.ring.capacity - used;
        // SAFETY: `offset < capacity` and `granted <= capacity`, so the range is inside the doubled
        // data of the mapping, which lives as long as `self`. The consumer reads only up to the
        // published tail, and there is one producer (SHM-2), so no other code touches these bytes
        // while `self` is borrowed. The mirror repeats only after `capacity`, so no two bytes of
        // the range are the same memory.
        Ok(unsafe {
            slice::from_raw_parts_mut(self.ring.mapping.data_address(self.offset), self.granted)
        })
    }

    /// Publishes the first `bytes` of the last window.
    ///
    /// # Errors
    /// `Overrun`, `Forked`.
    pub fn commit(&mut self, bytes: usize) -> Result<()> {
        self.ring.guard.check_not_forked()?;
        self.granted = self
            .granted
            .checked_sub(bytes)
            // More would publish bytes that the caller never wrote, or that the peer may still
            // read.
            .ok_or(Error::Overrun { granted: self.granted, asked: bytes })?;
        self.tail = self.tail.wrapping_add(bytes);
        self.offset = self.ring.advance_offset(self.offset, bytes);
        // Last, because the consumer may read the bytes from here on.
        self.ring.ring_cursors().publish_tail(self.tail);
        Ok(())
    }

    /// Returns the number of bytes that are committed and not released.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn used_bytes(&self) -> Result<usize> {
        self.ring.check_used_bytes(self.tail, self.ring.ring_cursors().released_position())
    }

    /// Returns whether the consumer was dropped.
    pub fn is_consumer_closed(&self) -> bool {
        self.ring.half_state(CONSUMER_HALF).closed.load(Ordering::Acquire) != 0
    }
}

impl RingProducer {
    /// Marks the end for the consumer: no bytes follow. A drop does the same.
    pub fn close(&self) {
        self.ring.close_half(PRODUCER_HALF);
    }
}

impl Drop for RingProducer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The receiving half. Dropping it closes the ring: the producer sees that there is no reader any
/// more.
#[derive(Debug)]
pub struct RingConsumer {
    ring: Arc<MirroredRing>,
    head: usize,
    offset: usize,
    granted: usize,
}

impl RingConsumer {
    pub(crate) fn claim_consumer(ring: MirroredRing) -> Result<Self> {
        ring.claim_ring_half(CONSUMER_HALF)?;
        Ok(Self::from_claimed_half(Arc::new(ring)))
    }

    fn from_claimed_half(ring: Arc<MirroredRing>) -> Self {
        Self { ring, head: 0, offset: 0, granted: 0 }
    }

    /// Returns the capacity of the ring in bytes.
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }

    /// Returns all bytes that are committed and not released.
    ///
    /// # Errors
    /// `Corrupt`, `Forked`.
    pub fn window(&mut self) -> Result<&[u8]> {
        self.ring.guard.check_not_forked()?;
        self.granted =
            self.ring.check_used_bytes(self.ring.ring_cursors().committed_position(), self.head)?;
        // SAFETY: `offset < capacity` and `granted <= capacity`, so the range is inside the doubled
        // data of the mapping, which lives as long as `self`. The producer writes only beyond the
        // published tail until this consumer releases bytes, and there is one consumer (SHM-2).
        Ok(unsafe {
            slice::from_raw_parts(self.ring.mapping.data_address(self.offset), self.granted)
        })
    }

    /// Like [`window`](Self::window), but mutable: the bytes belong to the consumer until it
    /// releases them.
    ///
    /// # Errors
    /// Like `window`.
    pub fn window_mut(&mut self) -> Result<&mut [u8]> {
        let bytes = self.window()?.len();
        // SAFETY: the range is the one of `window`, borrowed from `self` alone. The producer of
        // this process never touches published bytes, no two bytes of the range are the same memory
        // (the mirror repeats only after `capacity`), and there is one consumer (SHM-2).
        Ok(unsafe { slice::from_raw_parts_mut(self.ring.mapping.data_address(self.offset), bytes) })
    }

    /// Releases the first `bytes` of the last window; returns true if the producer asked for a
    /// signal.
    ///
    /// # Errors
    /// `Overrun`, `Forked`.
    pub fn release(&mut self, bytes: usize) -> Result<bool> {
        self.ring.guard.check_not_forked()?;
        self.granted = self
            .granted
            .checked_sub(bytes)
            .ok_or(Error::Overrun { granted: self.granted, asked: bytes })?;
        self.head = self.head.wrapping_add(bytes);
        self.offset = self.ring.advance_offset(self.offset, bytes);
        // Last, because the producer may overwrite the bytes from here on.
        Ok(self.ring.ring_cursors().publish_head(self.head))
    }

    /// Returns the number of bytes that are committed and not released.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn used_bytes(&self) -> Result<usize> {
        self.ring.check_used_bytes(self.ring.ring_cursors().committed_position(), self.head)
    }

    /// Returns whether the producer was dropped or closed. Bytes that it committed can still be
    /// read.
    pub fn is_producer_closed(&self) -> bool {
        self.ring.half_state(PRODUCER_HALF).closed.load(Ordering::Acquire) != 0
    }
}

impl RingConsumer {
    /// Marks the end for the producer: there is no reader any more. A drop does the same.
    pub fn close(&self) {
        self.ring.close_half(CONSUMER_HALF);
    }
}

impl Drop for RingConsumer {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RingSegment, create_private_ring};

    #[test]
    fn shm_2_a_ring_has_one_producer_and_one_consumer() {
        let segment = RingSegment::create(2, 1).unwrap();
        let _producer = segment.take_producer(1).unwrap();
        assert_eq!(
            segment.take_producer(1).unwrap_err(),
            Error::HalfTaken { half: "producer", ring: 1 }
        );
        let _consumer = segment.take_consumer(1).unwrap();
        assert!(segment.take_consumer(1).is_err());
        assert!(segment.take_producer(0).is_ok());
    }

    #[test]
    fn shm_3_positions_that_cannot_be_are_refused() {
        let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
        producer.ring.ring_cursors().publish_tail(4097);
        assert_eq!(consumer.window().unwrap_err(), Error::Corrupt { capacity: 4096, used: 4097 });
        producer.ring.ring_cursors().publish_head(1);
        assert!(producer.window().is_err());
    }

    #[test]
    fn windows_are_contiguous_at_every_offset() {
        let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
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
        let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
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
        let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
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
        let (mut producer, mut consumer) = create_private_ring(4096).unwrap();
        let start = producer.window().unwrap().as_ptr();
        producer.commit(100).unwrap();
        rewind_ring(&mut producer, &mut consumer);
        assert_ne!(producer.window().unwrap().as_ptr(), start, "bytes are left");
        assert_eq!(consumer.window().unwrap().len(), 100);
        consumer.release(100).unwrap();
        rewind_ring(&mut producer, &mut consumer);
        assert!(producer.commit(1).is_err(), "the window before is over");
        assert_eq!(producer.window().unwrap().as_ptr(), start);
        producer.window().unwrap()[0] = 9;
        producer.commit(1).unwrap();
        assert_eq!(consumer.window().unwrap(), [9]);
        let (mut other, _) = create_private_ring(4096).unwrap();
        consumer.release(1).unwrap();
        rewind_ring(&mut other, &mut consumer);
        assert!(consumer.offset == 1, "halves of two rings");
    }

    #[test]
    fn the_end_is_seen_after_the_last_byte() {
        let (mut producer, mut consumer) = create_private_ring(1).unwrap();
        producer.window().unwrap()[0] = 7;
        producer.commit(1).unwrap();
        drop(producer);
        assert!(consumer.is_producer_closed());
        assert_eq!(consumer.window().unwrap(), [7]);
    }
}
