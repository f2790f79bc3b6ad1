// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Frames are messages on a link: `[u32 length of the payload, little endian][u8 kind][payload]`.
//!
//! A frame may be larger than the ring: then it moves in parts while the receiver reads. No
//! function here blocks.

use std::collections::VecDeque;
use std::fmt;

use farandole_world::Rank;

use crate::{Error, Link, LinkReceiver, LinkSender, Result};

/// Largest payload in bytes; both ends refuse longer ones.
// A header could announce 4 GiB. The limit ends the link at a corrupt header, before that much is
// collected.
pub const MAX_FRAME_BYTES: usize = 64 << 20;
/// Largest number of bytes that a sender queues for a peer that does not read.
// A rank that is stopped for up to the peer timeout must not make its peers run out of memory.
pub const MAX_QUEUED_BYTES: usize = 256 << 20;

const FRAME_HEADER_BYTES: usize = 5;

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkFrame {
    /// Type of the message; the users of a link agree on the values.
    pub kind: u8,
    /// Content of the message.
    pub payload: Vec<u8>,
}

/// Converts a link into its sending and receiving end for frames.
pub fn into_frame_halves(link: Link) -> (FrameSender, FrameReceiver) {
    (FrameSender::new(link.peer, link.sender), FrameReceiver::new(link.peer, link.receiver))
}

fn encode_frame_header(rank: Rank, kind: u8, payload: &[u8]) -> Result<[u8; FRAME_HEADER_BYTES]> {
    let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_FRAME_BYTES);
    let length = length.ok_or_else(|| frame_too_long_error(rank, payload.len()))?.to_le_bytes();
    Ok([length[0], length[1], length[2], length[3], kind])
}

fn frame_too_long_error(rank: Rank, bytes: usize) -> Error {
    Error::Frame { rank, reason: format!("longer than {MAX_FRAME_BYTES} bytes: {bytes}") }
}

/// The sending end of a link for frames.
pub struct FrameSender {
    peer: Rank,
    sender: Box<dyn LinkSender>,
    /// Encoded bytes for which the ring had no space yet.
    queue: VecDeque<u8>,
}

impl FrameSender {
    /// Creates the sending end of frames to `peer`.
    pub fn new(peer: Rank, sender: Box<dyn LinkSender>) -> Self {
        Self { peer, sender, queue: VecDeque::new() }
    }

    /// Returns the rank at the other end.
    pub fn peer_rank(&self) -> Rank {
        self.peer
    }

    /// Sends the frame if nothing is queued and the ring has space for all of it. Otherwise sends
    /// nothing and returns false. A frame larger than the ring never fits: use
    /// [`FrameSender::queue_frame`].
    ///
    /// # Errors
    /// `PeerLost`; `Frame` when the payload is too long.
    pub fn try_send_frame(&mut self, kind: u8, payload: &[u8]) -> Result<bool> {
        let header = encode_frame_header(self.peer, kind, payload)?;
        // A new frame must not pass queued bytes, which may end in the middle of an earlier frame.
        if !self.queue.is_empty() && !self.flush()? {
            return Ok(false);
        }
        let whole = FRAME_HEADER_BYTES + payload.len();
        let window = self.sender.window()?;
        let Some(space) = window.get_mut(..whole) else { return Ok(false) };
        space[..FRAME_HEADER_BYTES].copy_from_slice(&header);
        space[FRAME_HEADER_BYTES..].copy_from_slice(payload);
        self.sender.commit(whole)?;
        Ok(true)
    }

    /// Accepts the frame in any case. Bytes for which the ring has no space are queued for
    /// [`FrameSender::flush`].
    ///
    /// # Errors
    /// `PeerLost`; `Frame` when the payload is too long, or when more than [`MAX_QUEUED_BYTES`]
    /// bytes would be queued.
    pub fn queue_frame(&mut self, kind: u8, payload: &[u8]) -> Result<()> {
        if self.try_send_frame(kind, payload)? {
            return Ok(());
        }
        let kept = self.queue.len() + FRAME_HEADER_BYTES + payload.len();
        if kept > MAX_QUEUED_BYTES {
            let reason = format!(
                "it does not read, and more than {MAX_QUEUED_BYTES} bytes would wait: {kept}"
            );
            return Err(Error::Frame { rank: self.peer, reason });
        }
        self.queue.extend(encode_frame_header(self.peer, kind, payload)?);
        self.queue.extend(payload);
        self.flush()?;
        Ok(())
    }

    /// Like [`FrameSender::queue_frame`], but if that fails, sends the bytes that fit without
    /// waiting, even to a peer that is counted as lost, because only another connection to it may
    /// have broken. For the reason why this process stops; no frame may be sent after it.
    pub fn send_final_frame(&mut self, kind: u8, payload: &[u8]) {
        if matches!(self.try_send_frame(kind, payload), Ok(true)) {
            return;
        }
        let Ok(header) = encode_frame_header(self.peer, kind, payload) else { return };
        self.queue.extend(header);
        self.queue.extend(payload);
        // `flush` fails for a peer that is counted as lost. Its other connections may still work,
        // and then these bytes give it the reason instead of a timeout.
        if self.flush().is_err() {
            self.sender.send_final_bytes(self.queue.make_contiguous());
            self.queue.clear();
        }
    }

    /// Moves queued bytes to the peer without waiting. Returns true when none are left in this
    /// process, except in memory that the peer can read.
    ///
    /// # Errors
    /// `PeerLost`.
    pub fn flush(&mut self) -> Result<bool> {
        while !self.queue.is_empty() {
            let part = self.queue.as_slices().0;
            let window = self.sender.window()?;
            let bytes = part.len().min(window.len());
            if bytes == 0 {
                return Ok(false);
            }
            window[..bytes].copy_from_slice(&part[..bytes]);
            self.sender.commit(bytes)?;
            self.queue.drain(..bytes);
        }
        self.sender.flush()
    }

    /// Returns the number of queued bytes.
    pub fn queued_bytes(&self) -> usize {
        self.queue.len()
    }
}

impl fmt::Debug for FrameSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameSender")
            .field("peer", &self.peer)
            .field("queued", &self.queue.len())
            .finish()
    }
}

/// A frame that has arrived in part.
struct PartialFrame {
    kind: u8,
    length: usize,
    payload: Vec<u8>,
}

/// The receiving end of a link for frames.
pub struct FrameReceiver {
    peer: Rank,
    receiver: Box<dyn LinkReceiver>,
    partial: Option<PartialFrame>,
}

impl FrameReceiver {
    /// Creates the receiving end of frames from `peer`.
    pub fn new(peer: Rank, receiver: Box<dyn LinkReceiver>) -> Self {
        Self { peer, receiver, partial: None }
    }

    /// Returns the rank at the other end.
    pub fn peer_rank(&self) -> Rank {
        self.peer
    }

    /// Returns the next frame if it has arrived completely.
    ///
    /// # Errors
    /// `PeerLost` after the last whole frame; `Frame` when a length is out of bounds.
    pub fn try_receive_frame(&mut self) -> Result<Option<LinkFrame>> {
        let mut payload = Vec::new();
        Ok(self.try_receive_frame_into(&mut payload)?.map(|kind| LinkFrame { kind, payload }))
    }

    /// Like [`FrameReceiver::try_receive_frame`], into a reused buffer: returns the kind, and
    /// `payload` then holds only the message. Without a frame, `payload` is unchanged.
    ///
    /// # Errors
    /// Like [`FrameReceiver::try_receive_frame`].
    pub fn try_receive_frame_into(&mut self, payload: &mut Vec<u8>) -> Result<Option<u8>> {
        if self.partial.is_none() {
            let window = self.receiver.window()?;
            let Some((header, rest)) = window.split_first_chunk::<FRAME_HEADER_BYTES>() else {
                // A part of a header does not mean that the rest will come.
                if !window.is_empty() {
                    let seen_bytes = window.len();
                    self.receiver.check_not_ended(seen_bytes)?;
                }
                return Ok(None);
            };
            let [a, b, c, d, kind] = *header;
            let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            if length > MAX_FRAME_BYTES {
                return Err(frame_too_long_error(self.peer, length));
            }
            // Most frames arrive as a whole and are copied once, without the buffer of a partial
            // frame.
            if let Some(whole) = rest.get(..length) {
                payload.clear();
                payload.extend_from_slice(whole);
                self.receiver.release(FRAME_HEADER_BYTES + length)?;
                return Ok(Some(kind));
            }
            // A frame may be larger than the ring, so the bytes so far must be released before it
            // is complete.
            self.receiver.release(FRAME_HEADER_BYTES)?;
            self.partial = Some(PartialFrame { kind, length, payload: Vec::new() });
        }
        self.continue_partial_frame(payload)
    }

    fn continue_partial_frame(&mut self, payload: &mut Vec<u8>) -> Result<Option<u8>> {
        let Some(partial) = &mut self.partial else { return Ok(None) };
        // The buffer grows with the bytes that arrive, and is not sized by the unchecked length of
        // the header.
        while partial.payload.len() < partial.length {
            let window = self.receiver.window()?;
            let bytes = window.len().min(partial.length - partial.payload.len());
            if bytes == 0 {
                return Ok(None);
            }
            partial.payload.extend_from_slice(&window[..bytes]);
            self.receiver.release(bytes)?;
        }
        let kind = partial.kind;
        *payload = std::mem::take(&mut partial.payload);
        self.partial = None;
        Ok(Some(kind))
    }
}

impl fmt::Debug for FrameReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameReceiver").field("peer", &self.peer).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loopback;

    fn ends(capacity: usize) -> (FrameSender, FrameReceiver) {
        let (a, b) = loopback::link_pair(Rank(0), Rank(1), capacity).unwrap();
        (into_frame_halves(a).0, into_frame_halves(b).1)
    }

    #[test]
    fn frames_arrive_in_order_with_their_kinds() {
        let (mut sender, mut receiver) = ends(4096);
        assert!(sender.try_send_frame(1, b"one").unwrap());
        assert!(sender.try_send_frame(2, b"").unwrap());
        let one = receiver.try_receive_frame().unwrap().unwrap();
        assert_eq!((one.kind, one.payload.as_slice()), (1, &b"one"[..]));
        assert_eq!(
            receiver.try_receive_frame().unwrap().unwrap(),
            LinkFrame { kind: 2, payload: Vec::new() }
        );
        assert_eq!(receiver.try_receive_frame().unwrap(), None);
    }

    #[test]
    fn a_frame_larger_than_the_ring_moves_in_parts() {
        let (mut sender, mut receiver) = ends(4096);
        let large: Vec<u8> = (0..100_003_u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
        assert!(!sender.try_send_frame(9, &large).unwrap());
        sender.queue_frame(9, &large).unwrap();
        sender.queue_frame(10, b"after").unwrap();
        let frame = loop {
            sender.flush().unwrap();
            if let Some(frame) = receiver.try_receive_frame().unwrap() {
                break frame;
            }
        };
        assert_eq!(frame, LinkFrame { kind: 9, payload: large });
        assert!(sender.flush().unwrap());
        assert_eq!(receiver.try_receive_frame().unwrap().unwrap().kind, 10);
    }

    #[test]
    fn a_length_out_of_bounds_is_refused() {
        let (mut a, b) = loopback::link_pair(Rank(0), Rank(1), 4096).unwrap();
        a.sender.window().unwrap()[..5].copy_from_slice(&[0xff; 5]);
        a.sender.commit(5).unwrap();
        let error = into_frame_halves(b).1.try_receive_frame().unwrap_err();
        assert!(matches!(error, Error::Frame { rank: Rank(0), .. }), "{error}");
        assert!(into_frame_halves(a).0.queue_frame(0, &vec![0; MAX_FRAME_BYTES + 1]).is_err());
    }

    #[test]
    fn a_header_that_breaks_off_is_not_waited_for() {
        let (mut a, b) = loopback::link_pair(Rank(0), Rank(1), 4096).unwrap();
        a.sender.window().unwrap()[..3].copy_from_slice(&[1, 0, 0]);
        a.sender.commit(3).unwrap();
        let mut receiver = into_frame_halves(b).1;
        assert_eq!(receiver.try_receive_frame().unwrap(), None);
        drop(a);
        assert!(matches!(receiver.try_receive_frame(), Err(Error::PeerLost { .. })));
    }

    #[test]
    fn frames_sent_before_the_end_are_still_received() {
        let (mut sender, mut receiver) = ends(4096);
        sender.queue_frame(3, b"last").unwrap();
        drop(sender);
        assert_eq!(receiver.try_receive_frame().unwrap().unwrap().kind, 3);
        assert!(matches!(receiver.try_receive_frame(), Err(Error::PeerLost { .. })));
    }
}
