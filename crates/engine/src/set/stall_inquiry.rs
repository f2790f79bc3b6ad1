// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Stall inquiry: the coordinator collects stalled operations, asks the missing ranks, and reports
//! once per interval.
//!
//! `STALL_QUERY` (number, members) goes down to all. A member in the query requests the stacks of
//! its threads and continues without waiting for them. When they are there, or after a timeout, a
//! `STALL_ANSWER` (number, member, stack, waits) goes up, also with the operations that its process
//! waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_negotiation::{FrameReader, FrameWriter, MalformedFrame};
use farandole_world::Rank;

use super::control_links::{ControlLinks, FrameFailure, frame_kinds};
use super::negotiation::Negotiation;
use super::set_scope::SetScope;
use super::stall_cases::StallCases;
use crate::StopCause;
use crate::error::StepResult;
use crate::stall_report::{
    MissingRank, RankWait, STACK_TIMEOUT, StackAnswer, StackAnswerSlot, StallReport, StalledTensor,
    ThreadStacks,
};

/// Longest time that the coordinator waits for answers: the time for the stacks, plus the way
/// through the tree.
const ANSWER_TIMEOUT: Duration = STACK_TIMEOUT.saturating_add(Duration::from_secs(1));
/// Largest number of missing ranks that are asked. Mostly one is enough, because all of them are
/// doing the same.
const MAX_RANKS_ASKED: usize = 16;
/// Largest size in bytes of a stack in an answer.
const MAX_STACK_BYTES: usize = 8 << 10;

/// An inquiry of the coordinator that waits for answers.
struct StallInquiry {
    number: u64,
    due: Instant,
    absentees: Vec<(u32, MissingRank)>,
}

impl StallInquiry {
    fn is_answered(&self) -> bool {
        self.absentees.iter().all(|(_, absentee)| absentee.waits.is_some())
    }
}

/// A query to this member.
struct StackQuestion {
    number: u64,
    due: Instant,
    slot: Arc<StackAnswerSlot>,
}

#[derive(Default)]
pub(super) struct StallInquiries {
    /// Earliest time of the next report.
    next: Option<Instant>,
    number: u64,
    inquiry: Option<StallInquiry>,
    question: Option<StackQuestion>,
    /// Number of lists executed, and the time when this number was first seen.
    lists: Option<(u64, Instant)>,
}

impl StallInquiries {
    /// Records the number of lists that have been executed.
    pub(super) fn note_executed_lists(&mut self, lists: u64, now: Instant) {
        if self.lists.is_none_or(|(known, _)| known != lists) {
            self.lists = Some((lists, now));
        }
    }

    /// Reports stalled operations, or first asks the missing ranks, if it is time.
    ///
    /// # Errors
    /// The stall that ends the engine, if there is one.
    pub(super) fn advance_inquiry(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        negotiation: &Negotiation,
        is_departing: bool,
        now: Instant,
    ) -> StepResult {
        if let Some(inquiry) = self.inquiry.take_if(|open| open.is_answered() || now >= open.due) {
            let absentees = inquiry.absentees.into_iter().map(|(_, absentee)| absentee).collect();
            return self.report_stalls(scope, negotiation, absentees, now);
        }
        let settings = &scope.context.settings;
        let Some(limit) = settings.stall_check else { return Ok(()) };
        let oldest = negotiation.stalls.confirmed_cases().values().map(|stalled| stalled.since);
        let Some(oldest) = oldest.min().filter(|_| self.inquiry.is_none() && !is_departing) else {
            return Ok(());
        };
        let waiting = now.saturating_duration_since(oldest);
        // A stall that ends the engine does not wait for the next interval.
        let fatal = settings.stall_shutdown.is_some_and(|limit| waiting >= limit);
        let early = self.next.is_some_and(|next| now < next);
        if waiting < limit || (early && !fatal) {
            return Ok(());
        }
        self.next = Some(now + limit);
        self.ask_missing_ranks(scope, links, &negotiation.stalls, now)
    }

    fn ask_missing_ranks(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        stalls: &StallCases,
        now: Instant,
    ) -> StepResult {
        let mut targets: Vec<u32> = (0u32..).take(scope.members.len()).collect();
        targets.retain(|member| {
            stalls.confirmed_cases().values().any(|stalled| !stalled.submitters.contains(member))
        });
        targets.truncate(MAX_RANKS_ASKED);
        self.number += 1;
        let number = self.number;
        let unanswered = |member: &u32| {
            let rank = scope.members[*member as usize];
            let host = scope.host_name(rank);
            (*member, MissingRank { rank, host, waits: None, stack: ThreadStacks::NoAnswer })
        };
        let absentees = targets.iter().map(unanswered).collect();
        self.inquiry = Some(StallInquiry { number, due: now + ANSWER_TIMEOUT, absentees });
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_varint(number);
        writer.write_varints(targets.iter().map(|member| u64::from(*member)));
        links.send_to_children(frame_kinds::STALL_QUERY, &frame)?;
        if targets.contains(&scope.tree.me) {
            self.begin_stack_question(scope, number, now);
        }
        Ok(())
    }

    pub(super) fn on_stall_query(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        links.send_to_children(frame_kinds::STALL_QUERY, frame)?;
        let mut reader = FrameReader(frame);
        let number = reader.read_varint()?;
        if scope.read_members(&mut reader)?.contains(&scope.tree.me) {
            self.begin_stack_question(scope, number, now);
        }
        Ok(())
    }

    fn begin_stack_question(&mut self, scope: &SetScope, number: u64, now: Instant) {
        let (answer, slot) = StackAnswer::new();
        self.question = Some(StackQuestion { number, due: now + STACK_TIMEOUT, slot });
        scope.context.observer.request_thread_stacks(answer);
    }

    /// Returns the number of a query that can be answered now, and the stacks of the threads.
    pub(super) fn take_answerable_question(&mut self, now: Instant) -> Option<(u64, ThreadStacks)> {
        let question = self.question.as_ref()?;
        let stack = question
            .slot
            .current_answer()
            .or((now >= question.due).then_some(ThreadStacks::NoAnswer))?;
        self.question.take().map(|question| (question.number, stack))
    }

    /// Answers a query with the stacks of this process, and with its operations.
    pub(super) fn send_stall_answer(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        (number, stack): (u64, &ThreadStacks),
        waits: &[RankWait],
    ) -> StepResult {
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_varint(number);
        writer.write_varint(scope.tree.me.into());
        match stack {
            ThreadStacks::Unknown => writer.write_byte(0),
            ThreadStacks::NoAnswer => writer.write_byte(1),
            ThreadStacks::Text(text) => {
                writer.write_byte(2);
                writer.write_text(&text[..text.floor_char_boundary(MAX_STACK_BYTES)]);
            }
        }
        writer.write_varint(waits.len() as u64);
        for wait in waits {
            writer.write_text(&wait.operation);
            writer.write_byte(wait.moves_no_data.into());
            writer.write_varint(u64::try_from(wait.since.as_millis()).unwrap_or(u64::MAX));
        }
        match self.on_stall_answer(scope, links, &frame) {
            Err(FrameFailure::Cause(cause)) => Err(cause),
            // This member wrote the frame, so it cannot be malformed.
            Err(FrameFailure::Malformed(_)) | Ok(()) => Ok(()),
        }
    }

    pub(super) fn on_stall_answer(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        frame: &[u8],
    ) -> Result<(), FrameFailure> {
        if !scope.is_coordinator() {
            return Ok(links.send_to_parent(frame_kinds::STALL_ANSWER, frame)?);
        }
        let mut reader = FrameReader(frame);
        let (number, member) = (reader.read_varint()?, reader.read_u32()?);
        let stack = match reader.read_byte()? {
            0 => ThreadStacks::Unknown,
            1 => ThreadStacks::NoAnswer,
            2 => ThreadStacks::Text(reader.read_text()?.to_owned()),
            other => return Err(MalformedFrame::Tag(other).into()),
        };
        let mut waits = Vec::new();
        for _ in 0..reader.read_count()? {
            let (operation, moves_no_data) =
                (reader.read_text()?.to_owned(), reader.read_byte()? != 0);
            waits.push(RankWait {
                operation,
                moves_no_data,
                since: Duration::from_millis(reader.read_varint()?),
            });
        }
        if let Some(inquiry) =
            // A late answer may belong to an earlier inquiry.
            self.inquiry.as_mut().filter(|inquiry| inquiry.number == number)
            && let Some((_, absentee)) =
                inquiry.absentees.iter_mut().find(|(known, _)| *known == member)
        {
            absentee.stack = stack;
            absentee.waits = Some(waits);
        }
        Ok(())
    }

    fn report_stalls(
        &self,
        scope: &SetScope,
        negotiation: &Negotiation,
        absentees: Vec<MissingRank>,
        now: Instant,
    ) -> StepResult {
        let settings = &scope.context.settings;
        let Some(limit) = settings.stall_check else { return Ok(()) };
        let mut stalls: Vec<StalledTensor> = Vec::new();
        for (name, stalled) in negotiation.stalls.confirmed_cases() {
            let waiting = now.saturating_duration_since(stalled.since);
            let submitters = stalled.submitters.iter();
            stalls.push(StalledTensor {
                tensor: Arc::clone(name),
                operation: stalled.operation.clone(),
                moves_no_data: stalled.moves_no_data,
                waiting,
                submitters: submitters.map(|member| scope.members[*member as usize]).collect(),
                missing: scope.missing_ranks(&stalled.submitters),
                fatal: settings.stall_shutdown.is_some_and(|limit| waiting >= limit),
            });
        }
        // All tensors may have become complete during the inquiry.
        if stalls.is_empty() {
            return Ok(());
        }
        stalls.sort_by(|one, two| {
            two.waiting.cmp(&one.waiting).then_with(|| one.tensor.cmp(&two.tensor))
        });
        let parted = self.deadlock_duration(scope, &stalls, &absentees, now);
        let ends = settings.barrier_deadlock_timeout;
        let report = StallReport {
            set: scope.id,
            limit,
            stalls,
            absentees,
            deadlocked_for: parted,
            deadlock_limit: ends,
        };
        scope.context.observer.on_stall(&report);
        if let (Some(parted), Some(ends)) = (parted, ends)
            && parted >= ends
        {
            return Err(StopCause::Disagreement { text: report.deadlock_text(parted) });
        }
        match (report.stalls.into_iter().find(|stall| stall.fatal), settings.stall_shutdown) {
            (Some(stall), Some(limit)) => Err(StopCause::Deadline {
                operation: negotiation
                    .pending
                    .get(&stall.tensor)
                    .and_then(|tally| tally.operation_name())
                    .unwrap_or("collective"),
                tensor: stall.tensor,
                elapsed: stall.waiting,
                limit,
                missing: Some(stall.missing),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the time for which every member has waited in an incomplete operation without data,
    /// while no list was executed. Only another thread on these ranks could complete such
    /// operations.
    fn deadlock_duration(
        &self,
        scope: &SetScope,
        stalls: &[StalledTensor],
        absentees: &[MissingRank],
        now: Instant,
    ) -> Option<Duration> {
        let still = now.saturating_duration_since(self.lists?.1);
        let in_meeting = |rank: &Rank| {
            let here = stalls
                .iter()
                .filter(|stall| stall.moves_no_data && stall.submitters.contains(rank));
            let asked = absentees.iter().filter(|absentee| absentee.rank == *rank);
            let there = asked
                .flat_map(|absentee| absentee.waits.iter().flatten())
                .filter(|wait| wait.moves_no_data);
            here.map(|stall| stall.waiting).chain(there.map(|wait| wait.since)).max()
        };
        let shortest = scope.members.iter().map(in_meeting).min()??;
        // A list that was executed shows that some ranks still make progress.
        stalls.iter().any(|stall| stall.moves_no_data).then_some(shortest.min(still))
    }
}
