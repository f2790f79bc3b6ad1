// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.launcher`: a task's side of a job.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole::launcher::{ALLOCATOR, Agent, Error, Outcome, Output, Task};
use farandole::registrar::{Client, Ticket, signal_name};
use farandole::telemetry::{LogLine, Record, Sink, Stream};
use farandole::world::TaskId;
use pyo3::exceptions::PyFileNotFoundError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::registrar::{configuration, error as registrar_error, numbers};
use crate::runtime::wait;

/// Longest time in which a worker's first report must reach the registrar, and its last ones at
/// exit.
const REPORT: Duration = Duration::from_secs(10);
/// Longest time in which an interrupted agent must end its worker.
const ENDING: Duration = Duration::from_secs(30);

/// Whether the interpreter's exit waits for the last records.
static FLUSHED_AT_EXIT: AtomicBool = AtomicBool::new(false);

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyOutcome>()?;
    module.add("ALLOCATOR", BTreeMap::from(ALLOCATOR))?;
    module.add_function(wrap_pyfunction!(run_agent, module)?)?;
    module.add_function(wrap_pyfunction!(report, module)?)?;
    module.add_function(wrap_pyfunction!(flush_reports, module)?)
}

/// The outcome of a worker.
#[pyclass(frozen, get_all, name = "Outcome", module = "farandole._native.launcher")]
pub(crate) struct PyOutcome {
    rank: Option<u32>,
    size: Option<usize>,
    exit_code: Option<i32>,
    signal: Option<i32>,
    signal_name: Option<String>,
    stderr_tail: String,
    result: Option<Py<PyBytes>>,
    aborted: bool,
    reason: Option<String>,
    retry: bool,
}

impl PyOutcome {
    pub(crate) fn new(py: Python<'_>, outcome: Outcome) -> Self {
        let (exit_code, signal) = outcome.how.as_ref().map_or((None, None), numbers);
        Self {
            rank: outcome.rank.map(|rank| rank.0),
            size: outcome.size,
            exit_code,
            signal,
            signal_name: signal.and_then(signal_name).map(str::to_owned),
            stderr_tail: outcome.stderr_tail.join("\n"),
            result: outcome.result.map(|bytes| PyBytes::new(py, &bytes).unbind()),
            aborted: outcome.aborted,
            reason: outcome.reason,
            retry: outcome.retry,
        }
    }
}

#[pymethods]
impl PyOutcome {
    fn __repr__(&self) -> String {
        let end = match (&self.exit_code, &self.signal_name) {
            (Some(code), _) => format!("exit_code={code}"),
            (None, Some(name)) => format!("signal={name}"),
            (None, None) => format!("signal={:?}", self.signal),
        };
        format!(
            "Outcome(rank={:?}, {end}, aborted={}, reason={:?})",
            self.rank, self.aborted, self.reason
        )
    }
}

/// Lines to this process's own streams, as they are.
struct Own;

impl Sink for Own {
    fn accept(&self, record: Record) {
        if let Record::Log(LogLine { stream, text, .. }) = record {
            // A reader that went away does not end the worker.
            drop(match stream {
                Stream::Stdout => writeln!(io::stdout(), "{text}"),
                Stream::Stderr => writeln!(io::stderr(), "{text}"),
            });
        }
    }
}

#[pyfunction]
#[pyo3(signature = (ticket, task, command, *, env=BTreeMap::new(), payload=Vec::new(), attempt=0, stream_output=true, start_timeout=None, host=None, together=false, elastic=false))]
#[expect(clippy::too_many_arguments, reason = "the Python signature")]
fn run_agent(
    py: Python<'_>,
    ticket: &str,
    task: u32,
    command: Vec<String>,
    env: BTreeMap<String, Option<String>>,
    payload: Vec<u8>,
    attempt: u64,
    stream_output: bool,
    start_timeout: Option<f64>,
    host: Option<String>,
    together: bool,
    elastic: bool,
) -> PyResult<PyOutcome> {
    let config =
        configuration(&[("start_timeout", start_timeout.map(|seconds| seconds.to_string()))])?;
    let ticket: Ticket = ticket.parse().map_err(|failure| registrar_error(&failure))?;
    let output = if stream_output { Output::Registrar } else { Output::Sink(Arc::new(Own)) };
    let agent = Agent::start(Task {
        ticket,
        task: TaskId(task),
        host,
        attempt,
        command,
        environment: env,
        payload: (!payload.is_empty()).then_some(payload),
        collect_result: true,
        elastic,
        together,
        output,
        start_timeout: config.start_timeout,
        peer_timeout: config.peer_timeout,
        outage: Duration::ZERO,
    })
    .map_err(|failure| error(&failure))?;
    let waited =
        wait(py, None, |slice| agent.wait(slice).transpose().map_err(|failure| error(&failure)));
    let outcome = match waited {
        Ok(Some(outcome)) => outcome,
        Ok(None) => return Err(error(&Error::Vanished { task: TaskId(task) })),
        Err(interrupt) => {
            agent.cancel("interrupted");
            // The interrupt is what the caller hears of; how the worker ended adds nothing.
            drop(py.detach(|| agent.wait(ENDING)));
            return Err(interrupt);
        }
    };
    Ok(PyOutcome::new(py, outcome))
}

fn client() -> PyResult<Option<Client>> {
    let config = configuration(&[])?;
    Client::of_process(&config, Instant::now() + REPORT)
        .map_err(|failure| registrar_error(&failure))
}

#[pyfunction]
fn report(py: Python<'_>, kind: &str, data: Vec<u8>) -> PyResult<bool> {
    let sent = py.detach(|| {
        let Some(client) = client()? else { return Ok(false) };
        client.metric(kind, &data).map_err(|failure| registrar_error(&failure))?;
        Ok::<_, PyErr>(true)
    })?;
    if sent && !FLUSHED_AT_EXIT.swap(true, Ordering::Relaxed) {
        let flush = py.import("farandole._native.launcher")?.getattr("flush_reports")?;
        py.import("atexit")?.call_method1("register", (flush,))?;
    }
    Ok(sent)
}

#[pyfunction]
#[pyo3(signature = (timeout=5.0))]
fn flush_reports(py: Python<'_>, timeout: f64) -> PyResult<bool> {
    py.detach(|| {
        let Some(client) = client()? else { return Ok(false) };
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(REPORT);
        // A worker that ends does not fail because its last words were lost.
        Ok(client.flush(Instant::now() + timeout).is_ok())
    })
}

fn error(failure: &Error) -> PyErr {
    match failure {
        Error::Spawn { program, source } if source.kind() == io::ErrorKind::NotFound => {
            PyFileNotFoundError::new_err(format!("cannot start {program}: {source}"))
        }
        other => raise(other.fault(), other),
    }
}
