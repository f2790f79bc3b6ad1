// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Passes descriptors to another process over a Unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{Error, Result};

/// Largest number of descriptors in one message.
pub const MAX_DESCRIPTORS_PER_MESSAGE: usize = 4;

/// Sends `bytes` and `descriptors` as one message.
///
/// # Errors
/// `System`; `CutShort` when the socket did not take all bytes at once.
pub fn send_with_descriptors(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<()> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::System { call: "sendmsg", source: rustix::io::Errno::TOOBIG });
    }
    let sent = retry_on_intr(|| {
        // Without NOSIGNAL, a peer that has closed its socket would end this process by SIGPIPE.
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })
    .map_err(Error::failed_call_mapper("sendmsg"))?;
    if sent == bytes.len() { Ok(()) } else { Err(Error::CutShort { bytes: sent }) }
}

/// Receives into `bytes`; returns the number of bytes and the descriptors of the message, which are
/// closed on exec. Surplus descriptors are dropped.
///
/// # Errors
/// `System`, with `AGAIN` when no message came and the socket does not block or its timeout is
/// over, and with `INTR` after a signal. This function does not retry, because the timeout would
/// start again.
pub fn receive_with_descriptors(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        // The flag closes them on exec at once: a program that another thread starts meanwhile must
        // not inherit them.
        recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(Error::failed_call_mapper("recvmsg"))?;
    let mut descriptors = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            descriptors.extend(rights);
        }
    }
    Ok((message.bytes, descriptors))
}
