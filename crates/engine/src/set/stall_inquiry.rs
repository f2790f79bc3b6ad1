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

use farandole_negotiation::{FastHashMap, FrameReader, FrameWriter, MalformedFrame};
use farandole_world::{ProcessSetId, Rank};

use super::{FrameFailure, ProcessSet, StepResult, frame_kinds};
use crate::StopCause;
use crate::stall_report::{
    MAX_NAMED_TENSORS, MissingRank, RankWait, STACK_TIMEOUT, StackAnswer, StackAnswerSlot,
    StallReport, StalledTensor, ThreadStacks,
};

/// Longest time that the coordinator waits for answers: the time for the stacks, plus the way
/// through the tree.
const ANSWER_TIMEOUT: Duration = STACK_TIMEOUT.saturating_add(Duration::from_secs(1));
/// Largest number of missing ranks that are asked. Mostly one is enough, because all of them are
/// doing the same.
const MAX_RANKS_ASKED: usize = 16;
/// Largest size in bytes of a stack in an answer.
const MAX_STACK_BYTES: usize = 8 << 10;

/// A tensor that has waited too long.
pub(super) struct ConfirmedStall {
    pub(super) since: Instant,
    pub(super) submitters: Vec<u32>,
    /// Name of the operation in reports.
    pub(super) operation: String,
    /// Whether the operation moves no data, so that its submitters only wait for it.
    pub(super) moves_no_data: bool,
}

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
    stalled: FastHashMap<Arc<str>, ConfirmedStall>,
    /// Earliest time of the next report.
    next: Option<Instant>,
    number: u64,
    inquiry: Option<StallInquiry>,
    question: Option<StackQuestion>,
    /// Number of lists executed, and the time when this number was first seen.
    lists: Option<(u64, Instant)>,
}

impl StallInquiries {
    /// Forgets a tensor that is complete.
    pub(super) fn forget_tensor(&mut self, name: &str) {
        if !self.stalled.is_empty() {
            self.stalled.remove(name);
        }
    }

    pub(super) fn add_stall(&mut self, name: &Arc<str>, stalled: ConfirmedStall) {
        self.stalled.insert(Arc::clone(name), stalled);
    }

    /// Records the number of lists that have been executed.
    pub(super) fn note_executed_lists(&mut self, lists: u64, now: Instant) {
        if self.lists.is_none_or(|(known, _)| known != lists) {
            self.lists = Some((lists, now));
        }
    }
}

impl ProcessSet {
    /// Reports stalled operations, or first asks the missing ranks, if it is time.
    pub(super) fn advance_stall_inquiry(&mut self, now: Instant) -> StepResult {
        if let Some(inquiry) = self.inquiries.inquiry.take() {
            if !inquiry.is_answered() && now < inquiry.due {
                self.inquiries.inquiry = Some(inquiry);
                return Ok(());
            }
            let absentees = inquiry.absentees.into_iter().map(|(_, absentee)| absentee).collect();
            return self.report_stalls(absentees, now);
        }
        let Some(limit) = self.options.settings.stall_check else { return Ok(()) };
        if self.inquiries.stalled.is_empty() || self.departure.is_some() {
            return Ok(());
        }
        let oldest =
            self.inquiries.stalled.values().map(|stalled| stalled.since).min().unwrap_or(now);
        let waiting = now.saturating_duration_since(oldest);
        // A stall that ends the engine does not wait for the next interval.
        let fatal = self.options.settings.stall_shutdown.is_some_and(|limit| waiting >= limit);
        let early = self.inquiries.next.is_some_and(|next| now < next);
        if waiting < limit || (early && !fatal) {
            return Ok(());
        }
        self.inquiries.next = Some(now + limit);
        self.ask_missing_ranks(now)
    }

    fn ask_missing_ranks(&mut self, now: Instant) -> StepResult {
        let mut targets: Vec<u32> = (0u32..).take(self.members.len()).collect();
        targets.retain(|member| {
            self.inquiries.stalled.values().any(|stalled| !stalled.submitters.contains(member))
        });
        targets.truncate(MAX_RANKS_ASKED);
        self.inquiries.number += 1;
        let number = self.inquiries.number;
        let unanswered = |member: &u32| {
            let rank = self.members[*member as usize];
            let host = self.options.host_name(rank);
            (*member, MissingRank { rank, host, waits: None, stack: ThreadStacks::NoAnswer })
        };
        let absentees = targets.iter().map(unanswered).collect();
        self.inquiries.inquiry =
            Some(StallInquiry { number, due: now + ANSWER_TIMEOUT, absentees });
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_varint(number);
        writer.write_varints(targets.iter().map(|member| u64::from(*member)));
        self.send_to_children(frame_kinds::STALL_QUERY, &frame)?;
        if targets.contains(&self.tree.me) {
            self.begin_stack_question(number, now);
        }
        Ok(())
    }

    pub(super) fn on_stall_query(
        &mut self,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        self.send_to_children(frame_kinds::STALL_QUERY, frame)?;
        let mut reader = FrameReader(frame);
        let number = reader.read_varint()?;
        if self.read_members(&mut reader)?.contains(&self.tree.me) {
            self.begin_stack_question(number, now);
        }
        Ok(())
    }

    fn begin_stack_question(&mut self, number: u64, now: Instant) {
        let (answer, slot) = StackAnswer::new();
        self.inquiries.question = Some(StackQuestion { number, due: now + STACK_TIMEOUT, slot });
        self.options.observer.request_thread_stacks(answer);
    }

    /// Returns the number of a query that can be answered now, and the stacks of the threads.
    fn take_answerable_question(&mut self, now: Instant) -> Option<(u64, ThreadStacks)> {
        let question = self.inquiries.question.as_ref()?;
        let stack = question
            .slot
            .current_answer()
            .or((now >= question.due).then_some(ThreadStacks::NoAnswer))?;
        self.inquiries.question.take().map(|question| (question.number, stack))
    }

    /// Returns the operations in this set that this process waits for.
    fn own_waited_operations(&self, now: Instant) -> impl Iterator<Item = RankWait> {
        let set = self.watch.set;
        self.local
            .values()
            .chain(self.joins.own_join())
            .chain(self.execution.pending_entries())
            .map(move |entry| RankWait {
                operation: match set {
                    ProcessSetId::GLOBAL => entry.operation_text(),
                    set => format!("{} (process set {set})", entry.operation_text()),
                },
                moves_no_data: entry.moves_no_data(),
                since: now.saturating_duration_since(entry.since),
            })
    }

    fn send_stall_answer(
        &mut self,
        number: u64,
        stack: &ThreadStacks,
        waits: &[RankWait],
    ) -> StepResult {
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_varint(number);
        writer.write_varint(self.tree.me.into());
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
        match self.on_stall_answer(&frame) {
            Err(FrameFailure::Cause(cause)) => Err(cause),
            // This member wrote the frame, so it cannot be malformed.
            Err(FrameFailure::Malformed(_)) | Ok(()) => Ok(()),
        }
    }

    pub(super) fn on_stall_answer(&mut self, frame: &[u8]) -> Result<(), FrameFailure> {
        if !self.is_coordinator() {
            return Ok(self.send_frame(0, frame_kinds::STALL_ANSWER, frame)?);
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
            self.inquiries.inquiry.as_mut().filter(|inquiry| inquiry.number == number)
            && let Some((_, absentee)) =
                inquiry.absentees.iter_mut().find(|(known, _)| *known == member)
        {
            absentee.stack = stack;
            absentee.waits = Some(waits);
        }
        Ok(())
    }

    fn report_stalls(&mut self, absentees: Vec<MissingRank>, now: Instant) -> StepResult {
        let settings = Arc::clone(&self.options.settings);
        let Some(limit) = settings.stall_check else { return Ok(()) };
        let mut stalls: Vec<StalledTensor> = Vec::new();
        for (name, stalled) in &self.inquiries.stalled {
            let waiting = now.saturating_duration_since(stalled.since);
            stalls.push(StalledTensor {
                tensor: Arc::clone(name),
                operation: stalled.operation.clone(),
                moves_no_data: stalled.moves_no_data,
                waiting,
                submitters: stalled
                    .submitters
                    .iter()
                    .map(|member| self.members[*member as usize])
                    .collect(),
                missing: self.missing_ranks(&stalled.submitters),
                fatal: settings.stall_shutdown.is_some_and(|limit| waiting >= limit),
            });
        }
        // All tensors may have become complete during the inquiry.
        let Some(_) = stalls.first() else { return Ok(()) };
        stalls.sort_by(|one, two| {
            two.waiting.cmp(&one.waiting).then_with(|| one.tensor.cmp(&two.tensor))
        });
        let parted = self.deadlock_duration(&stalls, &absentees, now);
        let ends = settings.barrier_deadlock_timeout;
        let report = StallReport {
            set: self.watch.set,
            limit,
            stalls,
            absentees,
            deadlocked_for: parted,
            deadlock_limit: ends,
        };
        self.options.observer.on_stall(&report);
        if let (Some(parted), Some(ends)) = (parted, ends)
            && parted >= ends
        {
            return Err(StopCause::Disagreement { text: report.deadlock_text(parted) });
        }
        match (report.stalls.into_iter().find(|stall| stall.fatal), settings.stall_shutdown) {
            (Some(stall), Some(limit)) => Err(StopCause::Deadline {
                operation: self
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
        stalls: &[StalledTensor],
        absentees: &[MissingRank],
        now: Instant,
    ) -> Option<Duration> {
        let still = now.saturating_duration_since(self.inquiries.lists?.1);
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
        let shortest = self.members.iter().map(in_meeting).min()??;
        // A list that was executed shows that some ranks still make progress.
        stalls.iter().any(|stall| stall.moves_no_data).then_some(shortest.min(still))
    }

    /// Returns the ranks that are not among these members.
    pub(super) fn missing_ranks(&self, submitters: &[u32]) -> Vec<Rank> {
        (0u32..)
            .zip(&self.members)
            .filter(|(member, _)| !submitters.contains(member))
            .map(|(_, rank)| *rank)
            .collect()
    }
}

/// Answers queries of other ranks about this process, if the stacks are there or have timed out.
pub(crate) fn answer_stall_queries(sets: &mut [ProcessSet], now: Instant) -> StepResult {
    for index in 0..sets.len() {
        let Some((number, stack)) = sets[index].take_answerable_question(now) else { continue };
        let mut waits: Vec<RankWait> =
            sets.iter().flat_map(|set| set.own_waited_operations(now)).collect();
        waits.sort_by_key(|wait| std::cmp::Reverse(wait.since));
        waits.truncate(MAX_NAMED_TENSORS);
        sets[index].send_stall_answer(number, &stack, &waits)?;
    }
    Ok(())
}
