// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Positions in the sequence of messages of an allreduce by chunks.

use super::message::Message;

/// Position of one direction of a link in the sequence of messages. Slot `2 t` is early for chunk
/// `t` (an input, or partials), slot `2 t + 1` is late for chunk `t - ahead` (a result). `ahead` is
/// the number of chunks by which results come after early messages on the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Position {
    pub(super) slot: usize,
    pub(super) message: Message,
}

/// The slot after the last message.
const OVER: usize = usize::MAX;

/// Chunk and bytes of a message that is not empty, if there is one.
pub(super) type Found = Option<(usize, usize)>;

impl Position {
    /// Returns the first position from `slot` on whose message is not empty. `early` and `late`
    /// find the first message of their kind that is not empty, from a chunk on.
    pub(super) fn seek(
        slot: usize,
        ahead: usize,
        early: impl FnOnce(usize) -> Found,
        late: impl FnOnce(usize) -> Found,
    ) -> Self {
        let early = early(slot.div_ceil(2)).map(|(chunk, bytes)| (2 * chunk, bytes));
        let late = late((slot / 2).saturating_sub(ahead));
        let late = late.map(|(chunk, bytes)| (2 * (chunk + ahead) + 1, bytes));
        let over = Self { slot: OVER, message: Message::default() };
        let next = early.into_iter().chain(late).min();
        next.map_or(over, |(slot, bytes)| Self { slot, message: Message::new(bytes) })
    }

    /// Returns the slot from which on the next message is.
    pub(super) fn after(self) -> usize {
        self.slot.saturating_add(1)
    }

    /// Returns whether there is no further message.
    pub(super) fn is_over(self) -> bool {
        self.slot == OVER
    }

    /// Returns the chunk of which an input or partials are at this position.
    pub(super) fn early(self) -> Option<usize> {
        (!self.is_over() && self.slot.is_multiple_of(2)).then_some(self.slot / 2)
    }

    /// Returns the chunk of which a result is at this position.
    pub(super) fn late(self, ahead: usize) -> Option<usize> {
        let is_late = !self.is_over() && self.slot % 2 == 1;
        is_late.then(|| self.slot / 2 - ahead)
    }

    /// Returns whether the input or the partials of a chunk were before this position.
    pub(super) fn is_past_early(self, chunk: usize) -> bool {
        self.slot > 2 * chunk
    }

    /// Returns whether the result of a chunk was before this position.
    pub(super) fn is_past_late(self, ahead: usize, chunk: usize) -> bool {
        self.slot > 2 * (chunk + ahead) + 1
    }
}

/// State of one operation on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) writing: Position,
    pub(super) reading: Position,
}

impl Stream {
    /// Returns whether there is no further message in either direction.
    pub(super) fn is_over(&self) -> bool {
        self.writing.is_over() && self.reading.is_over()
    }
}
