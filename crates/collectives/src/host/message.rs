// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One message on a link: some bytes, padded so that the next message starts aligned.

use farandole_transport::{ALIGNMENT, LinkReceiver, LinkSender};

use crate::Result;

/// Returns the bytes a message takes on a link.
pub(super) const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Progress of a message through a window. It may take several windows: rings wrap and fill up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    bytes: usize,
    done: usize,
}

impl Message {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, done: 0 }
    }

    /// Returns the bytes gone, padding included.
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// Returns the bytes to go, padding included.
    pub(super) fn left(&self) -> usize {
        padded(self.bytes) - self.done
    }

    pub(super) fn is_finished(&self) -> bool {
        self.left() == 0
    }

    /// Returns the number of the next `wire` bytes that are not padding.
    pub(super) fn payload(&self, wire: usize) -> usize {
        wire.min(self.bytes.saturating_sub(self.done))
    }

    /// Notes that `wire` bytes went.
    pub(super) fn advance(&mut self, wire: usize) {
        self.done += wire.min(self.left());
    }

    /// Sends what the window takes; `fill` is given the position in the message and where to write.
    /// True when anything was sent.
    pub(super) fn put(
        &mut self,
        sender: &mut dyn LinkSender,
        fill: impl FnOnce(usize, &mut [u8]),
    ) -> Result<bool> {
        self.put_some(usize::MAX, sender, fill)
    }

    /// Like [`Message::put`], `most` bytes at most.
    pub(super) fn put_some(
        &mut self,
        most: usize,
        sender: &mut dyn LinkSender,
        fill: impl FnOnce(usize, &mut [u8]),
    ) -> Result<bool> {
        if self.is_finished() {
            return Ok(false);
        }
        let window = sender.window()?;
        let wire = window.len().min(self.left()).min(most);
        if wire == 0 {
            return Ok(false);
        }
        let payload = self.payload(wire);
        fill(self.done, &mut window[..payload]);
        window[payload..wire].fill(0);
        sender.commit(wire)?;
        self.advance(wire);
        Ok(true)
    }

    /// Receives what the window holds; `drain` is given the position in the message and the bytes.
    /// True when anything arrived.
    pub(super) fn take(
        &mut self,
        receiver: &mut dyn LinkReceiver,
        drain: impl FnOnce(usize, &[u8]),
    ) -> Result<bool> {
        if self.is_finished() {
            return Ok(false);
        }
        let window = receiver.window()?;
        let wire = window.len().min(self.left());
        if wire == 0 {
            return Ok(false);
        }
        let payload = self.payload(wire);
        drain(self.done, &window[..payload]);
        receiver.release(wire)?;
        self.advance(wire);
        Ok(true)
    }
}
