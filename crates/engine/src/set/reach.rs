// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agreement of a set on a communicator among its members' devices.
//!
//! When the first operation comes whose tensors are on a device at every member, members show each
//! other their cards, by an allgather of the communicator of hosts at the same point of all
//! members' lists. Whether there can be a communicator follows from the cards. If so, the first
//! member names it, in a broadcast that comes next, and all begin to form it: an unused name would
//! leave a port open.

use farandole_collectives::{CARD, Communicator, Fabric, Memory, Operation, Segment, Token};
use farandole_world::Rank;

use super::{Shared, Step};

/// Names the allgather of cards, and the broadcast of the name.
pub(super) const MEETING: Token = Token(u64::MAX);

pub(super) enum Reach {
    /// No operation was for devices yet.
    Unasked,
    /// Cards are in progress.
    Asking(Memory),
    /// The name is in progress.
    Naming(Memory),
    /// There is one.
    Among(Box<dyn Communicator>),
    /// There was one, and what it had to do is done here. It stays until the set ends: what a
    /// peer's device lacks yet may still be on its way from this one.
    Left(Box<dyn Communicator>),
    /// There can be none.
    Not,
}

impl Reach {
    /// The meeting, to be submitted as [`MEETING`].
    pub(super) fn ask(&mut self, shared: &Shared, members: usize) -> Operation {
        let own = shared.devices.fabric.as_ref().zip(shared.devices.own());
        let mut card = own.map(|(fabric, own)| fabric.card(own)).unwrap_or_default();
        card.resize(CARD, 0);
        let cards = Memory::new(CARD * members);
        let segment =
            Segment { input: Memory::repeating(CARD, &card).buffer(), output: cards.buffer() };
        *self = Self::Asking(cards);
        Operation::Allgather { segments: vec![segment], bytes: vec![vec![CARD; members]] }
    }

    /// Takes the result of the step in progress. Returns the meeting's next step, to be submitted
    /// as [`MEETING`].
    ///
    /// # Errors
    /// When a communicator could be had and was refused.
    pub(super) fn met(
        &mut self,
        shared: &Shared,
        members: &[Rank],
        me: usize,
    ) -> Step<Option<Operation>> {
        let before = std::mem::replace(self, Self::Not);
        let Some((fabric, own)) = shared.devices.fabric.as_ref().zip(shared.devices.own()) else {
            return Ok(None);
        };
        match before {
            Self::Asking(cards) => {
                let cards = cards.to_vec().unwrap_or_default();
                let cards: Vec<&[u8]> = cards.chunks_exact(CARD).collect();
                Ok(self.name(shared, &**fabric, &cards, members, me))
            }
            Self::Naming(name) => {
                let name = name.to_vec().unwrap_or_default();
                if let Some((&NAMED, name)) = name.split_first() {
                    let patience = shared.settings.collective_timeout;
                    *self = Self::Among(fabric.form(own, name, (me, members.len()), patience)?);
                }
                Ok(None)
            }
            Self::Unasked | Self::Among(_) | Self::Left(_) | Self::Not => Ok(None),
        }
    }

    /// The broadcast of a name, unless something is in the way.
    fn name(
        &mut self,
        shared: &Shared,
        fabric: &dyn Fabric,
        cards: &[&[u8]],
        members: &[Rank],
        me: usize,
    ) -> Option<Operation> {
        if let Some(reason) = fabric.obstacle(cards, members, me) {
            if me == 0 {
                shared.observer.note(&reason);
            }
            return None;
        }
        let mut frame = Vec::new();
        if me == 0 {
            match fabric.name(cards) {
                Ok(name) => {
                    frame = [&[NAMED], &name[..]].concat();
                    if let Some(remark) = fabric.remark(cards, members, me) {
                        shared.observer.note(&remark);
                    }
                }
                // The others find no name.
                Err(reason) => shared.observer.note(&reason),
            }
        }
        frame.resize(CARD, 0);
        let name = Memory::repeating(CARD, &frame);
        let segment = Segment { input: name.buffer(), output: name.buffer() };
        *self = Self::Naming(name);
        Some(Operation::Broadcast { root: 0, segments: vec![segment] })
    }

    pub(super) fn communicator(&mut self) -> Option<&mut Box<dyn Communicator>> {
        match self {
            Self::Among(communicator) => Some(communicator),
            _ => None,
        }
    }

    /// Returns whether members find out if they can have one; the result wakes no thread.
    pub(super) fn is_forming(&self) -> bool {
        matches!(self, Self::Among(communicator) if communicator.is_forming())
    }

    /// Returns whether a device has work in progress that a thread must watch.
    pub(super) fn is_watched(&self) -> bool {
        matches!(self, Self::Among(communicator) if communicator.pending() > 0)
    }

    /// Returns whether peers wait for progress of the own device.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self, Self::Among(communicator) if communicator.is_awaited())
    }

    /// For a set that is left. If that is `orderly` and nothing is `broken`, what was launched
    /// comes to its end.
    pub(super) fn abandon(&mut self, orderly: bool, broken: bool) {
        match std::mem::replace(self, Self::Not) {
            Self::Left(communicator) if orderly => *self = Self::Left(communicator),
            Self::Among(mut communicator) => {
                if orderly && !broken {
                    communicator.drain(LAST);
                    if communicator.pending() == 0 {
                        *self = Self::Left(communicator);
                        return;
                    }
                }
                communicator.abandon();
            }
            Self::Left(mut communicator) => communicator.abandon(),
            Self::Unasked | Self::Asking(_) | Self::Naming(_) | Self::Not => {}
        }
    }
}

/// The first byte of a name, if there is one.
const NAMED: u8 = 1;

/// The longest that an end in good order waits for what was launched.
const LAST: std::time::Duration = std::time::Duration::from_secs(2);
