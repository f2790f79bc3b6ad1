// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Positions in the sequence of messages of an allreduce in chunks.

use super::message::MessageProgress;

/// Position of one direction of a link in the sequence of messages. Slot `2 t` holds the early
/// message of chunk `t` (an input or partials). Slot `2 t + 1` holds the late message of chunk
/// `t - ahead` (a result). `ahead` is the lag of results behind early messages on the link, in
/// chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MessagePosition {
    pub(super) slot: usize,
    pub(super) message: MessageProgress,
}

/// Slot after the last message.
const END_SLOT: usize = usize::MAX;

/// Chunk and bytes of a message that is not empty, if there is one.
pub(super) type NextMessage = Option<(usize, usize)>;

impl MessagePosition {
    /// Returns the first position, from `slot`, with a message that is not empty. `early` and
    /// `late` get a chunk, and find the first message of their kind that is not empty, from this
    /// chunk.
    pub(super) fn first_nonempty(
        slot: usize,
        ahead: usize,
        early: impl FnOnce(usize) -> NextMessage,
        late: impl FnOnce(usize) -> NextMessage,
    ) -> Self {
        let early = early(slot.div_ceil(2)).map(|(chunk, bytes)| (2 * chunk, bytes));
        let late = late((slot / 2).saturating_sub(ahead));
        let late = late.map(|(chunk, bytes)| (2 * (chunk + ahead) + 1, bytes));
        let over = Self { slot: END_SLOT, message: MessageProgress::default() };
        // The lower slot comes first on the link, as both ends compute it.
        let next = early.into_iter().chain(late).min();
        next.map_or(over, |(slot, bytes)| Self { slot, message: MessageProgress::new(bytes) })
    }

    /// Returns the first slot that the next message can have.
    pub(super) fn next_slot(self) -> usize {
        self.slot.saturating_add(1)
    }

    /// Returns whether there is no further message.
    pub(super) fn is_at_end(self) -> bool {
        self.slot == END_SLOT
    }

    /// Returns the chunk whose input or partials are at this position.
    pub(super) fn operand_chunk(self) -> Option<usize> {
        (!self.is_at_end() && self.slot.is_multiple_of(2)).then_some(self.slot / 2)
    }

    /// Returns the chunk whose result is at this position.
    pub(super) fn result_chunk(self, ahead: usize) -> Option<usize> {
        let is_late = !self.is_at_end() && self.slot % 2 == 1;
        is_late.then(|| self.slot / 2 - ahead)
    }

    /// Returns whether the early message of a chunk was before this position.
    pub(super) fn is_past_operand_message(self, chunk: usize) -> bool {
        self.slot > 2 * chunk
    }

    /// Returns whether the late message of a chunk was before this position.
    pub(super) fn is_past_result_message(self, ahead: usize, chunk: usize) -> bool {
        self.slot > 2 * (chunk + ahead) + 1
    }
}

/// Positions of one operation on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkPositions {
    pub(super) writing: MessagePosition,
    pub(super) reading: MessagePosition,
}

impl LinkPositions {
    /// Returns whether there is no further message in either direction.
    pub(super) fn is_at_end(&self) -> bool {
        self.writing.is_at_end() && self.reading.is_at_end()
    }
}
