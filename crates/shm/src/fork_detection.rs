// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Detects a fork at the cost of one load.
//!
//! A page that the kernel wipes in forked children holds a token. An object that was created with
//! another token belongs to another process. If the kernel cannot wipe pages (old sandboxes), the
//! process id is queried each time instead.

#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::{MemoryMapping, SharedAtomics};
use crate::{Error, Result};

#[repr(C)]
struct ForkTokenPage {
    token: AtomicU64,
}

// SAFETY: one atomic.
unsafe impl SharedAtomics for ForkTokenPage {}

static FORK_TOKEN_PAGE: OnceLock<Option<MemoryMapping>> = OnceLock::new();

fn process_id() -> u64 {
    u64::from(std::process::id())
}

fn process_token() -> u64 {
    let Some(mapping) = FORK_TOKEN_PAGE.get_or_init(|| MemoryMapping::map_wiped_on_fork().ok())
    else {
        return process_id();
    };
    let page = mapping.shared_header::<ForkTokenPage>();
    // Relaxed throughout: the token guards no other data, and a fork orders parent and child.
    let current = page.token.load(Ordering::Relaxed);
    if current != 0 {
        return current;
    }
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::from(since.subsec_nanos()));
    // The clock sets this process apart from an earlier one with the same id. The token is never 0,
    // because a wiped page has 0.
    let fresh = (process_id() << 32) ^ clock | 1;
    // Threads that meet a wiped page at the same time must agree on one token.
    match page.token.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => fresh,
        Err(other) => other,
    }
}

/// Remembers the process in which it was created.
#[derive(Clone, Copy, Debug)]
pub struct ForkGuard {
    token: u64,
}

impl ForkGuard {
    /// Creates a guard of this process.
    pub fn new() -> Self {
        Self { token: process_token() }
    }

    /// Returns whether this is still the process of [`ForkGuard::new`].
    pub fn is_original_process(&self) -> bool {
        self.token == process_token()
    }

    /// Like [`ForkGuard::is_original_process`], for `?`.
    ///
    /// # Errors
    /// `Forked` in a child.
    pub fn check_not_forked(&self) -> Result<()> {
        if self.is_original_process() { Ok(()) } else { Err(Error::Forked) }
    }
}

impl Default for ForkGuard {
    fn default() -> Self {
        Self::new()
    }
}
