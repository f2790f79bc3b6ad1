// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The sending end of one connection: seals what lies in the ring where it lies, one record at a
//! time.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};

use crate::record::{HEADER, Header, Kind, MOST, Seal, TAG};

/// One connection's.
#[derive(Debug)]
pub(super) struct Sending {
    seal: Seal,
    /// Sealed and not all in the kernel's hands.
    record: Option<Sealed>,
}

#[derive(Clone, Copy, Debug)]
struct Sealed {
    header: Header,
    length: usize,
    tag: [u8; TAG],
    /// Sent bytes of header, payload and tag.
    sent: usize,
}

impl Sending {
    pub(super) fn new(seal: Seal) -> Self {
        Self { seal, record: None }
    }

    /// Sends of `bytes`, which are not empty and begin where the last record that was sent whole
    /// ended, as much as the socket takes of one record; the bytes of that record if it then is
    /// sent whole. Bytes that were sealed and not sent have to be the same at the next call.
    pub(super) fn step(&mut self, socket: &OwnedFd, bytes: &mut [u8]) -> Result<usize, Errno> {
        let mut record = match self.record {
            Some(record) => record,
            None => {
                let length = bytes.len().min(MOST);
                let sealed = self.seal.seal(Kind::Bytes, &mut bytes[..length]);
                let (header, tag) = sealed.ok_or(Errno::OVERFLOW)?;
                Sealed { header, length, tag, sent: 0 }
            }
        };
        let whole = HEADER + record.length + TAG;
        let payload = bytes.get(..record.length).ok_or(Errno::FAULT)?;
        while record.sent < whole {
            let parts = [&record.header.0[..], payload, &record.tag];
            let left = rest(parts, record.sent).map(IoSlice::new);
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(socket, &left, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => record.sent += sent,
                Err(Errno::INTR) => {}
                Err(error) => {
                    self.record = Some(record);
                    return Err(error);
                }
            }
        }
        self.record = None;
        Ok(record.length)
    }

    /// Says that nothing follows, if all that was to be sent is, and if the socket has room.
    pub(super) fn end(&mut self, socket: &OwnedFd) {
        if self.record.is_none()
            && let Some((header, tag)) = self.seal.seal(Kind::End, &mut [])
        {
            let mut bytes = [0; HEADER + TAG];
            bytes[..HEADER].copy_from_slice(&header.0);
            bytes[HEADER..].copy_from_slice(&tag);
            // A peer that does not get it sees the end of the connection.
            let _ = send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}

/// Returns the rest of some parts after their first `gone` bytes.
fn rest<const N: usize>(parts: [&[u8]; N], mut gone: usize) -> [&[u8]; N] {
    parts.map(|part| {
        let skipped = gone.min(part.len());
        gone -= skipped;
        &part[skipped..]
    })
}
