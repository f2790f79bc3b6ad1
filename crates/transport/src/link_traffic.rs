// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Bytes that this process has sent to other ranks, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::LinkKind;

// Of the process, and not of a mesh: a counter must not fall when an elastic job forms a new world.
static SHARED_MEMORY_BYTES: AtomicU64 = AtomicU64::new(0);
static TCP_BYTES: AtomicU64 = AtomicU64::new(0);

fn byte_counter(kind: LinkKind) -> &'static AtomicU64 {
    match kind {
        // Both are rings in memory, and no job has loopback links.
        LinkKind::SharedMemory | LinkKind::Loopback => &SHARED_MEMORY_BYTES,
        LinkKind::Tcp => &TCP_BYTES,
    }
}

/// Counts bytes that were handed to a link.
pub(crate) fn count_sent_bytes(kind: LinkKind, bytes: usize) {
    // The counter orders nothing else.
    byte_counter(kind).fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Returns the bytes that all links of this kind have sent since the process started.
pub fn sent_link_bytes(kind: LinkKind) -> u64 {
    byte_counter(kind).load(Ordering::Relaxed)
}
