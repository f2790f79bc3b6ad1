// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Sizes of the parts and chunks into which operations cut their elements.

use farandole_transport::{MESSAGE_ALIGNMENT, PACKET_PAYLOAD_BYTES};

/// Unit of parts, chunks and messages: their sizes are multiples of it, so no element is ever cut.
pub(super) const UNIT_BYTES: usize = MESSAGE_ALIGNMENT;

/// Longest chunk: it stays in the second-level cache and fills whole packets.
pub(super) const MAX_CHUNK_BYTES: usize = 4 * PACKET_PAYLOAD_BYTES;
/// Shortest chunk: a shorter one costs more in messages than it gains by overlap.
pub(super) const MIN_CHUNK_BYTES: usize = 16 << 10;

/// Returns the bytes of a chunk, at most `longest` (a multiple of the unit), such that all
/// `carriers` get equally many chunks.
pub(super) fn even_chunk_bytes(bytes: usize, longest: usize, carriers: usize) -> usize {
    let carriers = carriers.max(1);
    // Chunks get shorter instead of one carrier getting one chunk more: all would wait for it.
    let rounds = bytes.div_ceil(longest.saturating_mul(carriers)).max(1);
    bytes.div_ceil(rounds * carriers).next_multiple_of(UNIT_BYTES).max(MIN_CHUNK_BYTES).min(longest)
}

/// Returns the start of a part, when `bytes` are cut into `parts`. The lengths of parts differ by
/// at most one unit; the longer parts come first.
pub(super) fn part_start(bytes: usize, parts: usize, part: usize) -> usize {
    let units = bytes.div_ceil(UNIT_BYTES);
    let (each, longer) = (units / parts, units % parts);
    ((each * part + part.min(longer)) * UNIT_BYTES).min(bytes)
}
