// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One process set, driven by polling. It uses no threads and no locks, and gets the time from its
//! caller. [`ProcessSet`] takes frames and requests, and passes them to the object whose state they
//! concern:
//!
//! ```text
//!  ControlLinks ─ frames ─> ProcessSet ─┬─> Negotiation: announcements ─> response lists
//!       ^                       ^       ├─> LocalRequests ─> BatchExecution: lists ─> results
//!       └──────── frames ───────┘       ├─> Departures: ranks that leave or are lost
//!                                       └─> Diagnostics: operations that take too long
//! ```

mod batch;
mod batch_execution;
mod control_links;
mod coordinator_decisions;
mod departure;
mod device_communicator;
mod diagnostics;
mod join;
mod local_requests;
mod negotiation;
mod operation_trace;
mod set_scope;
mod splits_exchange;
mod stall_cases;
mod stall_inquiry;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use batch::row_share;
pub use coordinator_decisions::max_lists_in_execution;
pub(crate) use local_requests::{FinishedRequest, PendingEntry};
pub(crate) use set_scope::ProcessSetContext;

use std::sync::Arc;
use std::time::Instant;

use farandole_negotiation::{
    CollectiveCall, ControlTree, FrameReader, MalformedFrame, RequestSignature, ResponseItem,
    ResponseList,
};

use self::batch_execution::BatchExecution;
use self::control_links::{ControlLinks, FrameFailure, frame_kinds};
use self::departure::{DepartureMessage, Departures, read_abort, send_abort};
use self::diagnostics::{
    Diagnostics, check_collective_timeout, on_stall_status, own_waited_operations,
};
use self::local_requests::LocalRequests;
use self::negotiation::Negotiation;
use self::set_scope::SetScope;
use crate::error::StepResult;
use crate::stall_report::{MAX_NAMED_TENSORS, RankWait};
use crate::{EngineStatistics, Error, ProcessSetOptions, Result, StopCause};

/// One process set on one rank.
pub(crate) struct ProcessSet {
    /// Identifies the set inside the engine.
    pub(crate) key: usize,
    scope: SetScope,
    links: ControlLinks,
    requests: LocalRequests,
    negotiation: Negotiation,
    execution: BatchExecution,
    departures: Departures,
    diagnostics: Diagnostics,
    /// Latest end of a removed set.
    retired: Option<Instant>,
    scratch: Vec<u8>,
}

impl ProcessSet {
    pub(crate) fn new(
        key: usize,
        options: ProcessSetOptions,
        context: ProcessSetContext,
    ) -> Result<Self> {
        let refuse = |reason: String| Error::Start { reason };
        let ProcessSetOptions { id, members, control, communicator } = options;
        let me = context.world.rank;
        // The positions are the member numbers on all ranks, and ranks are looked up by binary
        // search.
        if !members.is_sorted_by(|low, high| low < high) {
            return Err(refuse(format!(
                "members of process set {id} are not ascending: {members:?}"
            )));
        }
        let tree = ControlTree::new(&context.world, &members, me)
            .ok_or_else(|| refuse(format!("rank {me} is not in process set {id}")))?;
        let scope = SetScope { id, members, tree, context };
        let (size, member) = (communicator.member_count(), communicator.member_index());
        if (size, member) != (scope.members.len(), scope.own_index()) {
            return Err(refuse(format!(
                "process set {id} has another communicator: member {member} of {size}"
            )));
        }
        Ok(Self {
            key,
            links: ControlLinks::new(control, &scope)?,
            requests: LocalRequests::default(),
            negotiation: Negotiation::new(&scope),
            execution: BatchExecution::new(communicator),
            departures: Departures::default(),
            diagnostics: Diagnostics::new(&scope.context.settings),
            scope,
            retired: None,
            scratch: Vec::new(),
        })
    }

    /// Queues a request and announces it; the frame is sent in the next poll.
    pub(crate) fn enqueue_entry(
        &mut self,
        entry: PendingEntry,
        signature: RequestSignature,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        let Self { scope, negotiation, .. } = self;
        if let Some(cause) = self.departures.cause() {
            finished.push(entry.into_failed(cause));
            return Ok(());
        }
        if let CollectiveCall::Join { gather } = signature.call {
            self.requests.insert_join(entry);
            return negotiation.announce_own_join(scope, gather);
        }
        let (name, since) = (Arc::clone(&entry.name), entry.since);
        let announcement = negotiation.own_announcement(scope, &name, signature, &entry.rows);
        self.requests.insert_entry(entry);
        negotiation.record_announcement(scope, 0, &name, announcement, since)
    }

    /// Makes all progress that is possible without waiting. Returns whether anything moved.
    ///
    /// # Errors
    /// The cause for which the engine must stop.
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let mut moved = self.receive_frames(now, finished)?;
        // The second round executes the decisions of the first.
        for _ in 0..2 {
            moved |= self.emit_next_response_list(finished)?;
            moved |= self.send_complete_announcements()?;
            let (ran, loss) = self.execution.advance_batches(&self.scope, finished)?;
            if let Some(loss) = loss {
                self.departures.suspect_loss(loss, now);
            }
            moved |= ran;
            if !ran || !self.negotiation.has_decisions() {
                break;
            }
        }
        if let Err(loss) = self.links.flush_frames() {
            self.departures.suspect_loss(loss, now);
        }
        self.settle_departures(now, finished)?;
        Ok(moved)
    }

    /// Returns whether work is in progress that a poll could advance.
    pub(crate) fn is_busy(&self) -> bool {
        !self.requests.is_empty()
            || !self.execution.is_idle()
            || self.execution.has_device_work()
            || self.departures.is_unsettled()
            || self.links.has_queued_bytes()
    }

    /// Returns whether this set waits for a device, whose end of work wakes no thread.
    pub(crate) fn waits_for_device(&self) -> bool {
        self.execution.waits_for_device()
    }

    pub(crate) fn statistics(&self) -> EngineStatistics {
        EngineStatistics {
            frames_sent: self.links.frames_sent,
            frames_received: self.links.frames_received,
            lists: self.negotiation.lists,
            operations: self.execution.operations,
            tensors: self.execution.tensors,
            cache_hits: self.negotiation.cache_hits,
        }
    }

    fn receive_frames(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        let mut frame = std::mem::take(&mut self.scratch);
        let mut moved = false;
        for index in 0..self.links.count() {
            loop {
                let kind = match self.links.receive_frame(index, &mut frame) {
                    Ok(Some(kind)) => kind,
                    Ok(None) => break,
                    Err(loss) => {
                        self.departures.suspect_loss(loss, now);
                        break;
                    }
                };
                moved = true;
                self.dispatch_frame(index, kind, &frame, now, finished).map_err(
                    |stop| match stop {
                        FrameFailure::Cause(cause) => cause,
                        FrameFailure::Malformed(malformed) => StopCause::Protocol {
                            rank: self.links.peer_rank(index),
                            reason: malformed.to_string(),
                        },
                    },
                )?;
            }
        }
        self.scratch = frame;
        Ok(moved)
    }

    fn dispatch_frame(
        &mut self,
        from: usize,
        kind: u8,
        frame: &[u8],
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> Result<(), FrameFailure> {
        let Self { scope, links, requests, negotiation, diagnostics, departures, .. } = self;
        match kind {
            frame_kinds::TENSOR_ANNOUNCEMENT => {
                negotiation.receive_announcement(scope, links.child_position(from), frame, now)
            }
            frame_kinds::RESPONSE_LIST => {
                // Forward the list to the children first, because they have the longer way.
                links.send_to_children(kind, frame)?;
                let list = negotiation.receive_list(frame)?;
                Ok(self.apply_list(list, finished)?)
            }
            frame_kinds::RANK_DEPARTURE => {
                let message = DepartureMessage::decode_from(frame, scope)?;
                // Only news is passed on, so that the message does not circulate for ever.
                if self.record_departure(&message, finished) {
                    self.links.send_to_all_except(Some(from), kind, frame)?;
                }
                Ok(())
            }
            frame_kinds::RANK_ABORT => Err(read_abort(frame, scope)),
            frame_kinds::GROUP_DISAGREEMENT => {
                let text = FrameReader(frame).read_text()?.to_owned();
                Err(StopCause::Disagreement { text }.into())
            }
            frame_kinds::STALL_SUBMITTERS => {
                diagnostics.on_stall_submitters(scope, links, negotiation, frame, now)
            }
            frame_kinds::STALL_STATUS => on_stall_status(scope, links, requests, frame),
            frame_kinds::STALL_QUERY => {
                diagnostics.inquiries.on_stall_query(scope, links, frame, now)
            }
            frame_kinds::STALL_ANSWER => diagnostics.inquiries.on_stall_answer(scope, links, frame),
            frame_kinds::SUBTREE_DONE => {
                departures.count_done_subtree();
                Ok(())
            }
            frame_kinds::LINKS_CLEAR => Ok(departures.clear_links(links)?),
            other => Err(MalformedFrame::Tag(other).into()),
        }
    }

    /// Sends the next list if there are decisions and enough earlier lists are complete. Tensors
    /// that become ready meanwhile are fused.
    fn emit_next_response_list(&mut self, finished: &mut Vec<FinishedRequest>) -> StepResult<bool> {
        if !self.negotiation.has_decisions()
            || self.departures.cause().is_some()
            // Decisions collect until an earlier list is complete, and are then fused.
            || self.execution.unfinished_list_count()
                >= max_lists_in_execution(self.scope.tree.hosts)
        {
            return Ok(false);
        }
        let mut frame = std::mem::take(&mut self.scratch);
        frame.clear();
        let list = self.negotiation.plan_next_list(&self.scope, &self.requests, &mut frame);
        // Children first: the list has a longer way to them, and this member would only delay it.
        self.links.send_to_children(frame_kinds::RESPONSE_LIST, &frame)?;
        self.scratch = frame;
        self.apply_list(list, finished)?;
        Ok(true)
    }

    /// Sends all tensors that became complete since the last poll, in one frame.
    pub(crate) fn send_complete_announcements(&mut self) -> StepResult<bool> {
        let frame = &mut self.negotiation.upward_frame;
        if frame.is_empty() {
            return Ok(false);
        }
        self.links.send_to_parent(frame_kinds::TENSOR_ANNOUNCEMENT, frame)?;
        frame.clear();
        Ok(true)
    }

    /// Applies the items of a list, in the same order on all ranks.
    fn apply_list(
        &mut self,
        list: ResponseList,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        let Self { scope, requests, negotiation, execution, .. } = self;
        let ResponseList { number, items } = list;
        negotiation.begin_list(scope, number);
        if negotiation.joins.has_joined_members() {
            let now = Instant::now();
            negotiation.joins.restart_wait(now);
            requests.restart_join_wait(now);
        }
        scope.context.tracer.timeline.mark_cycle();
        if self.departures.cancels_list(number) {
            return Ok(());
        }
        for item in items {
            match item {
                ResponseItem::Run(tensors) => {
                    execution.queue_operation(scope, number, tensors, requests)?;
                }
                ResponseItem::Refuse(refusal) => {
                    negotiation.drop_refused_group(refusal.group);
                    requests.refuse_entries(scope, refusal, finished);
                }
                ResponseItem::Joined(last) => {
                    negotiation.joins = join::JoinState::default();
                    let last = scope.members.get(last as usize).copied();
                    requests.complete_join(last, finished);
                }
            }
        }
        Ok(())
    }

    /// Checks all time limits. Call it regularly while anything is pending.
    pub(crate) fn check_stall_time_limits(&mut self, now: Instant) -> StepResult {
        let Self { scope, links, requests, negotiation, execution, .. } = self;
        let is_departing = self.departures.cause().is_some();
        self.diagnostics.report_stalls(scope, links, negotiation, requests, is_departing, now)?;
        check_collective_timeout(scope, requests, execution, now)
    }

    /// Records a departure, and fails the requests that are in no list yet. Returns whether the
    /// neighbours must be notified.
    fn record_departure(
        &mut self,
        message: &DepartureMessage,
        finished: &mut Vec<FinishedRequest>,
    ) -> bool {
        if self.departures.cause().is_none() {
            self.negotiation.end_negotiation();
            self.requests.fail_entries(&message.cause, finished);
        }
        self.departures.record_departure(message)
    }

    /// Departs in order and fails the operations in progress. Poll with
    /// [`ProcessSet::advance_link_drain`] afterwards.
    pub(crate) fn begin_departure(
        &mut self,
        cause: &Arc<StopCause>,
        finished: &mut Vec<FinishedRequest>,
    ) {
        let rank = self.scope.context.world.rank;
        let executed = self.execution.oldest_list().map_or(self.negotiation.lists, |list| list - 1);
        let message = DepartureMessage { rank, executed, cause: Arc::clone(cause) };
        if self.record_departure(&message, finished) {
            let frame = message.encode(&self.scope);
            // A neighbour that cannot be reached needs no message.
            drop(self.links.send_to_all_except(None, frame_kinds::RANK_DEPARTURE, &frame));
        }
        self.execution.fail_batches(cause, finished);
    }

    /// Departs because the set is removed. The set ends when [`ProcessSet::is_retired_and_drained`]
    /// returns true, at the latest at `deadline`.
    pub(crate) fn retire_set(
        &mut self,
        cause: &Arc<StopCause>,
        deadline: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) {
        self.retired = Some(deadline);
        self.begin_departure(cause, finished);
    }

    /// Returns whether this set was removed and its links may close.
    pub(crate) fn is_retired_and_drained(&mut self, now: Instant) -> bool {
        self.retired.is_some_and(|deadline| now >= deadline || self.advance_link_drain(now))
    }

    /// Takes one step towards the end of all links. Returns whether they may close.
    pub(crate) fn advance_link_drain(&mut self, now: Instant) -> bool {
        let mut finished = Vec::new();
        let over = self
            .receive_frames(now, &mut finished)
            .and_then(|_| self.settle_departures(now, &mut finished))
            .is_err();
        let flushed = self.links.drain_queues();
        over || (flushed && self.departures.allows_close())
    }

    fn settle_departures(
        &mut self,
        now: Instant,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult {
        self.departures.settle(&self.scope, &mut self.links, &mut self.execution, now, finished)
    }

    /// Handles the direct report that a process is gone; see [`Departures::suspect_peer`].
    pub(crate) fn suspect_peer(&mut self, error: farandole_transport::Error, now: Instant) {
        self.departures.suspect_peer(&self.scope, &self.links, &self.execution, error, now);
    }

    /// Returns whether it is open if a lost peer departed in order.
    pub(crate) fn has_suspected_peer(&self) -> bool {
        self.departures.has_suspected_peer()
    }

    /// Returns the reason why this set refuses requests, if it does.
    pub(crate) fn departure_cause(&self) -> Option<&Arc<StopCause>> {
        self.departures.cause()
    }

    /// Notifies all neighbours that this or another rank failed.
    pub(crate) fn broadcast_abort(&mut self, cause: &StopCause) {
        send_abort(&self.scope, &mut self.links, cause);
    }

    /// Fails every request of this rank in this set. The communicators are closed first, so that
    /// they do not access buffers any more.
    pub(crate) fn fail_set(&mut self, cause: &Arc<StopCause>, finished: &mut Vec<FinishedRequest>) {
        self.execution.close_communicators();
        self.execution.fail_batches(cause, finished);
        self.negotiation.end_negotiation();
        self.requests.fail_entries(cause, finished);
        self.departures.forget_suspect();
    }
}

/// Answers queries of other ranks about this process, if the stacks are there or have timed out.
pub(crate) fn answer_stall_queries(sets: &mut [ProcessSet], now: Instant) -> StepResult {
    for index in 0..sets.len() {
        let Some((number, stack)) = sets[index].diagnostics.inquiries.take_answerable_question(now)
        else {
            continue;
        };
        let mut waits: Vec<RankWait> = sets
            .iter()
            .flat_map(|set| own_waited_operations(&set.scope, &set.requests, &set.execution, now))
            .collect();
        waits.sort_by_key(|wait| std::cmp::Reverse(wait.since));
        waits.truncate(MAX_NAMED_TENSORS);
        let ProcessSet { scope, links, diagnostics, .. } = &mut sets[index];
        diagnostics.inquiries.send_stall_answer(scope, links, (number, &stack), &waits)?;
    }
    Ok(())
}
