// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! How a set comes to a communicator among its members' devices.
//!
//! When the first operation comes whose tensors are on a device at every member, members show each other their cards, by
//! an allgather of the communicator of hosts at the same point of everybody's list. What follows is a function of the
//! cards: either all begin to form a communicator, whose name is on the first member's card, or none does.

use farandole_collectives::{CARD, Communicator, Formed, Memory, Operation, Segment, Token};
use farandole_world::Rank;

use super::{Shared, Step};

/// Names the allgather of cards.
pub(super) const MEETING: Token = Token(u64::MAX);

pub(super) enum Reach {
    /// No operation was for devices yet.
    Unasked,
    /// Cards are under way.
    Asking(Memory),
    /// There is one.
    Among(Box<dyn Communicator>),
    /// There can be none.
    Not,
}

impl Reach {
    /// The meeting, to be submitted as [`MEETING`].
    pub(super) fn ask(&mut self, shared: &Shared, (me, members): (usize, usize)) -> Operation {
        let own = shared.devices.fabric.as_ref().zip(shared.devices.own());
        let mut card = own.map(|(fabric, own)| fabric.card(own, me == 0)).unwrap_or_default();
        card.resize(CARD, 0);
        let cards = Memory::new(CARD * members);
        let segment = Segment { input: Memory::repeating(CARD, &card).buffer(), output: cards.buffer() };
        *self = Self::Asking(cards);
        Operation::Allgather { segments: vec![segment], bytes: vec![vec![CARD; members]] }
    }

    /// Everybody's cards are here.
    ///
    /// # Errors
    /// When a communicator could be had and was refused.
    pub(super) fn met(&mut self, shared: &Shared, members: &[Rank], me: usize) -> Step {
        let Self::Asking(cards) = std::mem::replace(self, Self::Not) else { return Ok(()) };
        let Some((fabric, own)) = shared.devices.fabric.as_ref().zip(shared.devices.own()) else {
            return Ok(());
        };
        let cards = cards.to_vec().unwrap_or_default();
        let cards: Vec<&[u8]> = cards.chunks_exact(CARD).collect();
        let patience = shared.settings.collective_timeout;
        match fabric.form(own, &cards, members, me, patience)? {
            Formed::Communicator(communicator) => *self = Self::Among(communicator),
            Formed::Not(reason) if me == 0 => shared.observer.note(&reason),
            Formed::Not(_) => {}
        }
        Ok(())
    }

    pub(super) fn communicator(&mut self) -> Option<&mut Box<dyn Communicator>> {
        match self {
            Self::Among(communicator) => Some(communicator),
            _ => None,
        }
    }

    /// Whether a device has something under way that somebody must watch.
    pub(super) fn is_watched(&self) -> bool {
        matches!(self, Self::Among(communicator) if communicator.pending() > 0)
    }

    /// For a set that ends; `orderly` lets what was launched come to its end.
    pub(super) fn abandon(&mut self, orderly: bool) {
        if let Self::Among(communicator) = self {
            if orderly {
                communicator.drain(LAST);
            }
            communicator.abandon();
        }
        *self = Self::Not;
    }
}

/// The longest that an end in good order waits for what was launched.
const LAST: std::time::Duration = std::time::Duration::from_secs(2);
