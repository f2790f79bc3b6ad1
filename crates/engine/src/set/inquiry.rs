// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The stall report: the coordinator collects what is stalled, asks those who are missing, and reports once per
//! interval.
//!
//! `QUERY` (number, members) goes down to all; a member that is asked finds out what its process waits in and what its
//! threads do, without waiting for either, and an `ANSWER` (number, member, stack, waits) goes up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_world::{ProcessSetId, Rank};

use super::{ProcessSet, Step, Stop, kind};
use crate::Cause;
use crate::hash::Map;
use crate::stall::{Absentee, Answer, NAMED, STACK_LIMIT, Slot, Stack, Stall, StallReport, Wait};
use crate::wire::{Malformed, Reader, Writer};

/// How long the coordinator waits for answers: that of a process, and its way through the tree.
const ANSWERS: Duration = STACK_LIMIT.saturating_add(Duration::from_secs(1));
/// Missing ranks that are asked: one tells most of the time what all do.
const ASKED: usize = 16;
/// Bytes of a stack that travel.
const STACK_BYTES: usize = 8 << 10;

/// A tensor that waits for too long.
struct Stalled {
    since: Instant,
    came: Vec<u32>,
}

/// What the coordinator awaits answers to.
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

/// What this member was asked.
struct Question {
    number: u64,
    due: Instant,
    slot: Arc<Slot>,
}

#[derive(Default)]
pub(super) struct Inquiries {
    stalled: Map<Arc<str>, Stalled>,
    /// When the next report may come.
    next: Option<Instant>,
    number: u64,
    inquiry: Option<Inquiry>,
    question: Option<Question>,
}

impl Inquiries {
    /// The tensor is complete.
    pub(super) fn forget(&mut self, name: &Arc<str>) {
        if !self.stalled.is_empty() {
            self.stalled.remove(name);
        }
    }

    pub(super) fn add(&mut self, name: &Arc<str>, since: Instant, came: Vec<u32>) {
        self.stalled.insert(Arc::clone(name), Stalled { since, came });
    }
}

impl ProcessSet {
    /// Reports what is stalled when it is time, or begins to ask those who are missing.
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
        let oldest = self.inquiries.stalled.values().map(|stalled| stalled.since).min().unwrap_or(now);
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
        targets
            .retain(|member| self.inquiries.stalled.values().any(|stalled| !stalled.came.contains(member)));
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

    /// What this process waits in within this set.
    fn waits(&self, now: Instant) -> impl Iterator<Item = Wait> {
        let set = self.watch.set;
        self.local.values().chain(self.execution.entries()).map(move |entry| Wait {
            tensor: match set {
                ProcessSetId::GLOBAL => entry.name.to_string(),
                set => format!("{} (process set {set})", entry.name),
            },
            since: now.saturating_duration_since(entry.since),
        })
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
            writer.text(&wait.tensor);
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
            let (tensor, since) = (reader.text()?.to_owned(), Duration::from_millis(reader.number()?));
            waits.push(Wait { tensor, since });
        }
        if let Some(inquiry) = self.inquiries.inquiry.as_mut().filter(|inquiry| inquiry.number == number)
            && let Some((_, absentee)) = inquiry.absentees.iter_mut().find(|(known, _)| *known == member)
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
                waiting,
                came: stalled.came.iter().map(|member| self.members[*member as usize]).collect(),
                missing: self.missing(&stalled.came),
                fatal: settings.stall_shutdown.is_some_and(|limit| waiting >= limit),
            });
        }
        // All may have come while the missing were asked.
        let Some(_) = stalls.first() else { return Ok(()) };
        stalls.sort_by(|one, two| two.waiting.cmp(&one.waiting).then_with(|| one.tensor.cmp(&two.tensor)));
        let report = StallReport { set: self.watch.set, limit, stalls, absentees };
        self.options.observer.stalled(&report);
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
