// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stall report: the coordinator collects stalled operations, asks the missing ranks, and
//! reports once per interval.
//!
//! `QUERY` (number, members) goes down to all; a member that is asked finds out what its process
//! waits in and what its threads do, without waiting for either, and an `ANSWER` (number, member,
//! stack, waits) goes up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_world::{ProcessSetId, Rank};

use super::{ProcessSet, Step, Stop, kind};
use crate::Cause;
use crate::hash::Map;
use crate::stall::{Absentee, Answer, NAMED, STACK_LIMIT, Slot, Stack, Stall, StallReport, Wait};
use crate::wire::{Malformed, Reader, Writer};

/// Time for which the coordinator waits for answers: that of a process, and its way through the
/// tree.
const ANSWERS: Duration = STACK_LIMIT.saturating_add(Duration::from_secs(1));
/// Missing ranks that are asked: one tells most of the time what all do.
const ASKED: usize = 16;
/// Bytes of a stack that travel.
const STACK_BYTES: usize = 8 << 10;

/// A tensor that waits for too long.
pub(super) struct Stalled {
    pub(super) since: Instant,
    pub(super) came: Vec<u32>,
    /// As reports name it.
    pub(super) what: String,
    /// Whether the ranks that have submitted it do nothing else meanwhile.
    pub(super) meeting: bool,
}

/// A question of the coordinator that waits for answers.
struct Inquiry {
    number: u64,
    due: Instant,
    absentees: Vec<(u32, Absentee)>,
}

impl Inquiry {
    fn is_answered(&self) -> bool {
        self.absentees.iter().all(|(_, absentee)| absentee.waits.is_some())
    }
}

/// A question to this member.
struct Question {
    number: u64,
    due: Instant,
    slot: Arc<Slot>,
}

#[derive(Default)]
pub(super) struct Inquiries {
    stalled: Map<Arc<str>, Stalled>,
    /// Earliest time of the next report.
    next: Option<Instant>,
    number: u64,
    inquiry: Option<Inquiry>,
    question: Option<Question>,
    /// Lists executed, and when it was first seen to be so many.
    lists: Option<(u64, Instant)>,
}

impl Inquiries {
    /// The tensor is complete.
    pub(super) fn forget(&mut self, name: &str) {
        if !self.stalled.is_empty() {
            self.stalled.remove(name);
        }
    }

    pub(super) fn add(&mut self, name: &Arc<str>, stalled: Stalled) {
        self.stalled.insert(Arc::clone(name), stalled);
    }

    /// So many lists have been executed.
    pub(super) fn look(&mut self, lists: u64, now: Instant) {
        if self.lists.is_none_or(|(known, _)| known != lists) {
            self.lists = Some((lists, now));
        }
    }
}

impl ProcessSet {
    /// Reports stalled operations when it is time, or begins to ask the missing ranks.
    pub(super) fn inquire(&mut self, now: Instant) -> Step {
        if let Some(inquiry) = self.inquiries.inquiry.take() {
            if !inquiry.is_answered() && now < inquiry.due {
                self.inquiries.inquiry = Some(inquiry);
                return Ok(());
            }
            let absentees = inquiry.absentees.into_iter().map(|(_, absentee)| absentee).collect();
            return self.report(absentees, now);
        }
        let Some(limit) = self.options.settings.stall_check else { return Ok(()) };
        if self.inquiries.stalled.is_empty() || self.leaving.is_some() {
            return Ok(());
        }
        let oldest =
            self.inquiries.stalled.values().map(|stalled| stalled.since).min().unwrap_or(now);
        let waiting = now.saturating_duration_since(oldest);
        let fatal = self.options.settings.stall_shutdown.is_some_and(|limit| waiting >= limit);
        let early = self.inquiries.next.is_some_and(|next| now < next);
        if waiting < limit || (early && !fatal) {
            return Ok(());
        }
        self.inquiries.next = Some(now + limit);
        self.ask_missing(now)
    }

    fn ask_missing(&mut self, now: Instant) -> Step {
        let mut targets: Vec<u32> = (0u32..).take(self.members.len()).collect();
        targets.retain(|member| {
            self.inquiries.stalled.values().any(|stalled| !stalled.came.contains(member))
        });
        targets.truncate(ASKED);
        self.inquiries.number += 1;
        let number = self.inquiries.number;
        let unanswered = |member: &u32| {
            let rank = self.members[*member as usize];
            let host = self.options.host(rank);
            (*member, Absentee { rank, host, waits: None, stack: Stack::Silent })
        };
        let absentees = targets.iter().map(unanswered).collect();
        self.inquiries.inquiry = Some(Inquiry { number, due: now + ANSWERS, absentees });
        let mut frame = Vec::new();
        let mut writer = Writer(&mut frame);
        writer.number(number);
        writer.numbers(targets.iter().map(|member| u64::from(*member)));
        self.send_down(kind::QUERY, &frame)?;
        if targets.contains(&self.tree.me) {
            self.question(number, now);
        }
        Ok(())
    }

    pub(super) fn on_query(&mut self, frame: &[u8], now: Instant) -> Result<(), Stop> {
        self.send_down(kind::QUERY, frame)?;
        let mut reader = Reader(frame);
        let number = reader.number()?;
        if self.read_members(&mut reader)?.contains(&self.tree.me) {
            self.question(number, now);
        }
        Ok(())
    }

    fn question(&mut self, number: u64, now: Instant) {
        let (answer, slot) = Answer::new();
        self.inquiries.question = Some(Question { number, due: now + STACK_LIMIT, slot });
        self.options.observer.describe(answer);
    }

    /// The number of a question that can be answered now, and what the threads do.
    fn answerable(&mut self, now: Instant) -> Option<(u64, Stack)> {
        let question = self.inquiries.question.as_ref()?;
        let stack = question.slot.answer().or((now >= question.due).then_some(Stack::Silent))?;
        self.inquiries.question.take().map(|question| (question.number, stack))
    }

    /// The waits of this process within this set.
    fn waits(&self, now: Instant) -> impl Iterator<Item = Wait> {
        let set = self.watch.set;
        self.local.values().chain(self.joins.own()).chain(self.execution.entries()).map(
            move |entry| Wait {
                what: match set {
                    ProcessSetId::GLOBAL => entry.what(),
                    set => format!("{} (process set {set})", entry.what()),
                },
                meeting: entry.is_meeting(),
                since: now.saturating_duration_since(entry.since),
            },
        )
    }

    fn answer(&mut self, number: u64, stack: &Stack, waits: &[Wait]) -> Step {
        let mut frame = Vec::new();
        let mut writer = Writer(&mut frame);
        writer.number(number);
        writer.number(self.tree.me.into());
        match stack {
            Stack::Unknown => writer.byte(0),
            Stack::Silent => writer.byte(1),
            Stack::Text(text) => {
                writer.byte(2);
                writer.text(&text[..text.floor_char_boundary(STACK_BYTES)]);
            }
        }
        writer.number(waits.len() as u64);
        for wait in waits {
            writer.text(&wait.what);
            writer.byte(wait.meeting.into());
            writer.number(u64::try_from(wait.since.as_millis()).unwrap_or(u64::MAX));
        }
        match self.on_answer(&frame) {
            Err(Stop::Cause(cause)) => Err(cause),
            Err(Stop::Malformed(_)) | Ok(()) => Ok(()),
        }
    }

    pub(super) fn on_answer(&mut self, frame: &[u8]) -> Result<(), Stop> {
        if !self.is_coordinator() {
            return Ok(self.send(0, kind::ANSWER, frame)?);
        }
        let mut reader = Reader(frame);
        let (number, member) = (reader.number()?, reader.small()?);
        let stack = match reader.byte()? {
            0 => Stack::Unknown,
            1 => Stack::Silent,
            2 => Stack::Text(reader.text()?.to_owned()),
            other => return Err(Malformed::Tag(other).into()),
        };
        let mut waits = Vec::new();
        for _ in 0..reader.count()? {
            let (what, meeting) = (reader.text()?.to_owned(), reader.byte()? != 0);
            waits.push(Wait { what, meeting, since: Duration::from_millis(reader.number()?) });
        }
        if let Some(inquiry) =
            self.inquiries.inquiry.as_mut().filter(|inquiry| inquiry.number == number)
            && let Some((_, absentee)) =
                inquiry.absentees.iter_mut().find(|(known, _)| *known == member)
        {
            absentee.stack = stack;
            absentee.waits = Some(waits);
        }
        Ok(())
    }

    fn report(&mut self, absentees: Vec<Absentee>, now: Instant) -> Step {
        let settings = Arc::clone(&self.options.settings);
        let Some(limit) = settings.stall_check else { return Ok(()) };
        let mut stalls: Vec<Stall> = Vec::new();
        for (name, stalled) in &self.inquiries.stalled {
            let waiting = now.saturating_duration_since(stalled.since);
            stalls.push(Stall {
                tensor: Arc::clone(name),
                what: stalled.what.clone(),
                meeting: stalled.meeting,
                waiting,
                came: stalled.came.iter().map(|member| self.members[*member as usize]).collect(),
                missing: self.missing(&stalled.came),
                fatal: settings.stall_shutdown.is_some_and(|limit| waiting >= limit),
            });
        }
        // All may have come while the missing were asked.
        let Some(_) = stalls.first() else { return Ok(()) };
        stalls.sort_by(|one, two| {
            two.waiting.cmp(&one.waiting).then_with(|| one.tensor.cmp(&two.tensor))
        });
        let parted = self.parted(&stalls, &absentees, now);
        let ends = settings.meeting_timeout;
        let report = StallReport { set: self.watch.set, limit, stalls, absentees, parted, ends };
        self.options.observer.stalled(&report);
        if let (Some(parted), Some(ends)) = (parted, ends)
            && parted >= ends
        {
            return Err(Cause::Disagreement { text: report.parting(parted) });
        }
        match (report.stalls.into_iter().find(|stall| stall.fatal), settings.stall_shutdown) {
            (Some(stall), Some(limit)) => Err(Cause::Deadline {
                operation: self
                    .pending
                    .get(&stall.tensor)
                    .and_then(|tally| tally.operation())
                    .unwrap_or("collective"),
                tensor: stall.tensor,
                elapsed: stall.waiting,
                limit,
                missing: Some(stall.missing),
            }),
            _ => Ok(()),
        }
    }

    /// For how long each member has been in a meeting that is not complete, while nothing was
    /// executed: only another thread of theirs could bring them together.
    fn parted(&self, stalls: &[Stall], absentees: &[Absentee], now: Instant) -> Option<Duration> {
        let still = now.saturating_duration_since(self.inquiries.lists?.1);
        let in_meeting = |rank: &Rank| {
            let here = stalls.iter().filter(|stall| stall.meeting && stall.came.contains(rank));
            let asked = absentees.iter().filter(|absentee| absentee.rank == *rank);
            let there = asked
                .flat_map(|absentee| absentee.waits.iter().flatten())
                .filter(|wait| wait.meeting);
            here.map(|stall| stall.waiting).chain(there.map(|wait| wait.since)).max()
        };
        let shortest = self.members.iter().map(in_meeting).min()??;
        stalls.iter().any(|stall| stall.meeting).then_some(shortest.min(still))
    }

    /// Ranks that are not among these members.
    pub(super) fn missing(&self, came: &[u32]) -> Vec<Rank> {
        (0u32..)
            .zip(&self.members)
            .filter(|(member, _)| !came.contains(member))
            .map(|(_, rank)| *rank)
            .collect()
    }
}

/// Answers what other ranks asked about this process, as far as that is possible now.
pub(crate) fn answer_questions(sets: &mut [ProcessSet], now: Instant) -> Step {
    for index in 0..sets.len() {
        let Some((number, stack)) = sets[index].answerable(now) else { continue };
        let mut waits: Vec<Wait> = sets.iter().flat_map(|set| set.waits(now)).collect();
        waits.sort_by_key(|wait| std::cmp::Reverse(wait.since));
        waits.truncate(NAMED);
        sets[index].answer(number, &stack, &waits)?;
    }
    Ok(())
}
