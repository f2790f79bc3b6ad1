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

use super::{FinishedRequest, FrameFailure, ProcessSet, StepResult, frame_kinds};
use crate::StopCause;

/// Longest time between the loss of a process on another host and the arrival of its departure
/// message.
const FAREWELL_GRACE_PERIOD: Duration = Duration::from_millis(20);

/// Departure of a rank: why the set refuses new requests, and the last list that it still executes.
pub(super) struct Departure {
    pub(super) cause: Arc<StopCause>,
    departed: Vec<Rank>,
    pub(super) executed: u64,
    /// Number of children whose subtrees are done.
    children_done: usize,
    done_sent: bool,
    /// Whether all ranks are done, so that links may close.
    cleared: bool,
}

impl ProcessSet {
    pub(super) fn on_departure(
        &mut self,
        from: usize,
        frame: &[u8],
        finished: &mut Vec<FinishedRequest>,
    ) -> Result<(), FrameFailure> {
        let mut reader = FrameReader(frame);
        let member = reader.read_u32()?;
        let executed = reader.read_varint()?;
        let rank =
            *self.members.get(member as usize).ok_or(MalformedFrame::Member(member.into()))?;
        let removed = reader.read_byte()? != 0;
        let cause = || match removed {
            true => StopCause::Removed { set: self.watch.set },
            false => StopCause::Departed { rank, host: self.options.host_name(rank) },
        };
        let cause = self.departure.is_none().then(|| Arc::new(cause()));
        // Only news is passed on, so that the message does not circulate for ever.
        if self.record_departure(cause, rank, executed, finished) {
            self.send_to_neighbours(Some(from), frame_kinds::RANK_DEPARTURE, frame)?;
        }
        Ok(())
    }

    /// Records a departure. Returns whether the neighbours must be notified.
    fn record_departure(
        &mut self,
        cause: Option<Arc<StopCause>>,
        rank: Rank,
        executed: u64,
        finished: &mut Vec<FinishedRequest>,
    ) -> bool {
        if let Some(cause) = &cause {
            self.coordinator.clear();
            self.pending.clear();
            self.fail_local_entries(cause, finished);
        }
        match (&mut self.departure, cause) {
            (Some(leaving), _) => {
                leaving.departed.push(rank);
                let is_less = executed < leaving.executed;
                // All ranks stop after the same list: the last one that all departing ranks have
                // executed.
                leaving.executed = leaving.executed.min(executed);
                is_less
            }
            (none, Some(cause)) => {
                let departed = vec![rank];
                *none = Some(Departure {
                    cause,
                    departed,
                    executed,
                    children_done: 0,
                    done_sent: false,
                    cleared: false,
                });
                true
            }
            (None, None) => false,
        }
    }

    /// Departs in order and fails the operations in progress. Poll with [`ProcessSet::drain_links`]
    /// afterwards.
    pub(crate) fn begin_departure(
        &mut self,
        cause: &Arc<StopCause>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        let executed = self.execution.oldest_list().map_or(self.lists, |list| list - 1);
        let rank = self.options.world.rank;
        let first = self.departure.is_none().then(|| Arc::clone(cause));
        if self.record_departure(first, rank, executed, finished) {
            let mut frame = Vec::new();
            let mut writer = FrameWriter(&mut frame);
            writer.write_varint(self.tree.me.into());
            writer.write_varint(executed);
            writer.write_byte(matches!(**cause, StopCause::Removed { .. }).into());
            // A neighbour that cannot be reached needs no message.
            drop(self.send_to_neighbours(None, frame_kinds::RANK_DEPARTURE, &frame));
        }
        self.execution.fail_batches(cause, finished);
    }

    /// Departs because the set is removed. The set ends when [`ProcessSet::is_retired_and_drained`]
    /// returns true, at the latest at `deadline`.
    pub(crate) fn retire_set(
        &mut self,
        cause: Arc<StopCause>,
        deadline: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) {
        self.retired = Some(deadline);
        self.begin_departure(&cause, finished);
    }

    /// Returns whether this set was removed and its links may close.
    pub(crate) fn is_retired_and_drained(&mut self, now: Instant) -> bool {
        self.retired.is_some_and(|deadline| now >= deadline || self.advance_link_drain(now))
    }

    pub(super) fn on_subtree_done_frame(&mut self) {
        if let Some(leaving) = &mut self.departure {
            leaving.children_done += 1;
        }
    }

    pub(super) fn on_links_clear_frame(&mut self) -> StepResult {
        if let Some(leaving) = &mut self.departure {
            leaving.cleared = true;
        }
        self.send_to_children(frame_kinds::LINKS_CLEAR, &[])
    }

    /// Takes one step towards the end of all links. Returns whether they may close.
    pub(crate) fn advance_link_drain(&mut self, now: Instant) -> bool {
        let mut finished = Vec::new();
        let over = self
            .receive_frames(now, &mut finished)
            .and_then(|_| self.settle_suspects_and_departure(now, &mut finished))
            .is_err();
        let flushed = self
            .neighbours
            .iter_mut()
            // A peer that is lost receives nothing any more, so there is nothing to wait for.
            .all(|neighbour| neighbour.closed || neighbour.sender.flush().unwrap_or(true));
        over || (flushed && self.departure.as_ref().is_none_or(|leaving| leaving.cleared))
    }

    /// Returns whether there is a departure that some ranks have not handled yet.
    pub(super) fn has_unsettled_departure(&self) -> bool {
        self.departure.as_ref().is_some_and(|leaving| !leaving.cleared)
    }

    pub(super) fn on_abort(&mut self, frame: &[u8]) -> Result<(), FrameFailure> {
        let mut reader = FrameReader(frame);
        let rank = Rank(reader.read_u32()?);
        let text = reader.read_text()?.to_owned();
        Err(StopCause::Reported { rank, host: self.options.host_name(rank), text }.into())
    }

    /// Notifies all neighbours that this or another rank failed. This includes neighbours that
    /// count as lost: if a connection is silent, its other end may not know of the failure yet.
    pub(crate) fn broadcast_abort(&mut self, cause: &StopCause) {
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
                writer.write_varint(self.options.world.rank.0.into());
                writer.write_text(&other.to_string());
            }
        }
        for neighbour in &mut self.neighbours {
            neighbour.sender.send_final_frame(kind, &frame);
        }
    }

    /// Fails every request of this rank in this set. The communicators are closed first, so that
    /// they do not access buffers any more.
    pub(crate) fn fail_set(&mut self, cause: &Arc<StopCause>, finished: &mut Vec<FinishedRequest>) {
        self.execution.close_communicators();
        self.execution.fail_batches(cause, finished);
        self.fail_local_entries(cause, finished);
        self.pending.clear();
        self.coordinator.clear();
        self.suspect = None;
    }

    fn fail_local_entries(&mut self, cause: &Arc<StopCause>, finished: &mut Vec<FinishedRequest>) {
        let joined = std::mem::take(&mut self.joins).into_own_join();
        for entry in self.local.drain().map(|(_, entry)| entry).chain(joined) {
            let result = Err(entry.failure_error(cause));
            finished.push(FinishedRequest { handle: entry.handle, name: entry.name, result });
        }
    }

    fn send_to_neighbours(&mut self, except: Option<usize>, kind: u8, frame: &[u8]) -> StepResult {
        for index in (0..self.neighbours.len()).filter(|index| Some(*index) != except) {
            self.send_frame(index, kind, frame)?;
        }
        Ok(())
    }

    /// Decides whether a lost link is a failure, and completes a departure.
    pub(super) fn settle_suspects_and_departure(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        if self.departure.is_none() && self.suspect.is_none() {
            return Ok(());
        }
        if let Some((at, cause)) = self.suspect.take()
            && !self.is_orderly_loss(&cause)
        {
            // Until then, an abort or a departure of another rank may explain the loss better.
            if now.saturating_duration_since(at) >= self.options.settings.loss_report_allowance {
                return Err(cause);
            }
            self.suspect = Some((at, cause));
        }
        let children = self.tree.children.len();
        let Some(leaving) = &mut self.departure else { return Ok(()) };
        let useful = self.execution.oldest_list().is_some_and(|list| list <= leaving.executed);
        if useful && !self.execution.broken {
            return Ok(());
        }
        self.execution.fail_batches(&leaving.cause, finished);
        // A rank that closed its links either did not wait or waited long enough.
        leaving.cleared |= self.neighbours.iter().any(|neighbour| neighbour.closed);
        if leaving.children_done < children || leaving.done_sent {
            return Ok(());
        }
        leaving.done_sent = true;
        if self.is_coordinator() {
            self.on_links_clear_frame()
        } else {
            self.send_frame(0, frame_kinds::SUBTREE_DONE, &[])
        }
    }

    /// Handles the direct report that a process is gone, which is more reliable than a lost link.
    /// If no departure message arrives soon, the loss is a failure.
    pub(crate) fn suspect_peer(&mut self, error: farandole_transport::Error, now: Instant) {
        let cause = StopCause::Transport(error);
        let concerns = lost_rank(&cause).is_none_or(|rank| self.members.contains(&rank));
        if concerns && !self.is_orderly_loss(&cause) {
            // If the process shares memory with this one, its last messages are already here: one
            // more poll of the links is enough. Over a connection they may still be in transit.
            let near = lost_rank(&cause).is_some_and(|rank| self.shares_memory_with(rank));
            let hearsay = self.options.settings.loss_report_allowance;
            let waited = if near { hearsay } else { hearsay.saturating_sub(FAREWELL_GRACE_PERIOD) };
            let since = now.checked_sub(waited).unwrap_or(now);
            if self.suspect.as_ref().is_none_or(|(at, _)| since < *at) {
                self.suspect = Some((since, cause));
            }
        }
    }

    /// Returns whether messages of a rank come through shared memory. Containers of one machine,
    /// and processes of one host, may or may not map the same segments, so this checks the kind of
    /// the link towards the rank.
    fn shares_memory_with(&self, rank: Rank) -> bool {
        let world = &self.options.world;
        let own = world.own_placement().host.machine_name();
        let together =
            world.seats.get(rank.index()).is_some_and(|seat| seat.host.machine_name() == own);
        let member =
            self.members.binary_search(&rank).ok().and_then(|member| u32::try_from(member).ok());
        let child = self
            .tree
            .below
            .iter()
            .position(|below| member.is_some_and(|member| below.contains(&member)));
        // The parent, if any, is the first neighbour.
        let toward = child.map_or(0, |child| child + usize::from(self.tree.parent.is_some()));
        together
            && self.neighbours.get(toward).is_some_and(|neighbour| neighbour.kind != LinkKind::Tcp)
    }

    /// Returns whether a lost rank has departed in order, or no operation is in progress that the
    /// loss could break.
    fn is_orderly_loss(&self, cause: &StopCause) -> bool {
        self.departure.as_ref().is_some_and(|leaving| {
            self.execution.is_idle()
                || lost_rank(cause).is_some_and(|rank| leaving.departed.contains(&rank))
        })
    }

    /// Returns whether it is open if a lost peer departed in order.
    pub(crate) fn has_suspected_peer(&self) -> bool {
        self.suspect.is_some()
    }

    /// Returns the reason why this set refuses requests, if it does.
    pub(crate) fn departure_cause(&self) -> Option<&Arc<StopCause>> {
        self.departure.as_ref().map(|leaving| &leaving.cause)
    }
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
