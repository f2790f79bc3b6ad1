// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The receiving end of one connection: reads the payload of records to its position in the ring,
//! and decrypts it there.
//!
//! Small records are read through a staging buffer, so that one call reads several. The payload of
//! a large record is read directly to its position in the ring, and the bytes after it to the
//! staging buffer. If the ring has no space for a record, it is read and decrypted in a separate
//! buffer, because a reader may need the first part of a message before the ring has space for all
//! of it. No byte is visible before its record was authenticated.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use crate::record::{
    MAX_RECORD_PAYLOAD, RECORD_HEADER_BYTES, RECORD_TAG_BYTES, RecordHeader, RecordKind, RecordSeal,
};

/// Size of the staging buffer, for bytes whose destination is not known yet.
const STAGE_BYTES: usize = 8 << 10;
const CONNECTION_CLOSED_REASON: &str = "it closed the connection";
const CONNECTION_CUT_REASON: &str =
    "it closed the connection without a closing message: its process ended, or the path was cut";

/// Receives the records of one connection.
pub(super) struct RecordReceiver {
    seal: RecordSeal,
    stage: Box<[u8; STAGE_BYTES]>,
    /// Unused bytes in the staging buffer.
    staged: Range<usize>,
    record: Option<PartialRecord>,
    /// Payload of a record for which the ring had no space.
    aside: Vec<u8>,
    /// Bytes of `aside` that were decrypted and are not in the ring yet.
    opened: Range<usize>,
    /// Whether the last call read less than it had space for.
    drained: bool,
}

/// A record whose header has arrived.
#[derive(Clone, Copy, Debug)]
struct PartialRecord {
    header: RecordHeader,
    kind: RecordKind,
    length: usize,
    /// Bytes of the payload that are at their destination.
    arrived: usize,
    aside: bool,
}

/// Result of [`RecordReceiver::receive_record_step`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceiveStep {
    /// This many bytes were decrypted and are at the beginning of the space.
    Placed(usize),
    /// No new bytes are visible, but more may be available at once.
    Again,
    /// The socket has no more bytes for now.
    Drained,
    /// The ring has no space.
    Full,
    /// The stream has ended, for this reason.
    Ended(String),
    /// The bytes of a record were changed on the way.
    Tampered(String),
}

impl RecordReceiver {
    pub(super) fn new(seal: RecordSeal) -> Self {
        Self {
            seal,
            stage: Box::new([0; STAGE_BYTES]),
            staged: 0..0,
            record: None,
            aside: Vec::new(),
            opened: 0..0,
            drained: false,
        }
    }

    /// Returns whether a part of a record is in the ring, behind the placed bytes.
    pub(super) fn has_partial_in_ring(&self) -> bool {
        self.record.is_some_and(|record| !record.aside)
    }

    /// Begins a poll: the socket may have bytes again.
    pub(super) fn begin_poll(&mut self) {
        self.drained = false;
    }

    /// Receives one step. `space` is the space in the ring for the next bytes of this connection.
    /// It begins at their position, and ends at most `block` bytes later, where the next byte
    /// belongs to another connection. It may have grown since the last step, and is otherwise the
    /// same. `seen` says whether this poll has placed any bytes: if so, a socket whose last read
    /// was short is not read again.
    pub(super) fn receive_record_step(
        &mut self,
        socket: &OwnedFd,
        space: &mut [u8],
        block: usize,
        seen: bool,
    ) -> ReceiveStep {
        // Nothing is read without space, so the window of TCP holds the sender back.
        if space.is_empty() {
            return ReceiveStep::Full;
        }
        if !self.opened.is_empty() {
            let bytes = self.opened.len().min(space.len());
            let start = self.opened.start;
            space[..bytes].copy_from_slice(&self.aside[start..start + bytes]);
            self.opened.start += bytes;
            return ReceiveStep::Placed(bytes);
        }
        let mut record = match self.record {
            Some(record) => record,
            None => match self.take_staged_record_start(space, block) {
                Ok(Some(record)) => record,
                Ok(None) => return self.read_from_socket(socket, None, space, seen),
                Err(tampered) => return tampered,
            },
        };
        if record.arrived == record.length && self.staged.len() >= RECORD_TAG_BYTES {
            self.record = None;
            return self.decrypt_record_payload(record, space);
        }
        self.record = None;
        let step = self.read_from_socket(socket, Some(&mut record), space, seen);
        self.record = Some(record);
        step
    }

    /// Takes a header and the bytes behind it from the staging buffer; `None` if no whole header is
    /// there.
    fn take_staged_record_start(
        &mut self,
        space: &mut [u8],
        block: usize,
    ) -> Result<Option<PartialRecord>, ReceiveStep> {
        let staged = &self.stage[self.staged.clone()];
        let Some((header, rest)) = staged.split_first_chunk::<RECORD_HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = RecordHeader(*header);
        let promise = header
            .announced_kind_and_length()
            // The header is not authenticated yet. Its length must not lead behind the block of
            // this connection.
            .filter(|(kind, length)| *kind != RecordKind::Control && *length <= block);
        let Some((kind, length)) = promise else { return Err(self.tampered_step()) };
        let aside = length > space.len();
        let arrived = length.min(rest.len());
        if aside {
            self.aside.resize(
                self.aside.len().max(MAX_RECORD_PAYLOAD.min(length.next_power_of_two())),
                0,
            );
            self.aside[..arrived].copy_from_slice(&rest[..arrived]);
        } else {
            space[..arrived].copy_from_slice(&rest[..arrived]);
        }
        self.staged.start += RECORD_HEADER_BYTES + arrived;
        let record = PartialRecord { header, kind, length, arrived, aside };
        self.record = Some(record);
        Ok(Some(record))
    }

    /// Decrypts a record that has arrived completely.
    fn decrypt_record_payload(&mut self, record: PartialRecord, space: &mut [u8]) -> ReceiveStep {
        let place = if record.aside {
            &mut self.aside[..record.length]
        } else {
            &mut space[..record.length]
        };
        let staged = &self.stage[self.staged.clone()];
        let Some(tag) = staged.first_chunk::<RECORD_TAG_BYTES>() else { return ReceiveStep::Again };
        if self.seal.open_payload(record.header, place, *tag).is_err() {
            return self.tampered_step();
        }
        self.staged.start += RECORD_TAG_BYTES;
        match record.kind {
            RecordKind::End => ReceiveStep::Ended(CONNECTION_CLOSED_REASON.to_owned()),
            _ if record.aside => {
                self.opened = 0..record.length;
                ReceiveStep::Again
            }
            _ => ReceiveStep::Placed(record.length),
        }
    }

    /// Reads the rest of a record, and the bytes behind it to the staging buffer.
    fn read_from_socket(
        &mut self,
        socket: &OwnedFd,
        record: Option<&mut PartialRecord>,
        space: &mut [u8],
        seen: bool,
    ) -> ReceiveStep {
        // The last read was short, so the next one would most likely return EAGAIN and cost a
        // system call.
        if self.drained && seen {
            return ReceiveStep::Drained;
        }
        // A header that begins at the end of the buffer would never fit otherwise.
        self.stage.copy_within(self.staged.clone(), 0);
        self.staged = 0..self.staged.len();
        let stage = &mut self.stage[self.staged.end..];
        let place = match &record {
            Some(record) if record.aside => &mut self.aside[record.arrived..record.length],
            Some(record) => &mut space[record.arrived..record.length],
            None => &mut [],
        };
        let (first, wanted) = (place.len(), place.len() + stage.len());
        let mut parts = [IoSliceMut::new(place), IoSliceMut::new(stage)];
        let parts = if first == 0 { &mut parts[1..] } else { &mut parts[..] };
        match recvmsg(socket, parts, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT) {
            // No end record came: an attacker could otherwise cut a stream off, and it would look
            // complete.
            Ok(message) if message.bytes == 0 => {
                ReceiveStep::Ended(CONNECTION_CUT_REASON.to_owned())
            }
            Ok(message) => {
                if let Some(record) = record {
                    record.arrived += message.bytes.min(first);
                }
                self.staged.end += message.bytes.saturating_sub(first);
                self.drained = message.bytes < wanted;
                ReceiveStep::Again
            }
            Err(Errno::AGAIN) => ReceiveStep::Drained,
            Err(Errno::INTR) => ReceiveStep::Again,
            Err(error) => ReceiveStep::Ended(error.to_string()),
        }
    }

    fn tampered_step(&self) -> ReceiveStep {
        ReceiveStep::Tampered(self.seal.tampered_record_error().to_string())
    }
}

#[cfg(test)]
mod tests;
