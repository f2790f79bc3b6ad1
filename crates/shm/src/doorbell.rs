// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The doorbell of a process: a page that shows whether it sleeps and is alive, and an eventfd that
//! wakes it.

#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::control_words::{CacheLinePadded, ParkedFlag};
use crate::fork_detection::ForkGuard;
use crate::memory::{MemoryMapping, SharedAtomics, page_size};
use crate::segment::{create_sealed_memfd, verify_sealed_memfd};
use crate::{Error, Result};

#[repr(C)]
struct DoorbellPage {
    /// 1 if the owner sleeps or is about to; the side that resets it rings.
    parked: CacheLinePadded<ParkedFlag>,
    /// Counter that grows while the owner runs.
    heartbeat: CacheLinePadded<AtomicU64>,
    /// 1 if the owner left in order.
    closed: CacheLinePadded<AtomicU32>,
}

// SAFETY: atomics only, 384 bytes.
unsafe impl SharedAtomics for DoorbellPage {}

/// A doorbell of this process, or of a peer that sent its descriptors.
#[derive(Debug)]
pub struct ProcessDoorbell {
    memory: OwnedFd,
    event: OwnedFd,
    mapping: MemoryMapping,
    guard: ForkGuard,
}

impl ProcessDoorbell {
    /// Creates the doorbell of this process.
    ///
    /// # Errors
    /// `System`.
    pub fn create() -> Result<Self> {
        let memory = create_sealed_memfd("farandole-bell", page_size() as u64)?;
        // Non-blocking: neither a read without a ring nor a write to a full counter may stop the
        // driver.
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::failed_call_mapper("eventfd"))?;
        Self::from_descriptors(memory, event)
    }

    /// Adopts the descriptors that a peer got from [`ProcessDoorbell::shared_descriptors`].
    ///
    /// # Errors
    /// `NotASegment`, `System`.
    pub fn from_descriptors(memory: OwnedFd, event: OwnedFd) -> Result<Self> {
        // Checked before the mapping, because an access beyond the end of the file would raise
        // SIGBUS.
        verify_sealed_memfd(memory.as_fd(), page_size() as u64)?;
        let mapping = MemoryMapping::map_shared(memory.as_fd(), page_size())?;
        Ok(Self { memory, event, mapping, guard: ForkGuard::new() })
    }

    /// Returns the descriptors that a peer needs to ring: the page and the eventfd.
    pub fn shared_descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.memory.as_fd(), self.event.as_fd()]
    }

    /// Returns the eventfd to wait on.
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn doorbell_page(&self) -> &DoorbellPage {
        self.mapping.shared_header()
    }

    /// Owner: asks to be rung. Poll every ring once more before sleeping (`SHM-4`).
    pub fn mark_parked(&self) {
        self.doorbell_page().parked.0.mark_parked();
    }

    /// Owner: no longer asks to be rung.
    pub fn clear_parked(&self) {
        self.doorbell_page().parked.0.clear_parked();
    }

    /// Returns whether the owner asks to be rung.
    pub fn is_parked(&self) -> bool {
        self.doorbell_page().parked.0.is_set()
    }

    /// Rings if the owner asked for it. Call it after publishing data that the owner should see. If
    /// several callers publish at once, only one of them rings.
    ///
    /// # Errors
    /// `System` when the eventfd refuses.
    pub fn ring_if_parked(&self) -> Result<()> {
        if self.doorbell_page().parked.0.take_parked_flag() { self.ring_doorbell() } else { Ok(()) }
    }

    /// Rings the doorbell.
    ///
    /// # Errors
    /// `System` when the eventfd refuses, `Forked`.
    pub fn ring_doorbell(&self) -> Result<()> {
        self.guard.check_not_forked()?;
        match write(&self.event, &1_u64.to_ne_bytes()) {
            // A full eventfd has 2^64 pending rings, so the doorbell rings already.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(source) => Err(Error::System { call: "write", source }),
        }
    }

    /// Owner: clears all rings so far; returns true if there was one.
    pub fn clear_rings(&self) -> bool {
        // A forked child shares the counter and would take its parent's rings. One read resets it
        // to 0.
        self.guard.is_original_process() && read(&self.event, &mut [0_u8; 8]).is_ok()
    }

    /// Owner: shows that the process runs.
    pub fn increment_heartbeat(&self) {
        // Relaxed: peers only compare the number with an earlier one, and it publishes no other
        // data.
        self.doorbell_page().heartbeat.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of heartbeats so far.
    pub fn heartbeat_count(&self) -> u64 {
        self.doorbell_page().heartbeat.0.load(Ordering::Relaxed)
    }

    /// Owner: records that the process leaves in order.
    pub fn mark_closed(&self) {
        if self.guard.is_original_process() {
            // Pairs with the load in `is_closed`.
            self.doorbell_page().closed.0.store(1, Ordering::Release);
        }
    }

    /// Returns whether the owner left in order.
    pub fn is_closed(&self) -> bool {
        self.doorbell_page().closed.0.load(Ordering::Acquire) != 0
    }
}
