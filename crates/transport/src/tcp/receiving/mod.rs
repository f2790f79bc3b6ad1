// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The receiving end of one connection: reads records to where their payload belongs in the ring,
//! and opens them there.
//!
//! Small records come through a stage, so that one call reads several. Of a large record the kernel
//! writes the payload to its place in the ring and what follows it to the stage. A record for which
//! the ring has no room is read and opened aside: a reader may need the first part of a message
//! before the ring can hold all of it. No byte is visible before its record has opened.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use crate::record::{HEADER, Header, Kind, MOST, Seal, TAG};

/// Bytes read at a time of which it is not known where they belong.
const STAGE: usize = 8 << 10;
const CLOSED: &str = "it closed the connection";
const CUT: &str =
    "it closed the connection without a closing message: its process ended, or the path was cut";

/// One connection's.
pub(super) struct Receiving {
    seal: Seal,
    stage: Box<[u8; STAGE]>,
    /// Bytes of the stage that have arrived and are not used yet.
    staged: Range<usize>,
    record: Option<Partial>,
    /// The payload of a record that the ring had no room for.
    aside: Vec<u8>,
    /// Bytes of it that were opened and are not in the ring yet.
    opened: Range<usize>,
    /// The last call read less than there was room for.
    drained: bool,
}

/// A record of which the header has arrived.
#[derive(Clone, Copy, Debug)]
struct Partial {
    header: Header,
    kind: Kind,
    length: usize,
    /// Bytes of its payload that have arrived where they belong.
    arrived: usize,
    aside: bool,
}

/// The result of a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many bytes have opened and lie at the beginning of the space.
    Placed(usize),
    /// Nothing to be seen, but there may be more.
    Again,
    /// Nothing more is there for now.
    Drained,
    /// The ring has no room.
    Full,
    /// Nothing will follow.
    Ended(String),
    /// Its bytes were changed on the way.
    Tampered(String),
}

impl Receiving {
    pub(super) fn new(seal: Seal) -> Self {
        Self {
            seal,
            stage: Box::new([0; STAGE]),
            staged: 0..0,
            record: None,
            aside: Vec::new(),
            opened: 0..0,
            drained: false,
        }
    }

    /// Returns whether a part of a record lies in the ring, behind what was placed there.
    pub(super) fn in_ring(&self) -> bool {
        self.record.is_some_and(|record| !record.aside)
    }

    /// A poll begins: there may be something again.
    pub(super) fn poll(&mut self) {
        self.drained = false;
    }

    /// One step. `space` is the room in the ring for what comes next on this connection: it begins
    /// where that belongs, and ends `block` bytes later at most, where the next byte belongs
    /// elsewhere. It may have grown since the last step, and is the same otherwise. `seen` says
    /// whether this poll has placed anything: if so, what is short is not read again.
    pub(super) fn step(
        &mut self,
        socket: &OwnedFd,
        space: &mut [u8],
        block: usize,
        seen: bool,
    ) -> Step {
        if space.is_empty() {
            return Step::Full;
        }
        if !self.opened.is_empty() {
            let bytes = self.opened.len().min(space.len());
            let start = self.opened.start;
            space[..bytes].copy_from_slice(&self.aside[start..start + bytes]);
            self.opened.start += bytes;
            return Step::Placed(bytes);
        }
        let mut record = match self.record {
            Some(record) => record,
            None => match self.begin(space, block) {
                Ok(Some(record)) => record,
                Ok(None) => return self.read(socket, None, space, seen),
                Err(tampered) => return tampered,
            },
        };
        if record.arrived == record.length && self.staged.len() >= TAG {
            self.record = None;
            return self.open(record, space);
        }
        self.record = None;
        let step = self.read(socket, Some(&mut record), space, seen);
        self.record = Some(record);
        step
    }

    /// Takes a header and what follows it from the stage, if there is one.
    fn begin(&mut self, space: &mut [u8], block: usize) -> Result<Option<Partial>, Step> {
        let staged = &self.stage[self.staged.clone()];
        let Some((header, rest)) = staged.split_first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header(*header);
        let promise =
            header.promises().filter(|(kind, length)| *kind != Kind::Word && *length <= block);
        let Some((kind, length)) = promise else { return Err(self.tampered()) };
        let aside = length > space.len();
        let arrived = length.min(rest.len());
        if aside {
            self.aside.resize(self.aside.len().max(MOST.min(length.next_power_of_two())), 0);
            self.aside[..arrived].copy_from_slice(&rest[..arrived]);
        } else {
            space[..arrived].copy_from_slice(&rest[..arrived]);
        }
        self.staged.start += HEADER + arrived;
        let record = Partial { header, kind, length, arrived, aside };
        self.record = Some(record);
        Ok(Some(record))
    }

    /// All of a record is here.
    fn open(&mut self, record: Partial, space: &mut [u8]) -> Step {
        let place = if record.aside {
            &mut self.aside[..record.length]
        } else {
            &mut space[..record.length]
        };
        let staged = &self.stage[self.staged.clone()];
        let Some(tag) = staged.first_chunk::<TAG>() else { return Step::Again };
        if self.seal.open(record.header, place, *tag).is_err() {
            return self.tampered();
        }
        self.staged.start += TAG;
        match record.kind {
            Kind::End => Step::Ended(CLOSED.to_owned()),
            _ if record.aside => {
                self.opened = 0..record.length;
                Step::Again
            }
            _ => Step::Placed(record.length),
        }
    }

    /// Reads the rest of a record, and behind it to the stage.
    fn read(
        &mut self,
        socket: &OwnedFd,
        record: Option<&mut Partial>,
        space: &mut [u8],
        seen: bool,
    ) -> Step {
        if self.drained && seen {
            return Step::Drained;
        }
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
            Ok(message) if message.bytes == 0 => Step::Ended(CUT.to_owned()),
            Ok(message) => {
                if let Some(record) = record {
                    record.arrived += message.bytes.min(first);
                }
                self.staged.end += message.bytes.saturating_sub(first);
                self.drained = message.bytes < wanted;
                Step::Again
            }
            Err(Errno::AGAIN) => Step::Drained,
            Err(Errno::INTR) => Step::Again,
            Err(error) => Step::Ended(error.to_string()),
        }
    }

    fn tampered(&self) -> Step {
        Step::Tampered(self.seal.tampered().to_string())
    }
}

#[cfg(test)]
mod tests;
