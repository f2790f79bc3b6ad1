// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar and its agents in one process: `farandole run` on this host.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use farandole_config::Config;
use farandole_registrar::{How, Options, Registrar};
use farandole_telemetry::{Record, Sink, Stream};
use farandole_world::TaskId;

use crate::agent::{Agent, Outcome, Output, Task};
use crate::error::{Error, Result};

/// How often the caller's wish to stop is looked at.
const SLICE: Duration = Duration::from_millis(50);

/// What to run on this host.
#[derive(Clone, Debug)]
pub struct Local {
    /// Number of processes.
    pub num_proc: u32,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes.
    pub environment: BTreeMap<String, Option<String>>,
    /// The configuration of this process.
    pub config: Config,
}

/// How a local run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Every worker's end, by task.
    pub outcomes: Vec<Outcome>,
    /// Whether the caller ended it.
    pub interrupted: bool,
}

impl Report {
    /// The worker that failed first.
    pub fn first_failure(&self) -> Option<&Outcome> {
        self.outcomes.iter().find(|outcome| !outcome.aborted && !outcome.is_success())
    }

    /// Why the run ended, unless all was well.
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

/// Writes `[rank]<stream>:line` to this process's own streams, line by line.
struct Prefixed;

impl Sink for Prefixed {
    fn accept(&self, record: Record) {
        let Record::Log(line) = record else { return };
        let rank = line.rank.map_or_else(|| "?".to_owned(), |rank| rank.to_string());
        let text = format!("[{rank}]<{}>:{}\n", line.stream, line.text);
        // A reader that went away (`| head`) does not end the job.
        drop(match line.stream {
            Stream::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush())
            }
            Stream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
        });
    }
}

/// Runs the command in `num_proc` processes until all have ended, or until one has failed and the others were ended,
/// or until `interrupted` says so. Output goes to this process's own, prefixed by rank.
///
/// # Errors
/// `Usage` for no process or an empty command, `Registrar`, `Spawn`, `System`.
pub fn run_local(local: &Local, interrupted: &dyn Fn() -> bool) -> Result<Report> {
    run_local_into(local, &(Arc::new(Prefixed) as Arc<dyn Sink>), interrupted)
}

/// As [`run_local`]; lines go to `sink`.
///
/// # Errors
/// As [`run_local`].
pub fn run_local_into(local: &Local, sink: &Arc<dyn Sink>, interrupted: &dyn Fn() -> bool) -> Result<Report> {
    let options =
        Options { host: Some("127.0.0.1".to_owned()), ..Options::from_config(local.num_proc, &local.config) };
    if local.num_proc == 0 {
        return Err(Error::Usage { reason: "at least one process is needed".to_owned() });
    }
    let registrar = Registrar::start(options)
        .map_err(|source| Error::Registrar { task: TaskId(0), source: Box::new(source) })?;
    let start = |task: u32| {
        Agent::start(Task {
            ticket: registrar.ticket().clone(),
            task: TaskId(task),
            host: None,
            attempt: 0,
            command: local.command.clone(),
            environment: local.environment.clone(),
            payload: None,
            collect_result: false,
            together: false,
            output: Output::Sink(Arc::clone(sink)),
            start_timeout: local.config.start_timeout,
            peer_timeout: local.config.peer_timeout,
        })
    };
    let agents: Vec<Agent> = (0..local.num_proc).map(start).collect::<Result<_>>()?;
    let mut report = Report { outcomes: Vec::with_capacity(agents.len()), interrupted: false };
    let mut failed = None;
    for agent in &agents {
        let outcome = loop {
            if let Some(outcome) = agent.wait(SLICE) {
                break outcome;
            }
            if !report.interrupted && interrupted() {
                report.interrupted = true;
                // Made in this process, so it is not a fork's.
                drop(registrar.abort("interrupted"));
                // Whatever output is left is not waited for either.
                agents.iter().for_each(|agent| agent.cancel("interrupted"));
            }
        };
        match outcome {
            Ok(outcome) => report.outcomes.push(outcome),
            Err(error) => {
                // The other agents learn of it from the registrar; their ends are waited for.
                failed.get_or_insert(error);
            }
        }
    }
    registrar.close();
    match failed {
        Some(error) if !report.interrupted => Err(error),
        _ => Ok(report),
    }
}
