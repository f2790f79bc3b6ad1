// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One message on a link: its bytes, padded so that the next message starts aligned.

use farandole_transport::{LinkReceiver, LinkSender, MESSAGE_ALIGNMENT};

use crate::Result;

/// Returns the number of bytes of a message on a link, padding included.
pub(super) const fn padded_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(MESSAGE_ALIGNMENT)
}

/// Progress of a message. A message may need several windows, because rings wrap around and fill
/// up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MessageProgress {
    bytes: usize,
    done: usize,
}

impl MessageProgress {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, done: 0 }
    }

    /// Returns the number of bytes that have moved, padding included.
    pub(super) fn moved_bytes(&self) -> usize {
        self.done
    }

    /// Returns the number of remaining bytes, padding included.
    pub(super) fn remaining_bytes(&self) -> usize {
        padded_bytes(self.bytes) - self.done
    }

    pub(super) fn is_finished(&self) -> bool {
        self.remaining_bytes() == 0
    }

    /// Returns how many of the next `wire` bytes are not padding.
    pub(super) fn unpadded_bytes_of(&self, wire: usize) -> usize {
        wire.min(self.bytes.saturating_sub(self.done))
    }

    /// Records that `wire` bytes have moved.
    pub(super) fn advance_by(&mut self, wire: usize) {
        self.done += wire.min(self.remaining_bytes());
    }

    /// Sends as many bytes as the window takes; `fill` receives the position in the message and the
    /// destination. Returns true when any byte was sent.
    pub(super) fn send_window(
        &mut self,
        sender: &mut dyn LinkSender,
        fill: impl FnOnce(usize, &mut [u8]),
    ) -> Result<bool> {
        self.send_at_most_bytes(usize::MAX, sender, fill)
    }

    /// Like [`MessageProgress::send_window`], but sends at most `most` bytes.
    pub(super) fn send_at_most_bytes(
        &mut self,
        most: usize,
        sender: &mut dyn LinkSender,
        fill: impl FnOnce(usize, &mut [u8]),
    ) -> Result<bool> {
        if self.is_finished() {
            return Ok(false);
        }
        let carries_no_payload = sender.carries_no_payload();
        let window = sender.window()?;
        let wire = window.len().min(self.remaining_bytes()).min(most);
        if wire == 0 {
            return Ok(false);
        }
        if !carries_no_payload {
            let payload = self.unpadded_bytes_of(wire);
            fill(self.done, &mut window[..payload]);
            // The ring still holds bytes of an earlier message.
            window[payload..wire].fill(0);
        }
        sender.commit(wire)?;
        self.advance_by(wire);
        Ok(true)
    }

    /// Receives the bytes that the window holds; `drain` receives the position in the message and
    /// the bytes. Returns true when any byte arrived.
    pub(super) fn receive_window(
        &mut self,
        receiver: &mut dyn LinkReceiver,
        drain: impl FnOnce(usize, &[u8]),
    ) -> Result<bool> {
        if self.is_finished() {
            return Ok(false);
        }
        let carries_no_payload = receiver.carries_no_payload();
        let window = receiver.window()?;
        let wire = window.len().min(self.remaining_bytes());
        if wire == 0 {
            return Ok(false);
        }
        if !carries_no_payload {
            drain(self.done, &window[..self.unpadded_bytes_of(wire)]);
        }
        receiver.release(wire)?;
        self.advance_by(wire);
        Ok(true)
    }
}
