// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run --requeue`: on SIGUSR1 the ranks commit to their store and end, and the batch job
//! goes back into the queue.
//!
//! The job is requeued only if rank 0 has reported a commit that differs from the one from which
//! this start has continued, so a job without progress does not return without end.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use farandole::launcher::allocation::LocalEnvironment;
use farandole::launcher::{
    JobReport, SUSPENSION_RECORD_KIND, SlurmBatchJob, StopLevel, SuspensionRequest,
};
use farandole::telemetry::{RecordSink, WorkerMetric, WorkerRecord};

use crate::embedding_interpreter::EmbeddingInterpreter;

/// Exit status of a job that continues later, as in `sysexits.h`.
const TEMPORARY_FAILURE_STATUS: i32 = 75;
/// Exit status of a suspended job that is not requeued.
const NOT_REQUEUED_STATUS: i32 = 1;
/// Longest time for an answer of Slurm's controller, which a full cluster may keep busy.
const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(30);

/// The requeueing of a job, if it was requested.
pub(super) struct OptionalRequeue(Option<JobRequeue>);

struct JobRequeue {
    job: SlurmBatchJob,
    max_requeues: u64,
    request: SuspensionRequest,
    report: Arc<Mutex<Option<SuspensionReport>>>,
    is_announced: Cell<bool>,
}

/// The report of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SuspensionReport {
    commit: u64,
    directory: String,
    has_progressed: bool,
}

impl OptionalRequeue {
    /// Prepares the requeueing, and handles SIGUSR1 from now on. `max_requeues` as in
    /// [`SlurmBatchJob::requeue`]; `None` if no requeueing was requested.
    ///
    /// # Errors
    /// This process is not in a batch job that can be requeued.
    pub(super) fn prepare(
        max_requeues: Option<u64>,
        surroundings: &dyn EmbeddingInterpreter,
    ) -> Result<Self> {
        let Some(max_requeues) = max_requeues else { return Ok(Self(None)) };
        let job = SlurmBatchJob::find_own_job(&LocalEnvironment, CONTROLLER_TIMEOUT)
            .context("--requeue")?;
        let request = SuspensionRequest::default();
        surroundings
            .watch_suspension_signal(request.clone())
            .map_err(|error| anyhow!("--requeue: {error}"))?;
        Ok(Self(Some(JobRequeue {
            job,
            max_requeues,
            request,
            report: Arc::default(),
            is_announced: Cell::new(false),
        })))
    }

    /// Returns the request that the job follows.
    pub(super) fn suspension(&self) -> SuspensionRequest {
        self.0.as_ref().map(|requeue| requeue.request.clone()).unwrap_or_default()
    }

    /// Returns a sink that takes the report of rank 0 and passes other records on to `next`.
    pub(super) fn wrap_sink_with_report(&self, next: Arc<dyn RecordSink>) -> Arc<dyn RecordSink> {
        match &self.0 {
            Some(requeue) => {
                Arc::new(SuspensionReportSink { report: Arc::clone(&requeue.report), next })
            }
            None => next,
        }
    }

    /// Returns the stop level of the surroundings, and announces the first SIGUSR1.
    pub(super) fn stop_level(
        &self,
        surroundings: &dyn EmbeddingInterpreter,
        say: &dyn Fn(&str),
    ) -> StopLevel {
        let level = surroundings.requested_stop_level();
        if let Some(requeue) = &self.0
            && requeue.request.is_requested()
            && !requeue.is_announced.replace(true)
        {
            let job = requeue.job.name();
            say(&format!(
                "got SIGUSR1: the ranks end at their next commit, and job {job} is requeued"
            ));
        }
        level
    }

    /// Requeues the job if its ranks were suspended; returns the exit status then.
    pub(super) fn requeue_suspended_job(
        &self,
        report: &JobReport,
        say: &dyn Fn(&str),
    ) -> Option<i32> {
        let requeue = self.0.as_ref().filter(|requeue| requeue.request.is_requested())?;
        let suspended = requeue.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let job = requeue.job.name();
        let commit = match decide_requeue(report.exit_code() == 0, suspended) {
            Ok(commit) => commit,
            Err((reason, status)) => {
                say(&format!("job {job} is not requeued: {reason}"));
                return status;
            }
        };
        let SuspensionReport { commit, directory, .. } = commit;
        match requeue.job.requeue(requeue.max_requeues) {
            Ok(()) => {
                say(&format!(
                    "job {job} is requeued, and continues from commit {commit} in {directory}"
                ));
                Some(TEMPORARY_FAILURE_STATUS)
            }
            Err(reason) => {
                say(&format!(
                    "job {job} could not be requeued: {reason}. Commit {commit} is in {directory}: \
                     a job that is submitted again continues from it"
                ));
                Some(NOT_REQUEUED_STATUS)
            }
        }
    }
}

/// Returns the commit from which a requeued job continues; otherwise the reason why it is not
/// requeued, and the exit status, if it is not the program's.
fn decide_requeue(
    has_succeeded: bool,
    suspended: Option<SuspensionReport>,
) -> Result<SuspensionReport, (&'static str, Option<i32>)> {
    match (has_succeeded, suspended) {
        (false, _) => Err(("it has failed", None)),
        (true, None) => Err(("its program has ended before a commit", None)),
        (true, Some(report)) if report.has_progressed => Ok(report),
        (true, Some(_)) => Err((
            "this start has made no progress since the commit from which it has continued",
            Some(NOT_REQUEUED_STATUS),
        )),
    }
}

struct SuspensionReportSink {
    report: Arc<Mutex<Option<SuspensionReport>>>,
    next: Arc<dyn RecordSink>,
}

impl RecordSink for SuspensionReportSink {
    fn accept_record(&self, record: WorkerRecord) {
        match record {
            WorkerRecord::Metric(WorkerMetric { rank: Some(0), kind, data, .. })
                if kind == SUSPENSION_RECORD_KIND =>
            {
                *self.report.lock().unwrap_or_else(PoisonError::into_inner) = parse_report(&data);
            }
            record => self.next.accept_record(record),
        }
    }
}

/// Returns the report of a record; `None` for the empty record, by which rank 0 withdraws it.
fn parse_report(data: &[u8]) -> Option<SuspensionReport> {
    let record: serde_json::Value = serde_json::from_slice(data).ok()?;
    Some(SuspensionReport {
        commit: record.get("commit")?.as_u64()?,
        directory: record.get("directory")?.as_str()?.to_owned(),
        has_progressed: record.get("progress")?.as_bool()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct RecordedKinds(Mutex<Vec<String>>);

    impl RecordSink for RecordedKinds {
        fn accept_record(&self, record: WorkerRecord) {
            if let WorkerRecord::Metric(metric) = record {
                self.0.lock().unwrap().push(metric.kind);
            }
        }
    }

    fn report(has_progressed: bool) -> SuspensionReport {
        SuspensionReport { commit: 12, directory: "/store/runs/digits".to_owned(), has_progressed }
    }

    #[test]
    fn only_a_job_that_has_succeeded_and_progressed_is_requeued() {
        assert_eq!(decide_requeue(true, Some(report(true))), Ok(report(true)));
        let (reason, status) = decide_requeue(true, Some(report(false))).unwrap_err();
        assert!(reason.contains("no progress") && status == Some(1), "{reason}");
        // The program has ended by itself: its own status counts.
        assert_eq!(decide_requeue(true, None).unwrap_err().1, None);
        assert_eq!(decide_requeue(false, Some(report(true))).unwrap_err().1, None);
    }

    #[test]
    fn the_report_of_rank_zero_counts_and_other_records_pass() {
        let passed = Arc::new(RecordedKinds::default());
        let taken = Arc::default();
        let sink = SuspensionReportSink {
            report: Arc::clone(&taken),
            next: Arc::clone(&passed) as Arc<dyn RecordSink>,
        };
        let send_data = |rank, kind: &str, data: &[u8]| {
            sink.accept_record(WorkerRecord::Metric(WorkerMetric {
                task: 0,
                rank,
                kind: kind.to_owned(),
                data: data.to_vec(),
            }));
        };
        let data = br#"{"commit": 12, "directory": "/store/runs/digits", "progress": true}"#;
        let send = |rank, kind: &str| send_data(rank, kind, data);
        send(Some(1), SUSPENSION_RECORD_KIND);
        send(Some(0), "rank");
        assert_eq!(*taken.lock().unwrap(), None);
        send(Some(0), SUSPENSION_RECORD_KIND);
        assert_eq!(*taken.lock().unwrap(), Some(report(true)));
        assert_eq!(*passed.0.lock().unwrap(), [SUSPENSION_RECORD_KIND, "rank"]);
        send_data(Some(0), SUSPENSION_RECORD_KIND, b"{}");
        assert_eq!(*taken.lock().unwrap(), None, "rank 0 has withdrawn it");
    }
}
