// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Assigns the bytes of a link to its connections: fixed blocks in turn, so both ends know the
//! assignment without a message.
//!
//! ```text
//! position     0 ......... B ......... 2B ........ 3B ........ 4B
//! connection   |     0     |     1     |     2     |     0     | ...
//! ```
//!
//! Every connection has a cursor, which is the next position that it moves. All bytes before the
//! lowest cursor are complete.

use std::ops::Range;

use crate::record;

/// Largest number of connections of a link.
pub(crate) const MAX_STREAMS_PER_LINK: u16 = 16;

/// Size of a block with several connections: one whole record. Both ends must agree on it.
const STRIPE_BLOCK_BYTES: u64 = record::MAX_RECORD_PAYLOAD as u64;
/// Size of a block with a single connection, which carries all bytes.
// So large that no link reaches its end, and half of the range, so that sums do not overflow.
const SINGLE_STREAM_BLOCK_BYTES: u64 = 1 << 63;

/// The cursors of one direction.
#[derive(Clone, Debug)]
pub(super) struct StripeCursors {
    block: u64,
    cursors: Vec<u64>,
    moved: u64,
}

impl StripeCursors {
    pub(super) fn new(connections: usize) -> Self {
        let block = if connections > 1 { STRIPE_BLOCK_BYTES } else { SINGLE_STREAM_BLOCK_BYTES };
        Self {
            block,
            cursors: (0_u64..).take(connections.max(1)).map(|number| number * block).collect(),
            moved: 0,
        }
    }

    /// Returns the position before which all bytes are complete.
    pub(super) fn completed_position(&self) -> u64 {
        self.cursors.iter().copied().min().unwrap_or(0)
    }

    /// Returns whether bytes after [`completed_position`](Self::completed_position) are complete
    /// already.
    pub(super) fn has_gaps(&self) -> bool {
        self.moved != self.completed_position()
    }

    /// Returns the connection that carries a position.
    pub(super) fn connection_at(&self, position: u64) -> usize {
        usize::try_from(position / self.block).unwrap_or(usize::MAX) % self.cursors.len()
    }

    /// Returns the next bytes of a connection before `end`; `None` if there are none.
    pub(super) fn next_extent(&self, connection: usize, end: u64) -> Option<Range<u64>> {
        let (extent, _) = self.next_extent_and_room(connection, end);
        (!extent.is_empty()).then_some(extent)
    }

    /// Returns the next bytes that a connection may move before `end`, which may be none, and the
    /// number of bytes up to the end of its block.
    pub(super) fn next_extent_and_room(&self, connection: usize, end: u64) -> (Range<u64>, u64) {
        let start = self.cursors.get(connection).copied().unwrap_or(end);
        let stop = (start / self.block).saturating_add(1).saturating_mul(self.block);
        (start..stop.min(end).max(start), stop - start)
    }

    /// Records that a connection has moved `bytes` of its extent.
    pub(super) fn advance_cursor(&mut self, connection: usize, bytes: u64) {
        let others = (self.cursors.len() as u64).saturating_sub(1);
        if let Some(cursor) = self.cursors.get_mut(connection) {
            *cursor += bytes;
            self.moved += bytes;
            // Cursor 0 is a multiple, too: a step without bytes must not skip the block.
            if bytes > 0 && cursor.is_multiple_of(self.block) {
                *cursor += others * self.block;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_takes_everything_in_order() {
        let mut stripes = StripeCursors::new(1);
        assert_eq!(stripes.next_extent(0, 0), None);
        assert_eq!(stripes.next_extent(0, 5 << 30), Some(0..5 << 30));
        stripes.advance_cursor(0, 77);
        assert_eq!((stripes.completed_position(), stripes.has_gaps()), (77, false));
    }

    #[test]
    fn blocks_go_to_connections_in_turn_and_complete_in_order() {
        let mut stripes = StripeCursors::new(3);
        let end = 10 * STRIPE_BLOCK_BYTES;
        assert_eq!(stripes.next_extent(1, STRIPE_BLOCK_BYTES), None);
        assert_eq!(stripes.next_extent(1, end), Some(STRIPE_BLOCK_BYTES..2 * STRIPE_BLOCK_BYTES));
        stripes.advance_cursor(1, STRIPE_BLOCK_BYTES);
        assert_eq!((stripes.completed_position(), stripes.has_gaps()), (0, true));
        assert_eq!(
            stripes.next_extent(1, end),
            Some(4 * STRIPE_BLOCK_BYTES..5 * STRIPE_BLOCK_BYTES)
        );
        stripes.advance_cursor(0, STRIPE_BLOCK_BYTES - 1);
        assert_eq!(stripes.completed_position(), STRIPE_BLOCK_BYTES - 1);
        stripes.advance_cursor(0, 1);
        assert_eq!(
            (stripes.completed_position(), stripes.has_gaps()),
            (2 * STRIPE_BLOCK_BYTES, false)
        );
        assert_eq!(stripes.connection_at(2 * STRIPE_BLOCK_BYTES), 2);
    }

    #[test]
    fn every_byte_goes_once_whatever_the_order() {
        for connections in 1..6 {
            let mut stripes = StripeCursors::new(connections);
            let end = 7 * STRIPE_BLOCK_BYTES + 12_345;
            let (mut seen, mut turn) = (0, 0_usize);
            while stripes.completed_position() < end {
                turn = turn.wrapping_mul(31).wrapping_add(7);
                let connection = (turn >> 7) % connections;
                if let Some(extent) = stripes.next_extent(connection, end) {
                    assert_eq!(stripes.connection_at(extent.start), connection);
                    let part = (extent.end - extent.start).min(1 + (turn as u64 >> 9) % 100_000);
                    stripes.advance_cursor(connection, part);
                    seen += part;
                }
            }
            assert_eq!(seen, end, "{connections} connections");
        }
    }
}
