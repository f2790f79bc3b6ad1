// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The ends of workers as the registrar reports them. They count where the connection to a host
//! does not report them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use farandole_registrar::{ExitReport, GenerationVerdict};
use farandole_world::{Rank, TaskId};

use crate::agent::WorkerOutcome;

/// A reported end of a worker.
struct ReportedExit {
    rank: Rank,
    exit: ExitReport,
    at: Instant,
}

/// The reports of the registrar about the agents and workers of one job.
#[derive(Default)]
pub(crate) struct RegistrarReports {
    /// Tasks whose agents are connected to the registrar.
    connected: BTreeSet<u32>,
    exits: BTreeMap<u32, ReportedExit>,
    results: BTreeMap<u32, Vec<u8>>,
    size: Option<usize>,
    verdict: Option<GenerationVerdict>,
}

impl RegistrarReports {
    pub(crate) fn record_registration(&mut self, task: u32) {
        self.connected.insert(task);
    }

    pub(crate) fn record_loss(&mut self, task: u32) {
        self.connected.remove(&task);
    }

    pub(crate) fn record_size(&mut self, size: usize) {
        self.size = Some(size);
    }

    pub(crate) fn record_exit(&mut self, task: u32, rank: Rank, exit: ExitReport) {
        self.exits.entry(task).or_insert_with(|| ReportedExit { rank, exit, at: Instant::now() });
    }

    pub(crate) fn record_result(&mut self, task: u32, data: Vec<u8>) {
        self.results.insert(task, data);
    }

    pub(crate) fn record_mapping_verdict(&mut self, verdict: GenerationVerdict) {
        // Later verdicts are consequences of the first.
        self.verdict.get_or_insert(verdict);
    }

    /// Returns whether the registrar has reported the end of the task's worker, or will.
    pub(crate) fn covers_task(&self, task: u32) -> bool {
        self.connected.contains(&task) || self.exits.contains_key(&task)
    }

    /// Returns the time of the report of a worker's end.
    pub(crate) fn exit_time(&self, task: u32) -> Option<Instant> {
        self.exits.get(&task).map(|exit| exit.at)
    }

    /// Returns whether nothing more about the outcome of an ended worker can follow: it succeeded,
    /// or the failure of the job is decided.
    pub(crate) fn is_settled(&self, task: u32) -> bool {
        self.exits
            .get(&task)
            .is_some_and(|exit| exit.exit.kind.is_success() || self.verdict.is_some())
    }

    /// Returns the outcome of an ended worker, like the one that its agent sends.
    pub(crate) fn take_outcome(&mut self, task: u32, interrupted: bool) -> Option<WorkerOutcome> {
        let ReportedExit { rank, exit, .. } = self.exits.remove(&task)?;
        let outcome = WorkerOutcome {
            rank: Some(rank),
            size: self.size,
            exit_kind: Some(exit.kind.clone()),
            stderr_tail: exit.stderr_tail,
            result: self.results.remove(&task),
            aborted: false,
            reason: None,
            retry: false,
        };
        let failed = !exit.kind.is_success();
        Some(match &self.verdict {
            Some(verdict) if failed || exit.stopped => {
                let aborted = exit.stopped || verdict.cause != Some(TaskId(task));
                let reason = Some(verdict.reason.clone());
                WorkerOutcome { aborted, reason, retry: aborted && verdict.retry, ..outcome }
            }
            None if failed => {
                let reason = Some(format!("rank {rank} {}", exit.kind));
                WorkerOutcome { aborted: exit.stopped || interrupted, reason, ..outcome }
            }
            _ => outcome,
        })
    }
}

#[cfg(test)]
mod tests {
    use farandole_registrar::ExitKind;

    use super::*;

    fn report(code: i32, stopped: bool) -> ExitReport {
        let kind = ExitKind::Code(code);
        ExitReport { kind, peer_error: false, stopped, stderr_tail: vec!["last".to_owned()] }
    }

    #[test]
    fn a_success_is_believed_at_once_and_a_failure_once_its_cause_is_known() {
        let mut reports = RegistrarReports::default();
        reports.record_registration(0);
        reports.record_registration(1);
        reports.record_size(2);
        assert!(reports.covers_task(1) && !reports.covers_task(2));
        reports.record_exit(0, Rank(0), report(0, false));
        reports.record_result(0, vec![7]);
        reports.record_exit(1, Rank(1), report(3, false));
        assert!(reports.is_settled(0) && !reports.is_settled(1));
        let verdict =
            GenerationVerdict { reason: "why".to_owned(), cause: Some(TaskId(1)), retry: false };
        reports.record_mapping_verdict(verdict);
        assert!(reports.is_settled(1));
        let (first, second) =
            (reports.take_outcome(0, false).unwrap(), reports.take_outcome(1, false).unwrap());
        assert!(first.is_success() && first.result == Some(vec![7]) && first.size == Some(2));
        assert!(!second.aborted && second.reason.as_deref() == Some("why"));
        assert!(reports.take_outcome(1, false).is_none(), "an outcome counts once");
    }

    #[test]
    fn a_worker_that_was_ended_is_not_the_cause() {
        for (stopped, interrupted, aborted) in
            [(true, false, true), (false, true, true), (false, false, false)]
        {
            let mut reports = RegistrarReports::default();
            reports.record_exit(4, Rank(2), report(1, stopped));
            let outcome = reports.take_outcome(4, interrupted).unwrap();
            assert_eq!(outcome.aborted, aborted);
            assert_eq!(outcome.reason.as_deref(), Some("rank 2 exited with code 1"));
        }
    }
}
