// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Departure and failure of ranks.
//!
//! A departing rank announces the number of lists that it has executed. All ranks complete these
//! lists and fail the rest. They keep their links until all ranks are done, because a transfer may
//! still use them: `SUBTREE_DONE` goes up the tree, then `LINKS_CLEAR` goes down. A failing rank
//! only sends its reason.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_negotiation::{FrameReader, FrameWriter, MalformedFrame};
use farandole_transport::LinkKind;
use farandole_world::Rank;

use super::batch_execution::BatchExecution;
use super::control_links::{ControlLinks, FrameFailure, frame_kinds};
use super::local_requests::FinishedRequest;
use super::set_scope::SetScope;
use crate::StopCause;
use crate::error::StepResult;

/// Longest time between the loss of a process on another host and the arrival of its departure
/// message.
const FAREWELL_GRACE_PERIOD: Duration = Duration::from_millis(20);

/// Departure of a rank: why the set refuses new requests, and the last list that it still executes.
struct Departure {
    cause: Arc<StopCause>,
    departed: Vec<Rank>,
    executed: u64,
    /// Number of children whose subtrees are done.
    children_done: usize,
    done_sent: bool,
    /// Whether all ranks are done, so that links may close.
    cleared: bool,
}

/// The departure of a set's ranks, and peers that may have been lost.
#[derive(Default)]
pub(super) struct Departures {
    departure: Option<Departure>,
    /// Loss of a peer that may have departed in order, and the time of the loss.
    suspect: Option<(Instant, StopCause)>,
}

/// The message of a departing rank.
pub(super) struct DepartureMessage {
    pub(super) rank: Rank,
    /// Number of lists that the rank has executed.
    pub(super) executed: u64,
    pub(super) cause: Arc<StopCause>,
}

impl DepartureMessage {
    pub(super) fn decode_from(frame: &[u8], scope: &SetScope) -> Result<Self, MalformedFrame> {
        let mut reader = FrameReader(frame);
        let member = reader.read_u32()?;
        let executed = reader.read_varint()?;
        let rank =
            *scope.members.get(member as usize).ok_or(MalformedFrame::Member(member.into()))?;
        let cause = match reader.read_byte()? {
            0 => StopCause::Departed { rank, host: scope.host_name(rank) },
            _ => StopCause::Removed { set: scope.id },
        };
        Ok(Self { rank, executed, cause: Arc::new(cause) })
    }

    /// Writes the message of this rank.
    pub(super) fn encode(&self, scope: &SetScope) -> Vec<u8> {
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_varint(scope.tree.me.into());
        writer.write_varint(self.executed);
        writer.write_byte(matches!(*self.cause, StopCause::Removed { .. }).into());
        frame
    }
}

impl Departures {
    /// Returns the reason why this set refuses requests, if it does.
    pub(super) fn cause(&self) -> Option<&Arc<StopCause>> {
        self.departure.as_ref().map(|departure| &departure.cause)
    }

    /// Returns whether a departing rank does not execute this list, so that it cannot be completed.
    pub(super) fn cancels_list(&self, number: u64) -> bool {
        self.departure.as_ref().is_some_and(|departure| number > departure.executed)
    }

    /// Returns whether polls must decide a suspicion or complete a departure.
    pub(super) fn is_unsettled(&self) -> bool {
        self.suspect.is_some() || self.departure.as_ref().is_some_and(|leaving| !leaving.cleared)
    }

    /// Returns whether links may close.
    pub(super) fn allows_close(&self) -> bool {
        self.departure.as_ref().is_none_or(|departure| departure.cleared)
    }

    /// Records a departure. Returns whether the neighbours must be notified.
    pub(super) fn record_departure(&mut self, message: &DepartureMessage) -> bool {
        let DepartureMessage { rank, executed, cause } = message;
        let Some(known) = &mut self.departure else {
            self.departure = Some(Departure {
                cause: Arc::clone(cause),
                departed: vec![*rank],
                executed: *executed,
                children_done: 0,
                done_sent: false,
                cleared: false,
            });
            return true;
        };
        known.departed.push(*rank);
        let is_less = *executed < known.executed;
        // All ranks stop after the same list: the last one that all departing ranks have executed.
        known.executed = known.executed.min(*executed);
        is_less
    }

    pub(super) fn count_done_subtree(&mut self) {
        if let Some(departure) = &mut self.departure {
            departure.children_done += 1;
        }
    }

    /// Allows links to close, here and at the ranks below.
    pub(super) fn clear_links(&mut self, links: &mut ControlLinks) -> StepResult {
        if let Some(departure) = &mut self.departure {
            departure.cleared = true;
        }
        links.send_to_children(frame_kinds::LINKS_CLEAR, &[])
    }

    /// Decides whether a lost link is a failure, and completes a departure.
    ///
    /// # Errors
    /// The loss, if no message has explained it in time.
    pub(super) fn settle(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        execution: &mut BatchExecution,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        if let Some((at, cause)) = self.suspect.take()
            && !self.is_orderly_loss(&cause, execution)
        {
            // Until then, an abort or a departure of another rank may explain the loss better.
            let allowance = scope.context.settings.loss_report_allowance;
            if now.saturating_duration_since(at) >= allowance {
                return Err(cause);
            }
            self.suspect = Some((at, cause));
        }
        let Some(departure) = &mut self.departure else { return Ok(()) };
        let useful = execution.oldest_list().is_some_and(|list| list <= departure.executed);
        if useful && !execution.is_broken() {
            return Ok(());
        }
        execution.fail_batches(&departure.cause, finished);
        // A rank that closed its links either did not wait or waited long enough.
        departure.cleared |= links.has_closed_link();
        if departure.children_done < scope.tree.children.len() || departure.done_sent {
            return Ok(());
        }
        departure.done_sent = true;
        if scope.is_coordinator() {
            self.clear_links(links)
        } else {
            links.send_to_parent(frame_kinds::SUBTREE_DONE, &[])
        }
    }

    /// Records the loss of a link, unless another loss is open.
    pub(super) fn suspect_loss(&mut self, cause: StopCause, now: Instant) {
        self.suspect.get_or_insert((now, cause));
    }

    /// Handles the direct report that a process is gone, which is more reliable than a lost link.
    /// If no departure message arrives soon, the loss is a failure.
    pub(super) fn suspect_peer(
        &mut self,
        scope: &SetScope,
        links: &ControlLinks,
        execution: &BatchExecution,
        error: farandole_transport::Error,
        now: Instant,
    ) {
        let cause = StopCause::Transport(error);
        let concerns = lost_rank(&cause).is_none_or(|rank| scope.members.contains(&rank));
        if concerns && !self.is_orderly_loss(&cause, execution) {
            // If the process shares memory with this one, its last messages are already here: one
            // more poll of the links is enough. Over a connection they may still be in transit.
            let near = lost_rank(&cause).is_some_and(|rank| shares_memory_with(scope, links, rank));
            let hearsay = scope.context.settings.loss_report_allowance;
            let waited = if near { hearsay } else { hearsay.saturating_sub(FAREWELL_GRACE_PERIOD) };
            let since = now.checked_sub(waited).unwrap_or(now);
            if self.suspect.as_ref().is_none_or(|(at, _)| since < *at) {
                self.suspect = Some((since, cause));
            }
        }
    }

    /// Returns whether it is open if a lost peer departed in order.
    pub(super) fn has_suspected_peer(&self) -> bool {
        self.suspect.is_some()
    }

    pub(super) fn forget_suspect(&mut self) {
        self.suspect = None;
    }

    /// Returns whether a lost rank has departed in order, or no operation is in progress that the
    /// loss could break.
    fn is_orderly_loss(&self, cause: &StopCause, execution: &BatchExecution) -> bool {
        self.departure.as_ref().is_some_and(|departure| {
            execution.is_idle()
                || lost_rank(cause).is_some_and(|rank| departure.departed.contains(&rank))
        })
    }
}

/// Returns whether messages of a rank come through shared memory. Containers of one machine, and
/// processes of one host, may or may not map the same segments, so this checks the kind of the link
/// towards the rank.
fn shares_memory_with(scope: &SetScope, links: &ControlLinks, rank: Rank) -> bool {
    let world = &scope.context.world;
    let own = world.own_placement().host.machine_name();
    let together =
        world.seats.get(rank.index()).is_some_and(|seat| seat.host.machine_name() == own);
    let member =
        scope.members.binary_search(&rank).ok().and_then(|member| u32::try_from(member).ok());
    let is_below = |below: &Vec<u32>| member.is_some_and(|member| below.contains(&member));
    let child = scope.tree.below.iter().position(is_below);
    together && links.kind_towards(child).is_some_and(|kind| kind != LinkKind::Tcp)
}

/// Returns the rank that was lost, if the cause is the loss of a peer.
fn lost_rank(cause: &StopCause) -> Option<Rank> {
    let (StopCause::Transport(error)
    | StopCause::Collective(farandole_collectives::Error::Transport(error))) = cause
    else {
        return None;
    };
    match error {
        farandole_transport::Error::PeerLost { rank, .. } => Some(*rank),
        _ => None,
    }
}

/// Returns the failure of another rank, which the rank itself or a neighbour reports.
pub(super) fn read_abort(frame: &[u8], scope: &SetScope) -> FrameFailure {
    let mut reader = FrameReader(frame);
    let mut read = || -> Result<StopCause, MalformedFrame> {
        let rank = Rank(reader.read_u32()?);
        let text = reader.read_text()?.to_owned();
        Ok(StopCause::Reported { rank, host: scope.host_name(rank), text })
    };
    read().map_or_else(FrameFailure::Malformed, FrameFailure::Cause)
}

/// Notifies all neighbours that this or another rank failed.
pub(super) fn send_abort(scope: &SetScope, links: &mut ControlLinks, cause: &StopCause) {
    let mut frame = Vec::new();
    let mut writer = FrameWriter(&mut frame);
    let mut kind = frame_kinds::RANK_ABORT;
    match cause {
        StopCause::Disagreement { text } => {
            kind = frame_kinds::GROUP_DISAGREEMENT;
            writer.write_text(text);
        }
        StopCause::Reported { rank, text, .. } => {
            writer.write_varint(rank.0.into());
            writer.write_text(text);
        }
        other => {
            writer.write_varint(scope.context.world.rank.0.into());
            writer.write_text(&other.to_string());
        }
    }
    links.send_final_frame(kind, &frame);
}
