// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Counts of rows, blocks and lanes as indexes.

/// Converts a count to an index.
pub(crate) fn to_index(count: u64) -> usize {
    // On a 32-bit machine a larger count saturates: `get` then finds nothing, and no index wraps.
    usize::try_from(count).unwrap_or(usize::MAX)
}
