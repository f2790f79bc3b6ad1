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

/// Descriptors one message may carry.
pub const MOST: usize = 4;

/// Sends `bytes` and `descriptors` as one message.
///
/// # Errors
/// `System`; `CutShort` when the socket did not take all bytes at once.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::System { call: "sendmsg", source: rustix::io::Errno::TOOBIG });
    }
    let sent = retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })
    .map_err(Error::of("sendmsg"))?;
    if sent == bytes.len() { Ok(()) } else { Err(Error::CutShort { bytes: sent }) }
}

/// Receives into `bytes` and takes the descriptors that come along, closed on exec; surplus ones
/// are dropped.
///
/// # Errors
/// `System`; `AGAIN` in it when nothing came and the socket does not block or its timeout is over;
/// `INTR` after a signal. That is not tried again here, because the timeout would begin anew.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(Error::of("recvmsg"))?;
    let mut descriptors = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
            descriptors.extend(rights);
        }
    }
    Ok((message.bytes, descriptors))
}
