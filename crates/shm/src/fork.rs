// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Detects a fork at the cost of one load.
//!
//! A page that the kernel wipes in forked children holds a token; an object that remembers another
//! token was created in another process. Where the kernel cannot wipe (old sandboxes) the process
//! id is asked for each time instead.

#![expect(unsafe_code, reason = "declares that a page of atomics may be shared")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::{Mapping, Shared};
use crate::{Error, Result};

#[repr(C)]
struct Page {
    token: AtomicU64,
}

// SAFETY: one atomic.
unsafe impl Shared for Page {}

static WIPED: OnceLock<Option<Mapping>> = OnceLock::new();

fn pid() -> u64 {
    u64::from(std::process::id())
}

fn token() -> u64 {
    let Some(mapping) = WIPED.get_or_init(|| Mapping::wiped_on_fork().ok()) else { return pid() };
    let page = mapping.head::<Page>();
    let current = page.token.load(Ordering::Relaxed);
    if current != 0 {
        return current;
    }
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::from(since.subsec_nanos()));
    let fresh = (pid() << 32) ^ clock | 1;
    match page.token.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => fresh,
        Err(other) => other,
    }
}

/// Remembers the process it was created in.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    token: u64,
}

impl Guard {
    /// Returns a guard of this process.
    pub fn new() -> Self {
        Self { token: token() }
    }

    /// Returns whether this is still the process of [`Guard::new`].
    pub fn intact(&self) -> bool {
        self.token == token()
    }

    /// Like [`Guard::intact`], for `?`.
    ///
    /// # Errors
    /// `Forked` in a child.
    pub fn check(&self) -> Result<()> {
        if self.intact() { Ok(()) } else { Err(Error::Forked) }
    }
}

impl Default for Guard {
    fn default() -> Self {
        Self::new()
    }
}
