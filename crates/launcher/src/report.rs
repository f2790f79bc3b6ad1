// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The report about the end of a job.

use farandole_registrar::ExitKind;

use crate::agent::WorkerOutcome;

/// The outcome of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobReport {
    /// The outcome of every worker, by task.
    pub outcomes: Vec<WorkerOutcome>,
    /// Whether the caller stopped the job.
    pub interrupted: bool,
}

impl JobReport {
    /// Returns the worker that failed first.
    pub fn first_failure(&self) -> Option<&WorkerOutcome> {
        self.outcomes.iter().find(|outcome| !outcome.aborted && !outcome.is_success())
    }

    /// Returns the reason why the job ended; `None` if it succeeded.
    pub fn job_failure_reason(&self) -> Option<&str> {
        self.first_failure()
            .and_then(|outcome| outcome.reason.as_deref())
            .or_else(|| self.outcomes.iter().find_map(|outcome| outcome.reason.as_deref()))
    }

    /// Returns a shell's exit code: the first failure's exit code, 128 + the number of a signal, or
    /// 1.
    pub fn exit_code(&self) -> i32 {
        match self.first_failure().and_then(|outcome| outcome.exit_kind.as_ref()) {
            Some(ExitKind::Code(code)) => *code,
            // The convention of shells.
            Some(ExitKind::Signal(signal)) => 128 + signal,
            Some(ExitKind::NotStarted(_)) => 1,
            None => i32::from(!self.outcomes.iter().all(WorkerOutcome::is_success)),
        }
    }
}
