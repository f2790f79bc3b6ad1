// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The sending end of one connection: encrypts bytes in place in the ring, one record at a time.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};

use crate::record::{
    MAX_RECORD_PAYLOAD, RECORD_HEADER_BYTES, RECORD_TAG_BYTES, RecordHeader, RecordKind, RecordSeal,
};

/// Sends the records of one connection.
#[derive(Debug)]
pub(super) struct RecordSender {
    seal: RecordSeal,
    /// The sealed record that the socket has not fully accepted.
    record: Option<SealedRecord>,
}

#[derive(Clone, Copy, Debug)]
struct SealedRecord {
    header: RecordHeader,
    length: usize,
    tag: [u8; RECORD_TAG_BYTES],
    /// Bytes of header, payload and tag that are sent.
    sent: usize,
}

impl RecordSender {
    pub(super) fn new(seal: RecordSeal) -> Self {
        Self { seal, record: None }
    }

    /// Sends as much of one record as the socket accepts; returns the bytes of the record if it is
    /// then sent completely. `bytes` must not be empty and must begin where the last completely
    /// sent record ended. If a record was sealed but not completely sent, the next call must pass
    /// the same bytes.
    pub(super) fn send_record_step(
        &mut self,
        socket: &OwnedFd,
        bytes: &mut [u8],
    ) -> Result<usize, Errno> {
        let mut record = match self.record {
            Some(record) => record,
            None => {
                let length = bytes.len().min(MAX_RECORD_PAYLOAD);
                let sealed = self.seal.seal_payload(RecordKind::Bytes, &mut bytes[..length]);
                let (header, tag) = sealed.ok_or(Errno::OVERFLOW)?;
                SealedRecord { header, length, tag, sent: 0 }
            }
        };
        let whole = RECORD_HEADER_BYTES + record.length + RECORD_TAG_BYTES;
        let payload = bytes.get(..record.length).ok_or(Errno::FAULT)?;
        while record.sent < whole {
            let parts = [&record.header.0[..], payload, &record.tag];
            let left = remaining_parts(parts, record.sent).map(IoSlice::new);
            // Without NOSIGNAL, a closed connection would end the user's process by SIGPIPE.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(socket, &left, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => record.sent += sent,
                Err(Errno::INTR) => {}
                Err(error) => {
                    // The payload is encrypted in place: sealing it again would encrypt it twice.
                    self.record = Some(record);
                    return Err(error);
                }
            }
        }
        self.record = None;
        Ok(record.length)
    }

    /// Sends the end record, if no record is partly sent and the socket has space.
    pub(super) fn send_end_record(&mut self, socket: &OwnedFd) {
        // An end record in the middle of another record would look like a change on the way.
        if self.record.is_none()
            && let Some((header, tag)) = self.seal.seal_payload(RecordKind::End, &mut [])
        {
            let mut bytes = [0; RECORD_HEADER_BYTES + RECORD_TAG_BYTES];
            bytes[..RECORD_HEADER_BYTES].copy_from_slice(&header.0);
            bytes[RECORD_HEADER_BYTES..].copy_from_slice(&tag);
            // If the peer does not receive the record, it sees the end of the connection.
            let _ = send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}

/// Returns the parts without their first `gone` bytes.
fn remaining_parts<const N: usize>(parts: [&[u8]; N], mut gone: usize) -> [&[u8]; N] {
    parts.map(|part| {
        let skipped = gone.min(part.len());
        gone -= skipped;
        &part[skipped..]
    })
}
