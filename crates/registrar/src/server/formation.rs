// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The server side of a rank's formation request.

use bytes::Bytes;
use farandole_world::Generation;
use tonic::Status;

use super::registrar_core::{MAX_LISTED_TASKS, RegistrarCore};
use crate::formation::{FormationRefusal, FormationRequest, MemberRanks, WorldOrRefusal};
use crate::generated as wire;
use crate::generated::meet_reply::What;

/// Bytes of peer addresses in one piece of a reply.
const ADDRESSES_PIECE_BYTES: usize = 8 << 10;

/// A reply whose pieces are made when the connection has space for them.
pub(super) type FormationReplyPieces =
    Box<dyn Iterator<Item = Result<wire::MeetReply, Status>> + Send>;

/// A recorded request. If it is dropped before the answer, for example because its caller is gone,
/// the request is withdrawn.
pub(super) struct FormationRequestGuard<'a> {
    pub(super) core: &'a RegistrarCore,
    pub(super) generation: Generation,
    pub(super) ask: &'a FormationRequest,
    pub(super) answered: bool,
}

impl Drop for FormationRequestGuard<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.core.formation_table().lock().withdraw_request(
                self.generation,
                self.ask.rank,
                self.ask.attempt,
            );
        }
    }
}

/// Parses the request of `rank` in a world of `size`.
///
/// # Errors
/// `invalid_argument` if the members are not ascending ranks of the world that include `rank`.
pub(super) fn parse_formation_request(
    rank: u32,
    size: u32,
    message: wire::MeetRequest,
) -> Result<FormationRequest, Status> {
    let wire::MeetRequest { attempt, holder, members, encoded_addresses, .. } = message;
    let members: MemberRanks =
        if members.is_empty() { (0..size).collect() } else { members.into_iter().collect() };
    let ascending = members.is_sorted_by(|one, next| one < next);
    // Members are the key of a pending world, so two ranks must write them in the same way.
    if !ascending || !members.contains(&rank) || members.last().is_none_or(|last| *last >= size) {
        let reason = format!(
            "the members of a world are ranks of 0 to {}, ascending",
            size.saturating_sub(1)
        );
        return Err(Status::invalid_argument(format!("{reason}, and rank {rank} is one of them")));
    }
    Ok(FormationRequest { rank, attempt, holder, members, encoded_addresses })
}

/// Converts an outcome to a reply.
pub(super) fn outcome_reply(outcome: &WorldOrRefusal, size: u32) -> FormationReplyPieces {
    match outcome {
        Ok(formed) => formed_world_reply(formed.encoded_addresses.clone()),
        Err(refusal) => single_piece_formation_reply(match refusal.clone() {
            FormationRefusal::RankTaken(holder) => What::Taken(holder),
            FormationRefusal::MembersDiffer { rank, members } => {
                let all = members.len() == size as usize;
                // An empty list means all ranks, as in the request, so the message stays short.
                let members = if all { Vec::new() } else { members.to_vec() };
                What::Elsewhere(wire::Elsewhere { rank, members })
            }
            FormationRefusal::WorkerEnded { rank, host } => What::Ended(wire::Ended { rank, host }),
        }),
    }
}

/// Returns the reply after a timeout.
pub(super) fn timeout_reply(asked: &FormationRequestGuard<'_>) -> FormationReplyPieces {
    let missing =
        asked.core.formation_table().lock().missing_ranks(asked.generation, &asked.ask.members);
    let count = u32::try_from(missing.len()).unwrap_or(u32::MAX);
    let ranks = missing.into_iter().take(MAX_LISTED_TASKS).collect();
    single_piece_formation_reply(What::Missing(wire::Missing { ranks, count }))
}

fn single_piece_formation_reply(what: What) -> FormationReplyPieces {
    Box::new(std::iter::once(Ok(wire::MeetReply { what: Some(what) })))
}

fn formed_world_reply(encoded: Bytes) -> FormationReplyPieces {
    Box::new((0..encoded.len()).step_by(ADDRESSES_PIECE_BYTES).map(move |at| {
        let piece = encoded.slice(at..encoded.len().min(at + ADDRESSES_PIECE_BYTES));
        Ok(wire::MeetReply { what: Some(What::WorldAddresses(piece)) })
    }))
}
