// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Words on the connection of heartbeats: records of one byte, sent and read without waiting.

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::addresses;
use crate::record::{HEADER, Header, Kind, TAG};
use crate::shared::Secured;

const RECORD: usize = HEADER + 1 + TAG;

/// One end of the connection.
#[derive(Debug)]
pub(crate) struct Beats {
    secured: Secured,
    /// A record the socket took a part of; what it has taken.
    unsent: [u8; RECORD],
    sent: usize,
    arriving: [u8; RECORD],
    arrived: usize,
}

/// The message that was received.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Word(u8),
    /// Nothing for now.
    Nothing,
    /// The connection ended.
    End,
    /// It broke, or somebody on the way meddled with it.
    Broken(String),
}

impl Beats {
    /// The socket must not block.
    pub(crate) fn new(secured: Secured) -> Self {
        Self { secured, unsent: [0; RECORD], sent: RECORD, arriving: [0; RECORD], arrived: 0 }
    }

    pub(crate) fn socket(&self) -> &std::os::fd::OwnedFd {
        &self.secured.socket
    }

    /// Says a word; one for which the socket has no room is left unsaid.
    pub(crate) fn say(&mut self, word: u8) {
        self.push();
        if self.sent < RECORD {
            return;
        }
        let mut payload = [word];
        let Some((header, tag)) = self.secured.keys.sending.seal(Kind::Word, &mut payload) else { return };
        self.unsent[..HEADER].copy_from_slice(&header.0);
        self.unsent[HEADER..=HEADER].copy_from_slice(&payload);
        self.unsent[HEADER + 1..].copy_from_slice(&tag);
        self.sent = 0;
        self.push();
    }

    fn push(&mut self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while self.sent < RECORD {
            match send(&self.secured.socket, &self.unsent[self.sent..], flags) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                // The next word tries again; an end is read.
                Err(_) => return,
            }
        }
    }

    /// The next word.
    pub(crate) fn hear(&mut self) -> Heard {
        while self.arrived < RECORD {
            match recv(&self.secured.socket, &mut self.arriving[self.arrived..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Heard::End,
                Ok((received, _)) => self.arrived += received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Heard::Nothing,
                Err(error) => return Heard::Broken(format!("its connection broke: {error}")),
            }
        }
        self.arrived = 0;
        self.open().unwrap_or_else(|| {
            let address = addresses::of_peer(&self.secured.socket);
            let what = self.secured.keys.receiving.tampered();
            Heard::Broken(format!("on its connection of heartbeats with {address}, {what}"))
        })
    }

    fn open(&mut self) -> Option<Heard> {
        let (header, rest) = self.arriving.split_first_chunk::<HEADER>()?;
        let (payload, tag) = rest.split_first_chunk::<1>()?;
        let (header, mut payload) = (Header(*header), *payload);
        header.promises().filter(|(kind, _)| *kind == Kind::Word)?;
        self.secured.keys.receiving.open(header, &mut payload, tag.try_into().ok()?).ok()?;
        Some(Heard::Word(payload[0]))
    }
}
