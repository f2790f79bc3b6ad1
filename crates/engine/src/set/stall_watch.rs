// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Stall watch: finds operations that take too long.
//!
//! A node knows only the members below it. If a tensor is incomplete there for too long, the node
//! reports the submitters to its parent. The coordinator combines the reports and sends them to all
//! ranks, so that a deadline error can name the missing ranks.
//! [`stall_inquiry`](super::stall_inquiry) turns the result into the stall report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_negotiation::{FastHashMap, FrameReader, FrameWriter, MalformedFrame};
use farandole_world::{ProcessSetId, Rank};

use super::join::JOIN_TENSOR_NAME;
use super::stall_inquiry::ConfirmedStall;
use super::{FrameFailure, ProcessSet, StepResult, frame_kinds};
use crate::{EngineSettings, StopCause};

/// Longest time that the coordinator collects the reports of other nodes.
const MAX_COLLECT_TIME: Duration = Duration::from_secs(1);

/// A stalled tensor at the coordinator.
struct StallCase {
    /// Earliest known submission by any rank.
    since: Instant,
    due: Instant,
    submitters: Vec<u32>,
    /// Name of the operation in reports.
    operation: String,
    /// Whether the operation moves no data, so that its submitters only wait for it.
    moves_no_data: bool,
}

/// A node's report of a tensor that has waited too long.
struct MemberStallReport {
    name: Arc<str>,
    operation: String,
    moves_no_data: bool,
    since: Instant,
    submitters: Vec<u32>,
}

pub(super) struct StallWatch {
    pub(super) set: ProcessSetId,
    /// Age at which a tensor is reported.
    report_age: Duration,
    cases: FastHashMap<Arc<str>, StallCase>,
}

impl StallWatch {
    pub(super) fn new(set: ProcessSetId, settings: &EngineSettings) -> Self {
        // Half of a limit leaves time to collect the missing ranks, so that the error can name
        // them.
        let halves =
            [Some(settings.collective_timeout / 2), settings.stall_shutdown.map(|time| time / 2)];
        let times = halves.into_iter().chain([settings.stall_check]).flatten();
        Self {
            set,
            report_age: times.min().unwrap_or(Duration::MAX),
            cases: FastHashMap::default(),
        }
    }

    /// Forgets a tensor that is complete.
    pub(super) fn forget_tensor(&mut self, name: &str) {
        if !self.cases.is_empty() {
            self.cases.remove(name);
        }
    }

    fn record_report(&mut self, report: MemberStallReport, now: Instant) {
        let MemberStallReport { name, operation, moves_no_data, since, submitters } = report;
        // Short limits need a shorter time, so that the report still comes before the limit.
        let due = now + MAX_COLLECT_TIME.min(self.report_age / 4);
        let new = || StallCase { since, due, submitters: Vec::new(), operation, moves_no_data };
        let case = self.cases.entry(name).or_insert_with(new);
        case.since = case.since.min(since);
        case.submitters.extend(submitters);
    }
}

impl ProcessSet {
    /// Checks all time limits. Call it regularly while anything is pending.
    pub(crate) fn check_stall_time_limits(&mut self, now: Instant) -> StepResult {
        self.inquiries.note_executed_lists(self.lists, now);
        self.report_overdue_tensors(now)?;
        let due: Vec<Arc<str>> = self
            .watch
            .cases
            .iter()
            .filter(|(_, case)| case.due <= now)
            .map(|(name, _)| Arc::clone(name))
            .collect();
        for name in due {
            if let Some(case) = self.watch.cases.remove(&name) {
                self.confirm_stalled_tensor(&name, case)?;
            }
        }
        self.advance_stall_inquiry(now)?;
        self.check_collective_timeout(now)
    }

    fn report_overdue_tensors(&mut self, now: Instant) -> StepResult {
        let report_age = self.watch.report_age;
        let mut asked = Vec::new();
        // Only incomplete tensors: what all ranks have submitted is no stall, even if another
        // operation delays it.
        for (name, tally) in &mut self.pending {
            let last = tally.reported.unwrap_or(tally.since);
            if now.saturating_duration_since(last) >= report_age {
                // Reported again after the same time, because more ranks may have submitted
                // meanwhile.
                tally.reported = Some(now);
                asked.push((
                    Arc::clone(name),
                    tally.operation_text(name),
                    tally.since,
                    tally.sources.clone(),
                ));
            }
        }
        if self.is_coordinator()
            && let Some(since) = self.joins.take_overdue_join_wait(now, report_age)
        {
            let (name, operation, submitters) = (
                Arc::from(JOIN_TENSOR_NAME),
                "join".to_owned(),
                self.joins.joined_members().collect(),
            );
            self.watch.record_report(
                MemberStallReport { name, operation, moves_no_data: true, since, submitters },
                now,
            );
        }
        for (name, (operation, moves_no_data), since, sources) in asked {
            let submitters: Vec<u32> =
                sources.iter().flat_map(|source| self.members_of_source(*source)).collect();
            if self.is_coordinator() {
                self.watch.record_report(
                    MemberStallReport { name, operation, moves_no_data, since, submitters },
                    now,
                );
                continue;
            }
            let mut frame = Vec::new();
            let mut writer = FrameWriter(&mut frame);
            writer.write_text(&name);
            writer.write_text(&operation);
            writer.write_byte(moves_no_data.into());
            // An age and not a time, because clocks of hosts differ.
            let age = now.saturating_duration_since(since).as_millis();
            writer.write_varint(u64::try_from(age).unwrap_or(u64::MAX));
            writer.write_varints(submitters.iter().map(|member| u64::from(*member)));
            self.send_frame(0, frame_kinds::STALL_SUBMITTERS, &frame)?;
        }
        Ok(())
    }

    /// Returns the members that a source of tallies stands for.
    pub(super) fn members_of_source(&self, source: u32) -> Vec<u32> {
        match (source as usize).checked_sub(1) {
            None => vec![self.tree.me],
            Some(child) => self.tree.below[child].clone(),
        }
    }

    pub(super) fn on_stall_submitters(
        &mut self,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        if !self.is_coordinator() {
            return Ok(self.send_frame(0, frame_kinds::STALL_SUBMITTERS, frame)?);
        }
        let mut reader = FrameReader(frame);
        let (name, operation) = (Arc::from(reader.read_text()?), reader.read_text()?.to_owned());
        let moves_no_data = reader.read_byte()? != 0;
        let age = Duration::from_millis(reader.read_varint()?);
        let submitters = self.read_members(&mut reader)?;
        let since = now.checked_sub(age).unwrap_or(now);
        self.watch.record_report(
            MemberStallReport { name, operation, moves_no_data, since, submitters },
            now,
        );
        Ok(())
    }

    pub(super) fn read_members(
        &self,
        reader: &mut FrameReader<'_>,
    ) -> Result<Vec<u32>, MalformedFrame> {
        let size = self.members.len() as u64;
        let member = |number: u64| {
            u32::try_from(number)
                .ok()
                .filter(|_| number < size)
                .ok_or(MalformedFrame::Member(number))
        };
        reader.read_varints()?.into_iter().map(member).collect()
    }

    fn confirm_stalled_tensor(&mut self, name: &Arc<str>, mut case: StallCase) -> StepResult {
        if let Some(tally) = self.pending.get(name) {
            let sources = tally.sources.clone();
            case.submitters
                .extend(sources.iter().flat_map(|source| self.members_of_source(*source)));
        }
        // Ranks that have joined are not missing.
        case.submitters.extend(self.joins.joined_members());
        case.submitters.sort_unstable();
        case.submitters.dedup();
        let mut frame = Vec::new();
        let mut writer = FrameWriter(&mut frame);
        writer.write_text(name);
        writer.write_varints(case.submitters.iter().map(|member| u64::from(*member)));
        let missing = self.missing_ranks(&case.submitters);
        self.note_missing_ranks(name, missing);
        let StallCase { since, submitters, operation, moves_no_data, .. } = case;
        self.inquiries
            .add_stall(name, ConfirmedStall { since, submitters, operation, moves_no_data });
        self.send_to_children(frame_kinds::STALL_STATUS, &frame)
    }

    pub(super) fn on_stall_status(&mut self, frame: &[u8]) -> Result<(), FrameFailure> {
        // Forwarded first, because members below have the longer way.
        self.send_to_children(frame_kinds::STALL_STATUS, frame)?;
        let mut reader = FrameReader(frame);
        let name = reader.read_text()?;
        let submitters = self.read_members(&mut reader)?;
        let missing = self.missing_ranks(&submitters);
        self.note_missing_ranks(name, missing);
        Ok(())
    }

    fn note_missing_ranks(&mut self, name: &str, missing: Vec<Rank>) {
        match self.local.get_mut(name) {
            Some(entry) => entry.missing = Some(missing),
            None if name == JOIN_TENSOR_NAME => self.joins.set_missing_ranks(missing),
            None => {}
        }
    }

    fn check_collective_timeout(&self, now: Instant) -> StepResult {
        let limit = self.options.settings.collective_timeout;
        let waiting =
            self.local.values().chain(self.joins.own_join()).min_by_key(|entry| entry.since);
        let running = self.execution.oldest_entry();
        // An empty list means that ranks are missing and that it is not known yet which ones.
        let known = waiting.map(|entry| (entry, Some(entry.missing.clone().unwrap_or_default())));
        for (entry, missing) in known.into_iter().chain(running.map(|entry| (entry, None))) {
            let elapsed = now.saturating_duration_since(entry.since);
            if elapsed >= limit {
                let tensor = Arc::clone(&entry.name);
                return Err(StopCause::Deadline {
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
