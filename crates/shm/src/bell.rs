// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The doorbell of a process: a page that shows whether it sleeps and is alive, and an eventfd that
//! wakes it.

#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use crate::fork::Guard;
use crate::memory::{Mapping, Shared, page};
use crate::segment::{sealed, verify};
use crate::signals::{Line, Parked};
use crate::{Error, Result};

#[repr(C)]
struct Page {
    /// 1: the owner sleeps or is about to; the side that resets it rings.
    parked: Line<Parked>,
    /// Grows as long as the owner runs.
    heartbeat: Line<AtomicU64>,
    /// 1: the owner left in order.
    closed: Line<AtomicU32>,
}

// SAFETY: atomics only, 384 bytes.
unsafe impl Shared for Page {}

/// A doorbell: the owner's own, or a peer's that was handed over.
#[derive(Debug)]
pub struct Bell {
    memory: OwnedFd,
    event: OwnedFd,
    mapping: Mapping,
    guard: Guard,
}

impl Bell {
    /// Creates the bell of this process.
    ///
    /// # Errors
    /// `System`.
    pub fn create() -> Result<Self> {
        let memory = sealed("farandole-bell", page() as u64)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::of("eventfd"))?;
        Self::adopt(memory, event)
    }

    /// Adopts what [`Bell::descriptors`] of a peer gave.
    ///
    /// # Errors
    /// `NotASegment`, `System`.
    pub fn adopt(memory: OwnedFd, event: OwnedFd) -> Result<Self> {
        verify(memory.as_fd(), page() as u64)?;
        let mapping = Mapping::shared(memory.as_fd(), page())?;
        Ok(Self { memory, event, mapping, guard: Guard::new() })
    }

    /// Returns the descriptors that a peer needs to ring: the page and the eventfd.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.memory.as_fd(), self.event.as_fd()]
    }

    /// Returns the eventfd, to wait on.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn page(&self) -> &Page {
        self.mapping.head()
    }

    /// Owner: asks to be rung. Poll every ring once more before sleeping (`SHM-4`).
    pub fn park(&self) {
        self.page().parked.0.park();
    }

    /// Owner: no longer asks to be rung.
    pub fn unpark(&self) {
        self.page().parked.0.unpark();
    }

    /// Returns whether the owner asks to be rung.
    pub fn parked(&self) -> bool {
        self.page().parked.0.is_set()
    }

    /// Rings if the owner asked for it; call after publishing what it should see. One of many
    /// callers rings.
    ///
    /// # Errors
    /// `System` when the eventfd refuses.
    pub fn ring_if_parked(&self) -> Result<()> {
        if self.page().parked.0.to_ring() { self.ring() } else { Ok(()) }
    }

    /// Rings.
    ///
    /// # Errors
    /// `System` when the eventfd refuses, `Forked`.
    pub fn ring(&self) -> Result<()> {
        self.guard.check()?;
        match write(&self.event, &1_u64.to_ne_bytes()) {
            // Full means 2^64 unanswered rings, so it is rung.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(source) => Err(Error::System { call: "write", source }),
        }
    }

    /// Owner: takes all rings so far; true when there was one.
    pub fn answer(&self) -> bool {
        self.guard.intact() && read(&self.event, &mut [0_u8; 8]).is_ok()
    }

    /// Owner: shows that it runs.
    pub fn beat(&self) {
        self.page().heartbeat.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Beats so far.
    pub fn heartbeat(&self) -> u64 {
        self.page().heartbeat.0.load(Ordering::Relaxed)
    }

    /// Owner: leaves in order.
    pub fn close(&self) {
        if self.guard.intact() {
            self.page().closed.0.store(1, Ordering::Release);
        }
    }

    /// Returns whether the owner left in order.
    pub fn closed(&self) -> bool {
        self.page().closed.0.load(Ordering::Acquire) != 0
    }
}
