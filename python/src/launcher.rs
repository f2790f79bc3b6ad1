// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.launcher`: a task's side of a job.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole::launcher::{
    ALLOCATOR_VARIABLES, Agent, AgentTask, Error, OutputTarget, WorkerOutcome,
};
use farandole::registrar::{TaskClient, Ticket, signal_name};
use farandole::telemetry::{LogLine, OutputStream, RecordSink, WorkerRecord};
use farandole::world::TaskId;
use pyo3::exceptions::PyFileNotFoundError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_exception;
use crate::interruptible_wait::wait_interruptibly;
use crate::registrar::{
    exit_code_and_signal, read_configuration, registrar_exception as registrar_error,
};

/// Longest time in which a worker's first report must reach the registrar, and its last ones at
/// exit.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time in which an interrupted agent must end its worker.
// Longer than the time that an interrupted worker gets for SIGINT, SIGTERM and SIGKILL together.
const WORKER_END_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether the interpreter's exit waits for the last records.
static FLUSH_REGISTERED_AT_EXIT: AtomicBool = AtomicBool::new(false);

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyWorkerOutcome>()?;
    module.add("ALLOCATOR", BTreeMap::from(ALLOCATOR_VARIABLES))?;
    module.add_function(wrap_pyfunction!(run_agent, module)?)?;
    module.add_function(wrap_pyfunction!(report_record, module)?)?;
    module.add_function(wrap_pyfunction!(flush_reports, module)?)
}

/// The outcome of a worker.
#[pyclass(frozen, get_all, name = "Outcome", module = "farandole._native.launcher")]
pub(crate) struct PyWorkerOutcome {
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

impl PyWorkerOutcome {
    pub(crate) fn new(py: Python<'_>, outcome: WorkerOutcome) -> Self {
        let (exit_code, signal) =
            outcome.exit_kind.as_ref().map_or((None, None), exit_code_and_signal);
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
impl PyWorkerOutcome {
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
struct OwnStreamsSink;

impl RecordSink for OwnStreamsSink {
    fn accept_record(&self, record: WorkerRecord) {
        if let WorkerRecord::Log(LogLine { stream, text, .. }) = record {
            // A reader that went away does not end the worker.
            drop(match stream {
                OutputStream::Stdout => writeln!(io::stdout(), "{text}"),
                OutputStream::Stderr => writeln!(io::stderr(), "{text}"),
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
) -> PyResult<PyWorkerOutcome> {
    let config =
        read_configuration(&[("start_timeout", start_timeout.map(|seconds| seconds.to_string()))])?;
    let ticket: Ticket = ticket.parse().map_err(|failure| registrar_error(&failure))?;
    let output = if stream_output {
        OutputTarget::Registrar
    } else {
        OutputTarget::Sink(Arc::new(OwnStreamsSink))
    };
    let agent = Agent::spawn_thread(AgentTask {
        ticket,
        task: TaskId(task),
        host,
        attempt,
        command,
        environment: env,
        // A script has no payload, and gets no pipe then.
        payload: (!payload.is_empty()).then_some(payload),
        collect_result: true,
        elastic,
        wait_for_peers: together,
        output,
        start_timeout: config.start_timeout,
        peer_timeout: config.peer_timeout,
        outage: Duration::ZERO,
    })
    .map_err(|failure| agent_exception(&failure))?;
    let waited = wait_interruptibly(py, None, |slice| {
        agent.wait_for_outcome(slice).transpose().map_err(|failure| agent_exception(&failure))
    });
    let outcome = match waited {
        Ok(Some(outcome)) => outcome,
        Ok(None) => return Err(agent_exception(&Error::ThreadEnded { task: TaskId(task) })),
        Err(interrupt) => {
            agent.cancel_worker("interrupted");
            // The caller gets the interrupt; the worker's outcome adds nothing.
            drop(py.detach(|| agent.wait_for_outcome(WORKER_END_TIMEOUT)));
            return Err(interrupt);
        }
    };
    Ok(PyWorkerOutcome::new(py, outcome))
}

fn registrar_client() -> PyResult<Option<TaskClient>> {
    let config = read_configuration(&[])?;
    TaskClient::for_this_process(&config, Instant::now() + REPORT_TIMEOUT)
        .map_err(|failure| registrar_error(&failure))
}

#[pyfunction]
fn report_record(py: Python<'_>, kind: &str, data: Vec<u8>) -> PyResult<bool> {
    let sent = py.detach(|| {
        let Some(client) = registrar_client()? else { return Ok(false) };
        client.send_metric(kind, &data).map_err(|failure| registrar_error(&failure))?;
        Ok::<_, PyErr>(true)
    })?;
    // Only one thread may register the flush; the flag orders nothing else.
    if sent && !FLUSH_REGISTERED_AT_EXIT.swap(true, Ordering::Relaxed) {
        let flush = py.import("farandole._native.launcher")?.getattr("flush_reports")?;
        py.import("atexit")?.call_method1("register", (flush,))?;
    }
    Ok(sent)
}

#[pyfunction]
#[pyo3(signature = (timeout=5.0))]
fn flush_reports(py: Python<'_>, timeout: f64) -> PyResult<bool> {
    py.detach(|| {
        let Some(client) = registrar_client()? else { return Ok(false) };
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(REPORT_TIMEOUT);
        // A lost last message must not turn the success of a worker into a failure.
        Ok(client.flush_records(Instant::now() + timeout).is_ok())
    })
}

fn agent_exception(failure: &Error) -> PyErr {
    match failure {
        // Like `subprocess`, whose callers catch this exception.
        Error::Spawn { program, source } if source.kind() == io::ErrorKind::NotFound => {
            PyFileNotFoundError::new_err(format!("cannot start {program}: {source}"))
        }
        other => to_exception(other.fault(), other),
    }
}
