// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Diagnostics of a set: finds operations that take too long.
//!
//! A node knows only the members below it. If a tensor is incomplete there for too long, the node
//! reports the submitters to its parent. The coordinator combines the reports and sends them to all
//! ranks, so that a deadline error can name the missing ranks.
//! [`stall_inquiry`](super::stall_inquiry) turns the result into the stall report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_negotiation::{FrameReader, FrameWriter};
use farandole_world::ProcessSetId;

use super::batch_execution::BatchExecution;
use super::control_links::{ControlLinks, FrameFailure, frame_kinds};
use super::join::JOIN_TENSOR_NAME;
use super::local_requests::LocalRequests;
use super::negotiation::Negotiation;
use super::set_scope::SetScope;
use super::stall_cases::StallCase;
use super::stall_inquiry::StallInquiries;
use crate::error::StepResult;
use crate::stall_report::RankWait;
use crate::{EngineSettings, StopCause};

/// Longest time that the coordinator collects the reports of other nodes.
const MAX_COLLECT_TIME: Duration = Duration::from_secs(1);

pub(super) struct Diagnostics {
    /// Age at which a tensor is reported.
    report_age: Duration,
    pub(super) inquiries: StallInquiries,
}

impl Diagnostics {
    pub(super) fn new(settings: &EngineSettings) -> Self {
        // Half of a limit leaves time to collect the missing ranks, so that the error can name
        // them.
        let halves =
            [Some(settings.collective_timeout / 2), settings.stall_shutdown.map(|time| time / 2)];
        let times = halves.into_iter().chain([settings.stall_check]).flatten();
        Self {
            report_age: times.min().unwrap_or(Duration::MAX),
            inquiries: StallInquiries::default(),
        }
    }

    /// Reports tensors that have waited too long: to the parent, or to all ranks and the user if
    /// this is the coordinator.
    pub(super) fn report_stalls(
        &mut self,
        scope: &SetScope,
        links: &mut ControlLinks,
        negotiation: &mut Negotiation,
        requests: &mut LocalRequests,
        is_departing: bool,
        now: Instant,
    ) -> StepResult {
        self.inquiries.note_executed_lists(negotiation.lists, now);
        self.report_overdue_tensors(scope, links, negotiation, now)?;
        for (name, case) in negotiation.stalls.take_due_cases(now) {
            confirm_stall(scope, links, negotiation, requests, (name, case))?;
        }
        self.inquiries.advance_inquiry(scope, links, negotiation, is_departing, now)
    }

    fn report_overdue_tensors(
        &self,
        scope: &SetScope,
        links: &mut ControlLinks,
        negotiation: &mut Negotiation,
        now: Instant,
    ) -> StepResult {
        let Negotiation { pending, joins, .. } = negotiation;
        let mut overdue: Vec<(Arc<str>, StallCase)> = Vec::new();
        // Only incomplete tensors: what all ranks have submitted is no stall, even if another
        // operation delays it.
        for (name, tally) in pending {
            let last = tally.reported.unwrap_or(tally.since);
            if now.saturating_duration_since(last) >= self.report_age {
                // Reported again after the same time, because more ranks may have submitted
                // meanwhile.
                tally.reported = Some(now);
                let (operation, moves_no_data) = tally.operation_text(name);
                let submitters = scope.members_of_sources(&tally.sources).collect();
                let case = StallCase { since: tally.since, submitters, operation, moves_no_data };
                overdue.push((Arc::clone(name), case));
            }
        }
        if scope.is_coordinator() {
            if let Some(since) = joins.take_overdue_wait(now, self.report_age) {
                let submitters = joins.joined_members().collect();
                let operation = "join".to_owned();
                let case = StallCase { since, submitters, operation, moves_no_data: true };
                overdue.push((JOIN_TENSOR_NAME.into(), case));
            }
            for (name, case) in overdue {
                negotiation.stalls.add_report(name, case, self.collection_end(now));
            }
            return Ok(());
        }
        for (name, case) in overdue {
            let mut frame = Vec::new();
            let mut writer = FrameWriter(&mut frame);
            writer.write_text(&name);
            writer.write_text(&case.operation);
            writer.write_byte(case.moves_no_data.into());
            // An age and not a time, because clocks of hosts differ.
            let age = now.saturating_duration_since(case.since).as_millis();
            writer.write_varint(u64::try_from(age).unwrap_or(u64::MAX));
            writer.write_varints(case.submitters.iter().map(|member| u64::from(*member)));
            links.send_to_parent(frame_kinds::STALL_SUBMITTERS, &frame)?;
        }
        Ok(())
    }

    /// Returns the time until which the reports of other nodes are collected. Short limits need a
    /// shorter time, so that the report still comes before the limit.
    fn collection_end(&self, now: Instant) -> Instant {
        now + MAX_COLLECT_TIME.min(self.report_age / 4)
    }

    pub(super) fn on_stall_submitters(
        &self,
        scope: &SetScope,
        links: &mut ControlLinks,
        negotiation: &mut Negotiation,
        frame: &[u8],
        now: Instant,
    ) -> Result<(), FrameFailure> {
        if !scope.is_coordinator() {
            return Ok(links.send_to_parent(frame_kinds::STALL_SUBMITTERS, frame)?);
        }
        let mut reader = FrameReader(frame);
        let (name, operation) = (Arc::from(reader.read_text()?), reader.read_text()?.to_owned());
        let moves_no_data = reader.read_byte()? != 0;
        let age = Duration::from_millis(reader.read_varint()?);
        let submitters = scope.read_members(&mut reader)?;
        let since = now.checked_sub(age).unwrap_or(now);
        let case = StallCase { since, submitters, operation, moves_no_data };
        negotiation.stalls.add_report(name, case, self.collection_end(now));
        Ok(())
    }
}

/// Sends the submitters of a stalled tensor to all ranks, and keeps them for the stall report.
fn confirm_stall(
    scope: &SetScope,
    links: &mut ControlLinks,
    negotiation: &mut Negotiation,
    requests: &mut LocalRequests,
    (name, mut case): (Arc<str>, StallCase),
) -> StepResult {
    if let Some(tally) = negotiation.pending.get(&name) {
        case.submitters.extend(scope.members_of_sources(&tally.sources));
    }
    // Ranks that have joined are not missing.
    case.submitters.extend(negotiation.joins.joined_members());
    case.submitters.sort_unstable();
    case.submitters.dedup();
    let mut frame = Vec::new();
    let mut writer = FrameWriter(&mut frame);
    writer.write_text(&name);
    writer.write_varints(case.submitters.iter().map(|member| u64::from(*member)));
    requests.note_missing_ranks(&name, scope.missing_ranks(&case.submitters));
    negotiation.stalls.confirm_case(name, case);
    links.send_to_children(frame_kinds::STALL_STATUS, &frame)
}

pub(super) fn on_stall_status(
    scope: &SetScope,
    links: &mut ControlLinks,
    requests: &mut LocalRequests,
    frame: &[u8],
) -> Result<(), FrameFailure> {
    // Forwarded first, because members below have the longer way.
    links.send_to_children(frame_kinds::STALL_STATUS, frame)?;
    let mut reader = FrameReader(frame);
    let name = reader.read_text()?;
    let submitters = scope.read_members(&mut reader)?;
    requests.note_missing_ranks(name, scope.missing_ranks(&submitters));
    Ok(())
}

/// Checks that no operation of this rank has taken longer than the collective timeout.
///
/// # Errors
/// `Deadline` with the oldest operation.
pub(super) fn check_collective_timeout(
    scope: &SetScope,
    requests: &LocalRequests,
    execution: &BatchExecution,
    now: Instant,
) -> StepResult {
    let limit = scope.context.settings.collective_timeout;
    let waiting = requests.iter().min_by_key(|entry| entry.since);
    let running = execution.pending_entries().min_by_key(|entry| entry.since);
    // An empty list means that ranks are missing and that it is not known yet which ones.
    let known = waiting.map(|entry| (entry, Some(entry.missing.clone().unwrap_or_default())));
    for (entry, missing) in known.into_iter().chain(running.map(|entry| (entry, None))) {
        let elapsed = now.saturating_duration_since(entry.since);
        if elapsed >= limit {
            let (operation, tensor) = (entry.operation, Arc::clone(&entry.name));
            return Err(StopCause::Deadline { operation, tensor, elapsed, limit, missing });
        }
    }
    Ok(())
}

/// Returns the operations of this rank in a set, whether they wait or are executed.
pub(super) fn own_waited_operations<'a>(
    scope: &'a SetScope,
    requests: &'a LocalRequests,
    execution: &'a BatchExecution,
    now: Instant,
) -> impl Iterator<Item = RankWait> + 'a {
    requests.iter().chain(execution.pending_entries()).map(move |entry| RankWait {
        operation: match scope.id {
            ProcessSetId::GLOBAL => entry.operation_text(),
            set => format!("{} (process set {set})", entry.operation_text()),
        },
        moves_no_data: entry.moves_no_data(),
        since: now.saturating_duration_since(entry.since),
    })
}
