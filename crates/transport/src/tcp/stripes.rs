// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Assigns the bytes of a link to its connections: fixed blocks in turn, so that both ends know it
//! without a message.
//!
//! ```text
//! position     0 ......... B ......... 2B ........ 3B ........ 4B
//! connection   |     0     |     1     |     2     |     0     | ...
//! ```
//!
//! Every connection has a cursor, the next position it is to move. What lies before the least
//! cursor has gone.

use std::ops::Range;

use crate::record;

/// Most connections of one link.
pub(crate) const MOST: u16 = 16;

/// Bytes of a block where there are several connections, a whole record: both ends must agree.
const BLOCK: u64 = record::MOST as u64;
/// One connection takes all there is.
const ENDLESS: u64 = 1 << 63;

/// The cursors of one direction.
#[derive(Clone, Debug)]
pub(super) struct Stripes {
    block: u64,
    cursors: Vec<u64>,
    moved: u64,
}

impl Stripes {
    pub(super) fn new(connections: usize) -> Self {
        let block = if connections > 1 { BLOCK } else { ENDLESS };
        Self {
            block,
            cursors: (0_u64..).take(connections.max(1)).map(|number| number * block).collect(),
            moved: 0,
        }
    }

    /// Everything before this has gone.
    pub(super) fn complete(&self) -> u64 {
        self.cursors.iter().copied().min().unwrap_or(0)
    }

    /// Returns whether anything after [`complete`](Self::complete) has gone already.
    pub(super) fn ahead(&self) -> bool {
        self.moved != self.complete()
    }

    /// The connection that carries a position.
    pub(super) fn owner(&self, position: u64) -> usize {
        usize::try_from(position / self.block).unwrap_or(usize::MAX) % self.cursors.len()
    }

    /// Returns the next bytes of a connection, before `end`.
    pub(super) fn extent(&self, connection: usize, end: u64) -> Option<Range<u64>> {
        let (extent, _) = self.room(connection, end);
        (!extent.is_empty()).then_some(extent)
    }

    /// Returns the next bytes that a connection may move before `end`, which may be none, and the
    /// bytes up to the end of its block.
    pub(super) fn room(&self, connection: usize, end: u64) -> (Range<u64>, u64) {
        let start = self.cursors.get(connection).copied().unwrap_or(end);
        let stop = (start / self.block).saturating_add(1).saturating_mul(self.block);
        (start..stop.min(end).max(start), stop - start)
    }

    /// A connection has moved `bytes` of its extent.
    pub(super) fn advance(&mut self, connection: usize, bytes: u64) {
        let others = (self.cursors.len() as u64).saturating_sub(1);
        if let Some(cursor) = self.cursors.get_mut(connection) {
            *cursor += bytes;
            self.moved += bytes;
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
        let mut stripes = Stripes::new(1);
        assert_eq!(stripes.extent(0, 0), None);
        assert_eq!(stripes.extent(0, 5 << 30), Some(0..5 << 30));
        stripes.advance(0, 77);
        assert_eq!((stripes.complete(), stripes.ahead()), (77, false));
    }

    #[test]
    fn blocks_go_to_connections_in_turn_and_complete_in_order() {
        let mut stripes = Stripes::new(3);
        let end = 10 * BLOCK;
        assert_eq!(stripes.extent(1, BLOCK), None);
        assert_eq!(stripes.extent(1, end), Some(BLOCK..2 * BLOCK));
        stripes.advance(1, BLOCK);
        assert_eq!((stripes.complete(), stripes.ahead()), (0, true));
        assert_eq!(stripes.extent(1, end), Some(4 * BLOCK..5 * BLOCK));
        stripes.advance(0, BLOCK - 1);
        assert_eq!(stripes.complete(), BLOCK - 1);
        stripes.advance(0, 1);
        assert_eq!((stripes.complete(), stripes.ahead()), (2 * BLOCK, false));
        assert_eq!(stripes.owner(2 * BLOCK), 2);
    }

    #[test]
    fn every_byte_goes_once_whatever_the_order() {
        for connections in 1..6 {
            let mut stripes = Stripes::new(connections);
            let end = 7 * BLOCK + 12_345;
            let (mut seen, mut turn) = (0, 0_usize);
            while stripes.complete() < end {
                turn = turn.wrapping_mul(31).wrapping_add(7);
                let connection = (turn >> 7) % connections;
                if let Some(extent) = stripes.extent(connection, end) {
                    assert_eq!(stripes.owner(extent.start), connection);
                    let part = (extent.end - extent.start).min(1 + (turn as u64 >> 9) % 100_000);
                    stripes.advance(connection, part);
                    seen += part;
                }
            }
            assert_eq!(seen, end, "{connections} connections");
        }
    }
}
