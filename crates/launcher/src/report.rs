// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The report of the command about the end of a job.

use farandole_registrar::How;

use crate::agent::Outcome;

/// The outcome of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Every worker's end, by task.
    pub outcomes: Vec<Outcome>,
    /// Whether the caller ended it.
    pub interrupted: bool,
}

impl Report {
    /// Returns the worker that failed first.
    pub fn first_failure(&self) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| !outcome.aborted && !outcome.is_success())
    }

    /// Returns the reason why the run ended, unless all was well.
    pub fn reason(&self) -> Option<&str> {
        self.first_failure()
            .and_then(|outcome| outcome.reason.as_deref())
            .or_else(|| self.outcomes.iter().find_map(|outcome| outcome.reason.as_deref()))
    }

    /// As a shell has it: the first failure's exit code, 128 and the signal's number, or 1.
    pub fn exit_code(&self) -> i32 {
        match self.first_failure().and_then(|outcome| outcome.how.as_ref()) {
            Some(How::Code(code)) => *code,
            Some(How::Signal(signal)) => 128 + signal,
            Some(How::NotStarted(_)) => 1,
            None => i32::from(!self.outcomes.iter().all(Outcome::is_success)),
        }
    }
}
