// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Control messages on a heartbeat connection: records of a fixed length, sent and received without
//! waiting.
//!
//! ```text
//! message  u8 kind | u32 rank, little endian | u8 length of the reason | reason, UTF-8 | zero bytes
//! ```

use std::collections::VecDeque;

use farandole_world::Rank;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::addresses;
use crate::record::{
    CONTROL_PAYLOAD_BYTES, RECORD_HEADER_BYTES, RECORD_TAG_BYTES, RecordHeader, RecordKind,
};
use crate::secured_connection::SecuredConnection;

const HEARTBEAT_RECORD_BYTES: usize =
    RECORD_HEADER_BYTES + CONTROL_PAYLOAD_BYTES + RECORD_TAG_BYTES;
/// Offset of the reason in a message.
const REASON_OFFSET: usize = 6;

/// A message between the two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// This process leaves in order.
    Goodbye,
    /// This process lives.
    Heartbeat,
    /// A rank was lost other than by leaving in order.
    RankLost { rank: Rank, reason: String },
}

impl ControlMessage {
    fn encode(&self) -> [u8; CONTROL_PAYLOAD_BYTES] {
        let mut bytes = [0; CONTROL_PAYLOAD_BYTES];
        match self {
            Self::Goodbye => {}
            Self::Heartbeat => bytes[0] = 1,
            Self::RankLost { rank, reason } => {
                // The reason is cut at a character, because the peer refuses a message that is not
                // UTF-8.
                let length = (0..=reason.len().min(CONTROL_PAYLOAD_BYTES - REASON_OFFSET))
                    .rev()
                    .find(|length| reason.is_char_boundary(*length))
                    .unwrap_or(0);
                bytes[0] = 2;
                bytes[1..5].copy_from_slice(&rank.0.to_le_bytes());
                bytes[5] = u8::try_from(length).unwrap_or(0);
                bytes[REASON_OFFSET..REASON_OFFSET + length]
                    .copy_from_slice(&reason.as_bytes()[..length]);
            }
        }
        bytes
    }

    /// Decodes a message; returns `None` for bytes that no sender encodes.
    fn decode(bytes: &[u8; CONTROL_PAYLOAD_BYTES]) -> Option<Self> {
        let ([kind, rank @ .., length], text) = bytes.split_first_chunk::<REASON_OFFSET>()?;
        match kind {
            0 => Some(Self::Goodbye),
            1 => Some(Self::Heartbeat),
            2 => {
                let reason =
                    std::str::from_utf8(text.get(..usize::from(*length))?).ok()?.to_owned();
                Some(Self::RankLost { rank: Rank(u32::from_le_bytes(*rank)), reason })
            }
            _ => None,
        }
    }
}

/// One end of a heartbeat connection.
#[derive(Debug)]
pub(crate) struct HeartbeatChannel {
    secured: SecuredConnection,
    /// The record that is being sent; `sent` of its bytes are in the socket.
    unsent: [u8; HEARTBEAT_RECORD_BYTES],
    sent: usize,
    /// Messages to send after that record.
    queue: VecDeque<ControlMessage>,
    arriving: [u8; HEARTBEAT_RECORD_BYTES],
    arrived: usize,
}

/// Result of [`HeartbeatChannel::receive_message`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceiveOutcome {
    Message(ControlMessage),
    /// No whole message is available yet.
    Nothing,
    /// The connection ended.
    End,
    /// The connection broke, or its bytes were changed on the way.
    Broken(String),
}

impl HeartbeatChannel {
    /// Creates a channel; the socket must be non-blocking.
    pub(crate) fn new(secured: SecuredConnection) -> Self {
        let (unsent, queue, arriving) =
            ([0; HEARTBEAT_RECORD_BYTES], VecDeque::new(), [0; HEARTBEAT_RECORD_BYTES]);
        Self { secured, unsent, sent: HEARTBEAT_RECORD_BYTES, queue, arriving, arrived: 0 }
    }

    pub(crate) fn socket(&self) -> &std::os::fd::OwnedFd {
        &self.secured.socket
    }

    /// Sends a message after the queued ones. If the socket has no space, a later call sends it.
    pub(crate) fn queue_message(&mut self, word: ControlMessage) {
        self.queue.push_back(word);
        self.send_queued_messages();
    }

    /// Sends a heartbeat, unless other messages are pending: they also show that this process
    /// lives.
    pub(crate) fn send_heartbeat(&mut self) {
        self.send_queued_messages();
        // A peer that does not read must not make this queue grow with every interval.
        if self.sent == HEARTBEAT_RECORD_BYTES && self.queue.is_empty() {
            self.queue_message(ControlMessage::Heartbeat);
        }
    }

    fn send_queued_messages(&mut self) {
        // Without NOSIGNAL, a closed connection would end the user's process by SIGPIPE.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            while self.sent < HEARTBEAT_RECORD_BYTES {
                match send(&self.secured.socket, &self.unsent[self.sent..], flags) {
                    Ok(sent) => self.sent += sent,
                    Err(Errno::INTR) => {}
                    // The next message tries again. The end of the connection is detected when
                    // reading.
                    Err(_) => return,
                }
            }
            let Some(word) = self.queue.pop_front() else { return };
            let mut payload = word.encode();
            let Some((header, tag)) =
                self.secured.keys.sending.seal_payload(RecordKind::Control, &mut payload)
            else {
                return;
            };
            self.unsent[..RECORD_HEADER_BYTES].copy_from_slice(&header.0);
            self.unsent[RECORD_HEADER_BYTES..RECORD_HEADER_BYTES + CONTROL_PAYLOAD_BYTES]
                .copy_from_slice(&payload);
            self.unsent[RECORD_HEADER_BYTES + CONTROL_PAYLOAD_BYTES..].copy_from_slice(&tag);
            // A record is sealed once and then sent in full: sealing it again would use another
            // number.
            self.sent = 0;
        }
    }

    /// Returns the next message.
    pub(crate) fn receive_message(&mut self) -> ReceiveOutcome {
        while self.arrived < HEARTBEAT_RECORD_BYTES {
            match recv(
                &self.secured.socket,
                &mut self.arriving[self.arrived..],
                RecvFlags::DONTWAIT,
            ) {
                Ok((0, _)) => return ReceiveOutcome::End,
                Ok((received, _)) => self.arrived += received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return ReceiveOutcome::Nothing,
                Err(error) => {
                    return ReceiveOutcome::Broken(format!("its connection broke: {error}"));
                }
            }
        }
        self.arrived = 0;
        self.decrypt_control_record().unwrap_or_else(|| {
            let address = addresses::describe_peer_address(&self.secured.socket);
            let what = self.secured.keys.receiving.tampered_record_error();
            ReceiveOutcome::Broken(format!(
                "on its connection of heartbeats with {address}, {what}"
            ))
        })
    }

    fn decrypt_control_record(&mut self) -> Option<ReceiveOutcome> {
        let (header, rest) = self.arriving.split_first_chunk::<RECORD_HEADER_BYTES>()?;
        let (payload, tag) = rest.split_first_chunk::<CONTROL_PAYLOAD_BYTES>()?;
        let (header, mut payload) = (RecordHeader(*header), *payload);
        // A record of another kind must not count as a heartbeat, even if its code is valid.
        header.announced_kind_and_length().filter(|(kind, _)| *kind == RecordKind::Control)?;
        self.secured
            .keys
            .receiving
            .open_payload(header, &mut payload, tag.try_into().ok()?)
            .ok()?;
        let unknown = || {
            ReceiveOutcome::Broken(
                "it sent an unknown message on its heartbeat connection".to_owned(),
            )
        };
        Some(ControlMessage::decode(&payload).map_or_else(unknown, ReceiveOutcome::Message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_encoding_and_long_reasons_are_cut_between_characters() {
        let lost = |reason: &str| ControlMessage::RankLost {
            rank: Rank(0x0102_0304),
            reason: reason.to_owned(),
        };
        let longest = "x".repeat(CONTROL_PAYLOAD_BYTES - REASON_OFFSET);
        for word in [
            ControlMessage::Goodbye,
            ControlMessage::Heartbeat,
            lost(""),
            lost("its process 7 ended"),
            lost(&longest),
        ] {
            assert_eq!(ControlMessage::decode(&word.encode()), Some(word));
        }
        let long = ControlMessage::decode(&lost(&"\u{20ac}".repeat(100)).encode());
        assert_eq!(
            long,
            Some(lost(&"\u{20ac}".repeat((CONTROL_PAYLOAD_BYTES - REASON_OFFSET) / 3)))
        );
    }

    #[test]
    fn what_is_no_word_is_not_understood() {
        let word = |kind: u8, length: u8, text: u8| {
            let mut bytes = [text; CONTROL_PAYLOAD_BYTES];
            (bytes[0], bytes[5]) = (kind, length);
            ControlMessage::decode(&bytes)
        };
        assert!(word(2, 100, b'x').is_some());
        assert_eq!([word(3, 0, 0), word(2, 123, b'x'), word(2, 1, 0xff)], [None, None, None]);
    }
}
