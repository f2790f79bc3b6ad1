// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The outcome of a worker, and its consequence for the generation.

use std::fmt;

use farandole_world::TaskId;
use serde::{Deserialize, Serialize};

/// The way a worker ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitKind {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
    /// It was never started, for this reason.
    NotStarted(String),
}

/// A worker's end, as its agent saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    /// The way the worker ended.
    #[serde(rename = "how")]
    pub kind: ExitKind,
    /// Whether a collective had lost a peer, so another task failed first.
    pub peer_error: bool,
    /// Whether the agent ended the worker.
    pub stopped: bool,
    /// The last lines of its stderr, oldest first.
    pub stderr_tail: Vec<String>,
}

/// The reason why a generation ended before its work was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationVerdict {
    /// A sentence naming the rank that failed first, if one did.
    pub reason: String,
    /// The task of that rank.
    pub cause: Option<TaskId>,
    /// Whether the tasks may form another generation, because no worker failed: an agent was lost
    /// or started again.
    pub retry: bool,
}

impl ExitKind {
    /// Returns whether the worker succeeded.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Code(0))
    }
}

impl fmt::Display for ExitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was ended by {name}"),
                None => write!(f, "was ended by signal {signal}"),
            },
            Self::NotStarted(reason) => write!(f, "could not be started: {reason}"),
        }
    }
}

/// Returns the name of a Linux signal, such as `SIGKILL`.
pub const fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        10 => "SIGUSR1",
        11 => "SIGSEGV",
        12 => "SIGUSR2",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_reads_as_a_sentence() {
        assert_eq!(ExitKind::Signal(9).to_string(), "was ended by SIGKILL");
        assert_eq!(ExitKind::Signal(40).to_string(), "was ended by signal 40");
        assert_eq!(ExitKind::Code(3).to_string(), "exited with code 3");
    }
}
