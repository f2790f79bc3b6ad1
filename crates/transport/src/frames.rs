// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Messages on a link: `[u32 length of the payload, little endian][u8 kind][payload]`.
//!
//! A frame may be larger than the ring: it moves in parts as the ring drains. Nothing here blocks.

use std::collections::VecDeque;
use std::fmt;

use farandole_world::Rank;

use crate::{Error, Link, LinkReceiver, LinkSender, Result};

/// Largest payload: longer ones are refused by both ends.
pub const MAX_FRAME: usize = 64 << 20;
/// Most bytes a sender keeps for a peer that does not read.
pub const MAX_QUEUED: usize = 256 << 20;

const HEADER: usize = 5;

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The meaning of the payload; the users of a link agree on it.
    pub kind: u8,
    /// The message.
    pub payload: Vec<u8>,
}

/// Turns a link into its two ends for frames.
pub fn frames(link: Link) -> (FrameSender, FrameReceiver) {
    (FrameSender::new(link.peer, link.sender), FrameReceiver::new(link.peer, link.receiver))
}

fn header(rank: Rank, kind: u8, payload: &[u8]) -> Result<[u8; HEADER]> {
    let length = u32::try_from(payload.len()).ok().filter(|_| payload.len() <= MAX_FRAME);
    let length = length.ok_or_else(|| too_long(rank, payload.len()))?.to_le_bytes();
    Ok([length[0], length[1], length[2], length[3], kind])
}

fn too_long(rank: Rank, bytes: usize) -> Error {
    Error::Frame { rank, reason: format!("longer than {MAX_FRAME} bytes: {bytes}") }
}

/// The sending end.
pub struct FrameSender {
    peer: Rank,
    sender: Box<dyn LinkSender>,
    /// Encoded bytes that did not fit in the ring yet.
    queue: VecDeque<u8>,
}

impl FrameSender {
    /// Frames towards `peer`.
    pub fn new(peer: Rank, sender: Box<dyn LinkSender>) -> Self {
        Self { peer, sender, queue: VecDeque::new() }
    }

    /// The rank at the other end.
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// Sends if the whole frame fits in the ring now and nothing is queued; false, and nothing
    /// sent, otherwise. A frame larger than the ring never fits: [`FrameSender::queue`] it.
    ///
    /// # Errors
    /// `PeerLost`; `Frame` when the payload is too long.
    pub fn try_send(&mut self, kind: u8, payload: &[u8]) -> Result<bool> {
        let header = header(self.peer, kind, payload)?;
        if !self.queue.is_empty() && !self.flush()? {
            return Ok(false);
        }
        let whole = HEADER + payload.len();
        let window = self.sender.window()?;
        let Some(space) = window.get_mut(..whole) else { return Ok(false) };
        space[..HEADER].copy_from_slice(&header);
        space[HEADER..].copy_from_slice(payload);
        self.sender.commit(whole)?;
        Ok(true)
    }

    /// Takes the frame in any case: what does not fit in the ring is kept for
    /// [`FrameSender::flush`].
    ///
    /// # Errors
    /// `PeerLost`; `Frame` when the payload is too long, or more than [`MAX_QUEUED`] bytes would be
    /// kept.
    pub fn queue(&mut self, kind: u8, payload: &[u8]) -> Result<()> {
        if self.try_send(kind, payload)? {
            return Ok(());
        }
        let kept = self.queue.len() + HEADER + payload.len();
        if kept > MAX_QUEUED {
            let reason =
                format!("it does not read, and more than {MAX_QUEUED} bytes would wait: {kept}");
            return Err(Error::Frame { rank: self.peer, reason });
        }
        self.queue.extend(header(self.peer, kind, payload)?);
        self.queue.extend(payload);
        self.flush()?;
        Ok(())
    }

    /// As [`FrameSender::queue`], and where that fails, as far as it goes at once also to a peer
    /// that is counted as lost: that may be a matter of another connection. For saying why this
    /// process stops; nothing may be sent after it.
    pub fn last_words(&mut self, kind: u8, payload: &[u8]) {
        if matches!(self.try_send(kind, payload), Ok(true)) {
            return;
        }
        let Ok(header) = header(self.peer, kind, payload) else { return };
        self.queue.extend(header);
        self.queue.extend(payload);
        if self.flush().is_err() {
            self.sender.last_words(self.queue.make_contiguous());
            self.queue.clear();
        }
    }

    /// Moves what is queued as far as it goes; true when nothing is left in this process but what
    /// the peer can read.
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

    /// Bytes queued here.
    pub fn queued(&self) -> usize {
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

/// A frame of which a part has arrived.
struct Partial {
    kind: u8,
    length: usize,
    payload: Vec<u8>,
}

/// The receiving end.
pub struct FrameReceiver {
    peer: Rank,
    receiver: Box<dyn LinkReceiver>,
    partial: Option<Partial>,
}

impl FrameReceiver {
    /// Frames from `peer`.
    pub fn new(peer: Rank, receiver: Box<dyn LinkReceiver>) -> Self {
        Self { peer, receiver, partial: None }
    }

    /// The rank at the other end.
    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// The next frame if it is here whole.
    ///
    /// # Errors
    /// `PeerLost` after the last whole frame; `Frame` when a length is out of bounds.
    pub fn try_receive(&mut self) -> Result<Option<Frame>> {
        let mut payload = Vec::new();
        Ok(self.try_receive_into(&mut payload)?.map(|kind| Frame { kind, payload }))
    }

    /// As [`FrameReceiver::try_receive`], into a buffer that is reused: returns the kind, and
    /// `payload` holds only the message. Without a frame `payload` is left alone.
    ///
    /// # Errors
    /// As [`FrameReceiver::try_receive`].
    pub fn try_receive_into(&mut self, payload: &mut Vec<u8>) -> Result<Option<u8>> {
        if self.partial.is_none() {
            let window = self.receiver.window()?;
            let Some((header, rest)) = window.split_first_chunk::<HEADER>() else {
                // A part of a header is no sign that the rest will come.
                if !window.is_empty() {
                    self.receiver.awaits()?;
                }
                return Ok(None);
            };
            let [a, b, c, d, kind] = *header;
            let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            if length > MAX_FRAME {
                return Err(too_long(self.peer, length));
            }
            if let Some(whole) = rest.get(..length) {
                payload.clear();
                payload.extend_from_slice(whole);
                self.receiver.release(HEADER + length)?;
                return Ok(Some(kind));
            }
            self.receiver.release(HEADER)?;
            self.partial = Some(Partial { kind, length, payload: Vec::new() });
        }
        self.continued(payload)
    }

    fn continued(&mut self, payload: &mut Vec<u8>) -> Result<Option<u8>> {
        let Some(partial) = &mut self.partial else { return Ok(None) };
        // Memory grows with what arrives, not with what a header promises.
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
        let (a, b) = loopback::pair(Rank(0), Rank(1), capacity).unwrap();
        (frames(a).0, frames(b).1)
    }

    #[test]
    fn frames_arrive_in_order_with_their_kinds() {
        let (mut sender, mut receiver) = ends(4096);
        assert!(sender.try_send(1, b"one").unwrap());
        assert!(sender.try_send(2, b"").unwrap());
        let one = receiver.try_receive().unwrap().unwrap();
        assert_eq!((one.kind, one.payload.as_slice()), (1, &b"one"[..]));
        assert_eq!(
            receiver.try_receive().unwrap().unwrap(),
            Frame { kind: 2, payload: Vec::new() }
        );
        assert_eq!(receiver.try_receive().unwrap(), None);
    }

    #[test]
    fn a_frame_larger_than_the_ring_moves_in_parts() {
        let (mut sender, mut receiver) = ends(4096);
        let large: Vec<u8> = (0..100_003_u32).map(|at| (at % 251).to_le_bytes()[0]).collect();
        assert!(!sender.try_send(9, &large).unwrap());
        sender.queue(9, &large).unwrap();
        sender.queue(10, b"after").unwrap();
        let frame = loop {
            sender.flush().unwrap();
            if let Some(frame) = receiver.try_receive().unwrap() {
                break frame;
            }
        };
        assert_eq!(frame, Frame { kind: 9, payload: large });
        assert!(sender.flush().unwrap());
        assert_eq!(receiver.try_receive().unwrap().unwrap().kind, 10);
    }

    #[test]
    fn a_length_out_of_bounds_is_refused() {
        let (mut a, b) = loopback::pair(Rank(0), Rank(1), 4096).unwrap();
        a.sender.window().unwrap()[..5].copy_from_slice(&[0xff; 5]);
        a.sender.commit(5).unwrap();
        let error = frames(b).1.try_receive().unwrap_err();
        assert!(matches!(error, Error::Frame { rank: Rank(0), .. }), "{error}");
        assert!(frames(a).0.queue(0, &vec![0; MAX_FRAME + 1]).is_err());
    }

    #[test]
    fn a_header_that_breaks_off_is_not_waited_for() {
        let (mut a, b) = loopback::pair(Rank(0), Rank(1), 4096).unwrap();
        a.sender.window().unwrap()[..3].copy_from_slice(&[1, 0, 0]);
        a.sender.commit(3).unwrap();
        let mut receiver = frames(b).1;
        assert_eq!(receiver.try_receive().unwrap(), None);
        drop(a);
        assert!(matches!(receiver.try_receive(), Err(Error::PeerLost { .. })));
    }

    #[test]
    fn frames_sent_before_the_end_are_still_received() {
        let (mut sender, mut receiver) = ends(4096);
        sender.queue(3, b"last").unwrap();
        drop(sender);
        assert_eq!(receiver.try_receive().unwrap().unwrap().kind, 3);
        assert!(matches!(receiver.try_receive(), Err(Error::PeerLost { .. })));
    }
}
