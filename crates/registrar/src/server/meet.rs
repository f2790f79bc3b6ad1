// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The call of a rank that asks for a world with others.

use bytes::Bytes;
use farandole_world::Generation;
use tonic::Status;

use super::core::{Core, LISTED};
use crate::generated as wire;
use crate::generated::meet_reply::What;
use crate::meetings::{Apart, Ask, Members, Outcome};

/// Bytes of cards in one piece of a reply.
const PIECE: usize = 8 << 10;

/// A reply whose pieces are made when there is room for them on their way.
pub(super) type Pieces = Box<dyn Iterator<Item = Result<wire::MeetReply, Status>> + Send>;

/// A question that was asked. Dropped before it is answered, as when its caller is gone, it is
/// taken back.
pub(super) struct Asked<'a> {
    pub(super) core: &'a Core,
    pub(super) generation: Generation,
    pub(super) ask: &'a Ask,
    pub(super) answered: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.core.meetings().lock().give_up(self.generation, self.ask.rank, self.ask.attempt);
        }
    }
}

/// Returns the question of `rank` in a world of `size`.
///
/// # Errors
/// `invalid_argument` for members that are not ascending ranks of the world with the asking one
/// among them.
pub(super) fn question(rank: u32, size: u32, message: wire::MeetRequest) -> Result<Ask, Status> {
    let wire::MeetRequest { attempt, holder, members, card, .. } = message;
    let members: Members =
        if members.is_empty() { (0..size).collect() } else { members.into_iter().collect() };
    let ascending = members.is_sorted_by(|one, next| one < next);
    if !ascending || !members.contains(&rank) || members.last().is_none_or(|last| *last >= size) {
        let reason = format!(
            "the members of a world are ranks of 0 to {}, ascending",
            size.saturating_sub(1)
        );
        return Err(Status::invalid_argument(format!("{reason}, and rank {rank} is one of them")));
    }
    Ok(Ask { rank, attempt, holder, members, card })
}

/// Returns the reply that tells an outcome.
pub(super) fn answer(outcome: &Outcome, size: u32) -> Pieces {
    match outcome {
        Ok(met) => pieces(met.cards.clone()),
        Err(apart) => one(match apart.clone() {
            Apart::Taken(holder) => What::Taken(holder),
            Apart::Elsewhere { rank, members } => {
                let all = members.len() == size as usize;
                let members = if all { Vec::new() } else { members.to_vec() };
                What::Elsewhere(wire::Elsewhere { rank, members })
            }
            Apart::Ended { rank, host } => What::Ended(wire::Ended { rank, host }),
        }),
    }
}

/// Returns the reply when the time ran out.
pub(super) fn late(asked: &Asked<'_>) -> Pieces {
    let missing = asked.core.meetings().lock().missing(asked.generation, &asked.ask.members);
    let count = u32::try_from(missing.len()).unwrap_or(u32::MAX);
    let ranks = missing.into_iter().take(LISTED).collect();
    one(What::Missing(wire::Missing { ranks, count }))
}

fn one(what: What) -> Pieces {
    Box::new(std::iter::once(Ok(wire::MeetReply { what: Some(what) })))
}

fn pieces(cards: Bytes) -> Pieces {
    Box::new((0..cards.len()).step_by(PIECE).map(move |at| {
        let piece = cards.slice(at..cards.len().min(at + PIECE));
        Ok(wire::MeetReply { what: Some(What::Cards(piece)) })
    }))
}
