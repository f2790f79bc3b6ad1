// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations that take too long.
//!
//! Only the members below a node are known to it, so a node that holds an incomplete tensor for too
//! long reports the ranks that have submitted it to its parent. The coordinator combines the
//! reports and sends them to all ranks, so that the error of a deadline can name the missing ranks.
//! [`inquiry`](super::inquiry) makes the report of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_world::{ProcessSetId, Rank};

use super::inquiry::Stalled;
use super::join::JOIN;
use super::{ProcessSet, Step, Stop, kind};
use crate::hash::Map;
use crate::wire::{Malformed, Reader, Writer};
use crate::{Cause, Settings};

/// Longest time the coordinator waits for the answers of others.
const COLLECT: Duration = Duration::from_secs(1);

/// A stalled tensor at the coordinator.
struct Case {
    /// Time at which the first rank submitted it, as far as known.
    since: Instant,
    due: Instant,
    came: Vec<u32>,
    /// As reports name it.
    what: String,
    /// Whether the ranks that have submitted it do nothing else meanwhile.
    meeting: bool,
}

/// A member's report of a tensor that waits too long.
struct Told {
    name: Arc<str>,
    what: String,
    meeting: bool,
    since: Instant,
    came: Vec<u32>,
}

pub(super) struct Watch {
    pub(super) set: ProcessSetId,
    /// Age at which a tensor is asked about.
    patience: Duration,
    cases: Map<Arc<str>, Case>,
}

impl Watch {
    pub(super) fn new(set: ProcessSetId, settings: &Settings) -> Self {
        let halves =
            [Some(settings.collective_timeout / 2), settings.stall_shutdown.map(|time| time / 2)];
        let times = halves.into_iter().chain([settings.stall_check]).flatten();
        Self { set, patience: times.min().unwrap_or(Duration::MAX), cases: Map::default() }
    }

    /// The tensor is complete.
    pub(super) fn forget(&mut self, name: &str) {
        if !self.cases.is_empty() {
            self.cases.remove(name);
        }
    }

    fn answer(&mut self, told: Told, now: Instant) {
        let Told { name, what, meeting, since, came } = told;
        let due = now + COLLECT.min(self.patience / 4);
        let new = || Case { since, due, came: Vec::new(), what, meeting };
        let case = self.cases.entry(name).or_insert_with(new);
        case.since = case.since.min(since);
        case.came.extend(came);
    }
}

impl ProcessSet {
    /// Looks at the clock: call it now and then while anything is pending.
    pub(crate) fn tick(&mut self, now: Instant) -> Step {
        self.inquiries.look(self.lists, now);
        self.ask(now)?;
        let due: Vec<Arc<str>> = self
            .watch
            .cases
            .iter()
            .filter(|(_, case)| case.due <= now)
            .map(|(name, _)| Arc::clone(name))
            .collect();
        for name in due {
            if let Some(case) = self.watch.cases.remove(&name) {
                self.close_case(&name, case)?;
            }
        }
        self.inquire(now)?;
        self.check_deadlines(now)
    }

    fn ask(&mut self, now: Instant) -> Step {
        let patience = self.watch.patience;
        let mut asked = Vec::new();
        for (name, tally) in &mut self.pending {
            let last = tally.reported.unwrap_or(tally.since);
            if now.saturating_duration_since(last) >= patience {
                tally.reported = Some(now);
                asked.push((
                    Arc::clone(name),
                    tally.what(name),
                    tally.since,
                    tally.sources.clone(),
                ));
            }
        }
        if self.is_coordinator()
            && let Some(since) = self.joins.overdue(now, patience)
        {
            let (name, what, came) =
                (Arc::from(JOIN), "join".to_owned(), self.joins.members().collect());
            self.watch.answer(Told { name, what, meeting: true, since, came }, now);
        }
        for (name, (what, meeting), since, sources) in asked {
            let came: Vec<u32> =
                sources.iter().flat_map(|source| self.stands_for(*source)).collect();
            if self.is_coordinator() {
                self.watch.answer(Told { name, what, meeting, since, came }, now);
                continue;
            }
            let mut frame = Vec::new();
            let mut writer = Writer(&mut frame);
            writer.text(&name);
            writer.text(&what);
            writer.byte(meeting.into());
            let age = now.saturating_duration_since(since).as_millis();
            writer.number(u64::try_from(age).unwrap_or(u64::MAX));
            writer.numbers(came.iter().map(|member| u64::from(*member)));
            self.send(0, kind::CAME, &frame)?;
        }
        Ok(())
    }

    /// Members a source of tallies stands for.
    pub(super) fn stands_for(&self, source: u32) -> Vec<u32> {
        match (source as usize).checked_sub(1) {
            None => vec![self.tree.me],
            Some(child) => self.tree.below[child].clone(),
        }
    }

    pub(super) fn on_came(&mut self, frame: &[u8], now: Instant) -> Result<(), Stop> {
        if !self.is_coordinator() {
            return Ok(self.send(0, kind::CAME, frame)?);
        }
        let mut reader = Reader(frame);
        let (name, what) = (Arc::from(reader.text()?), reader.text()?.to_owned());
        let meeting = reader.byte()? != 0;
        let age = Duration::from_millis(reader.number()?);
        let came = self.read_members(&mut reader)?;
        let since = now.checked_sub(age).unwrap_or(now);
        self.watch.answer(Told { name, what, meeting, since, came }, now);
        Ok(())
    }

    pub(super) fn read_members(&self, reader: &mut Reader<'_>) -> Result<Vec<u32>, Malformed> {
        let size = self.members.len() as u64;
        let member = |number: u64| {
            u32::try_from(number).ok().filter(|_| number < size).ok_or(Malformed::Member(number))
        };
        reader.numbers()?.into_iter().map(member).collect()
    }

    fn close_case(&mut self, name: &Arc<str>, mut case: Case) -> Step {
        if let Some(tally) = self.pending.get(name) {
            let sources = tally.sources.clone();
            case.came.extend(sources.iter().flat_map(|source| self.stands_for(*source)));
        }
        // No rank waits for those that have joined.
        case.came.extend(self.joins.members());
        case.came.sort_unstable();
        case.came.dedup();
        let mut frame = Vec::new();
        let mut writer = Writer(&mut frame);
        writer.text(name);
        writer.numbers(case.came.iter().map(|member| u64::from(*member)));
        let missing = self.missing(&case.came);
        self.note_missing(name, missing);
        let Case { since, came, what, meeting, .. } = case;
        self.inquiries.add(name, Stalled { since, came, what, meeting });
        self.send_down(kind::STALLED, &frame)
    }

    pub(super) fn on_stalled(&mut self, frame: &[u8]) -> Result<(), Stop> {
        self.send_down(kind::STALLED, frame)?;
        let mut reader = Reader(frame);
        let name = reader.text()?;
        let came = self.read_members(&mut reader)?;
        let missing = self.missing(&came);
        self.note_missing(name, missing);
        Ok(())
    }

    fn note_missing(&mut self, name: &str, missing: Vec<Rank>) {
        match self.local.get_mut(name) {
            Some(entry) => entry.missing = Some(missing),
            None if name == JOIN => self.joins.miss(missing),
            None => {}
        }
    }

    fn check_deadlines(&self, now: Instant) -> Step {
        let limit = self.options.settings.collective_timeout;
        let waiting = self.local.values().chain(self.joins.own()).min_by_key(|entry| entry.since);
        let running = self.execution.oldest();
        let known = waiting.map(|entry| (entry, Some(entry.missing.clone().unwrap_or_default())));
        for (entry, missing) in known.into_iter().chain(running.map(|entry| (entry, None))) {
            let elapsed = now.saturating_duration_since(entry.since);
            if elapsed >= limit {
                let tensor = Arc::clone(&entry.name);
                return Err(Cause::Deadline {
                    operation: entry.operation,
                    tensor,
                    elapsed,
                    limit,
                    missing,
                });
            }
        }
        Ok(())
    }
}
