// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Words on the connection of heartbeats: records of one length, sent and read without waiting.
//!
//! ```text
//! word    u8 kind | u32 rank, little endian | u8 length of the reason | reason, UTF-8 | zero bytes
//! ```

use std::collections::VecDeque;

use farandole_world::Rank;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::addresses;
use crate::record::{HEADER, Header, Kind, TAG, WORD};
use crate::shared::Secured;

const RECORD: usize = HEADER + WORD + TAG;
/// Offset of a reason.
const REASON: usize = 6;

/// A message between the two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// This process leaves in order.
    Goodbye,
    /// This process lives.
    Beat,
    /// A rank was lost otherwise than by leaving in order.
    Lost { rank: Rank, reason: String },
}

impl Word {
    fn encode(&self) -> [u8; WORD] {
        let mut bytes = [0; WORD];
        match self {
            Self::Goodbye => {}
            Self::Beat => bytes[0] = 1,
            Self::Lost { rank, reason } => {
                let length = (0..=reason.len().min(WORD - REASON))
                    .rev()
                    .find(|length| reason.is_char_boundary(*length))
                    .unwrap_or(0);
                bytes[0] = 2;
                bytes[1..5].copy_from_slice(&rank.0.to_le_bytes());
                bytes[5] = u8::try_from(length).unwrap_or(0);
                bytes[REASON..REASON + length].copy_from_slice(&reason.as_bytes()[..length]);
            }
        }
        bytes
    }

    /// Reads a word; `None` where no sender says that.
    fn decode(bytes: &[u8; WORD]) -> Option<Self> {
        let ([kind, rank @ .., length], text) = bytes.split_first_chunk::<REASON>()?;
        match kind {
            0 => Some(Self::Goodbye),
            1 => Some(Self::Beat),
            2 => {
                let reason =
                    std::str::from_utf8(text.get(..usize::from(*length))?).ok()?.to_owned();
                Some(Self::Lost { rank: Rank(u32::from_le_bytes(*rank)), reason })
            }
            _ => None,
        }
    }
}

/// One end of the connection.
#[derive(Debug)]
pub(crate) struct Beats {
    secured: Secured,
    /// A record the socket took a part of; what it has taken.
    unsent: [u8; RECORD],
    sent: usize,
    /// Words that come after it.
    queue: VecDeque<Word>,
    arriving: [u8; RECORD],
    arrived: usize,
}

/// The message that was received.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Word(Word),
    /// Nothing for now.
    Nothing,
    /// The connection ended.
    End,
    /// It broke, or its bytes were changed on the way.
    Broken(String),
}

impl Beats {
    /// The socket must not block.
    pub(crate) fn new(secured: Secured) -> Self {
        let (unsent, queue, arriving) = ([0; RECORD], VecDeque::new(), [0; RECORD]);
        Self { secured, unsent, sent: RECORD, queue, arriving, arrived: 0 }
    }

    pub(crate) fn socket(&self) -> &std::os::fd::OwnedFd {
        &self.secured.socket
    }

    /// Says a word after those before it. One for which the socket has no room is sent by a later
    /// call.
    pub(crate) fn say(&mut self, word: Word) {
        self.queue.push_back(word);
        self.push();
    }

    /// Shows that this process lives. Where the socket has no room, what waits there shows it as
    /// well.
    pub(crate) fn beat(&mut self) {
        self.push();
        if self.sent == RECORD && self.queue.is_empty() {
            self.say(Word::Beat);
        }
    }

    fn push(&mut self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            while self.sent < RECORD {
                match send(&self.secured.socket, &self.unsent[self.sent..], flags) {
                    Ok(sent) => self.sent += sent,
                    Err(Errno::INTR) => {}
                    // The next word tries again; an end is read.
                    Err(_) => return,
                }
            }
            let Some(word) = self.queue.pop_front() else { return };
            let mut payload = word.encode();
            let Some((header, tag)) = self.secured.keys.sending.seal(Kind::Word, &mut payload)
            else {
                return;
            };
            self.unsent[..HEADER].copy_from_slice(&header.0);
            self.unsent[HEADER..HEADER + WORD].copy_from_slice(&payload);
            self.unsent[HEADER + WORD..].copy_from_slice(&tag);
            self.sent = 0;
        }
    }

    /// The next word.
    pub(crate) fn hear(&mut self) -> Heard {
        while self.arrived < RECORD {
            match recv(
                &self.secured.socket,
                &mut self.arriving[self.arrived..],
                RecvFlags::DONTWAIT,
            ) {
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
        let (payload, tag) = rest.split_first_chunk::<WORD>()?;
        let (header, mut payload) = (Header(*header), *payload);
        header.promises().filter(|(kind, _)| *kind == Kind::Word)?;
        self.secured.keys.receiving.open(header, &mut payload, tag.try_into().ok()?).ok()?;
        let unknown =
            || Heard::Broken("it sent an unknown message on its heartbeat connection".to_owned());
        Some(Word::decode(&payload).map_or_else(unknown, Heard::Word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_encoding_and_long_reasons_are_cut_between_characters() {
        let lost = |reason: &str| Word::Lost { rank: Rank(0x0102_0304), reason: reason.to_owned() };
        let longest = "x".repeat(WORD - REASON);
        for word in
            [Word::Goodbye, Word::Beat, lost(""), lost("its process 7 ended"), lost(&longest)]
        {
            assert_eq!(Word::decode(&word.encode()), Some(word));
        }
        let long = Word::decode(&lost(&"\u{20ac}".repeat(100)).encode());
        assert_eq!(long, Some(lost(&"\u{20ac}".repeat((WORD - REASON) / 3))));
    }

    #[test]
    fn what_is_no_word_is_not_understood() {
        let word = |kind: u8, length: u8, text: u8| {
            let mut bytes = [text; WORD];
            (bytes[0], bytes[5]) = (kind, length);
            Word::decode(&bytes)
        };
        assert!(word(2, 100, b'x').is_some());
        assert_eq!([word(3, 0, 0), word(2, 123, b'x'), word(2, 1, 0xff)], [None, None, None]);
    }
}
