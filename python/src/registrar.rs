// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.registrar`: the job's meeting point, run by the driver.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use farandole::config::{Config, KnobError as ConfigError, environment_variable};
use farandole::registrar::{self, ElasticOptions, ExitKind, RegistrarOptions};
use farandole::telemetry::WorkerRecord;
use farandole::world::{FaultOrigin, TaskId, World};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::to_exception;
use crate::interruptible_wait::wait_interruptibly;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRegistrar>()?;
    module.add_class::<PyJobEvent>()?;
    module.add_function(wrap_pyfunction!(host_hash, module)?)
}

/// Returns the hash by which ranks are grouped into hosts.
#[pyfunction]
fn host_hash() -> String {
    registrar::local_host_facts::host_facts().host_hash().0
}

pub(crate) fn registrar_exception(error: &registrar::Error) -> PyErr {
    to_exception(error.fault(), error)
}

/// Returns the configuration of this process, changed by the caller's settings.
pub(crate) fn read_configuration(given: &[(&str, Option<String>)]) -> PyResult<Config> {
    let arguments: BTreeMap<String, String> = given
        .iter()
        .filter_map(|(key, value)| value.as_ref().map(|value| ((*key).to_owned(), value.clone())))
        .collect();
    Config::read(environment_variable, &arguments)
        .map_err(|error: ConfigError| to_exception(FaultOrigin::Usage, &error))
}

/// Something that happened in the job.
#[pyclass(frozen, get_all, name = "Event", module = "farandole._native.registrar")]
#[derive(Default)]
struct PyJobEvent {
    kind: &'static str,
    task: Option<u32>,
    rank: Option<u32>,
    stream: Option<&'static str>,
    text: Option<String>,
    data: Option<Py<PyBytes>>,
    exit_code: Option<i32>,
    signal: Option<i32>,
    stderr_tail: Option<String>,
    dropped: u64,
}

#[pymethods]
impl PyJobEvent {
    fn __repr__(&self) -> String {
        let number =
            |value: Option<u32>| value.map_or_else(|| "None".to_owned(), |value| value.to_string());
        let (kind, text) = (self.kind, self.text.as_deref().unwrap_or_default());
        format!(
            "Event(kind={kind:?}, task={}, rank={}, text={text:?})",
            number(self.task),
            number(self.rank)
        )
    }
}

impl PyJobEvent {
    fn from_registrar_event(py: Python<'_>, event: registrar::JobEvent) -> Self {
        let bytes = |data: &[u8]| Some(PyBytes::new(py, data).unbind());
        match event {
            registrar::JobEvent::Registered { task } => {
                Self { kind: "registered", task: Some(task.0), ..Self::default() }
            }
            registrar::JobEvent::Record(WorkerRecord::Log(line)) => Self {
                kind: "log",
                task: Some(line.task),
                rank: line.rank,
                stream: Some(line.stream.as_str()),
                text: Some(line.text),
                ..Self::default()
            },
            registrar::JobEvent::Record(WorkerRecord::Metric(metric)) => Self {
                kind: "metric",
                task: Some(metric.task),
                rank: metric.rank,
                text: Some(metric.kind),
                data: bytes(&metric.data),
                ..Self::default()
            },
            registrar::JobEvent::Exited { task, rank, exit } => {
                let (exit_code, signal) = exit_code_and_signal(&exit.kind);
                let text = Some(format!("rank {rank} {}", exit.kind));
                let (task, rank) = (Some(task.0), Some(rank.0));
                let stderr_tail = Some(exit.stderr_tail.join("\n"));
                Self {
                    kind: "exit",
                    task,
                    rank,
                    text,
                    exit_code,
                    signal,
                    stderr_tail,
                    ..Self::default()
                }
            }
            registrar::JobEvent::Result { task, rank, data } => {
                let (task, rank) = (Some(task.0), Some(rank.0));
                Self { kind: "result", task, rank, data: bytes(&data), ..Self::default() }
            }
            registrar::JobEvent::Lost { task, rank, reason } => {
                let (task, rank) = (Some(task.0), rank.map(|rank| rank.0));
                Self { kind: "lost", task, rank, text: Some(reason), ..Self::default() }
            }
            registrar::JobEvent::Aborted { verdict, rank } => Self {
                kind: "aborted",
                task: verdict.cause.map(|task| task.0),
                rank: rank.map(|rank| rank.0),
                text: Some(verdict.reason),
                ..Self::default()
            },
            registrar::JobEvent::Stop { task, reason } => {
                Self { kind: "stop", task: Some(task.0), text: Some(reason), ..Self::default() }
            }
            registrar::JobEvent::Dismissed { task, reason } => Self {
                kind: "dismissed",
                task: Some(task.0),
                text: Some(reason),
                ..Self::default()
            },
            registrar::JobEvent::Finished { .. } => Self { kind: "finished", ..Self::default() },
            // The enum is non-exhaustive, "assigned" is the one kind left that a driver in Python
            // meets.
            _ => Self { kind: "assigned", ..Self::default() },
        }
    }
}

/// Returns the exit code and the signal of an end.
pub(crate) fn exit_code_and_signal(how: &ExitKind) -> (Option<i32>, Option<i32>) {
    match how {
        ExitKind::Code(code) => (Some(*code), None),
        ExitKind::Signal(signal) => (None, Some(*signal)),
        ExitKind::NotStarted(_) => (None, None),
    }
}

/// A gRPC server over TLS for one job, with a new certificate and token.
#[pyclass(frozen, name = "Registrar", module = "farandole._native.registrar")]
struct PyRegistrar {
    inner: registrar::Registrar,
}

#[pymethods]
impl PyRegistrar {
    #[new]
    #[pyo3(signature = (tasks, *, job_id=None, host=None, port_range=None, start_timeout=None, bind=None))]
    fn new(
        py: Python<'_>,
        tasks: u32,
        job_id: Option<String>,
        host: Option<String>,
        port_range: Option<String>,
        start_timeout: Option<f64>,
        bind: Option<String>,
    ) -> PyResult<Self> {
        let config = read_configuration(&[
            ("bind_address", bind),
            ("driver_host", host),
            ("port_range", port_range),
            ("start_timeout", start_timeout.map(|seconds| seconds.to_string())),
        ])?;
        let options = RegistrarOptions { job_id, ..RegistrarOptions::from_config(tasks, &config) };
        let inner = py
            .detach(|| registrar::Registrar::start_job(options))
            .map_err(|failure| registrar_exception(&failure))?;
        Ok(Self { inner })
    }

    /// Returns the registrar of a job whose workers join and leave by themselves.
    #[staticmethod]
    #[pyo3(signature = (first, min_workers, max_workers, *, timeout, reset_limit=None, start_timeout=None, host=None, bind=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn start_elastic(
        py: Python<'_>,
        first: u32,
        min_workers: u32,
        max_workers: u32,
        timeout: f64,
        reset_limit: Option<u32>,
        start_timeout: Option<f64>,
        host: Option<String>,
        bind: Option<String>,
    ) -> PyResult<Self> {
        let config = read_configuration(&[
            ("bind_address", bind),
            ("driver_host", host),
            ("start_timeout", start_timeout.map(|seconds| seconds.to_string())),
        ])?;
        let timeout = Duration::try_from_secs_f64(timeout)
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        // If workers come by themselves, no host is excluded.
        let cooldown = (Duration::ZERO, Duration::ZERO);
        let elastic = ElasticOptions {
            first,
            min_workers,
            max_workers,
            spares: 0,
            timeout,
            reset_limit,
            cooldown,
        };
        let options = RegistrarOptions::from_config(max_workers, &config);
        let inner = py
            .detach(|| registrar::Registrar::start_elastic(options, &elastic))
            .map_err(|failure| registrar_exception(&failure))?;
        Ok(Self { inner })
    }

    fn dismiss_task(&self, py: Python<'_>, task: u32, reason: &str) -> PyResult<()> {
        py.detach(|| self.inner.dismiss_worker(TaskId(task), reason))
            .map_err(|failure| registrar_exception(&failure))
    }

    fn publish(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        py.detach(|| self.inner.publish_value(key, value))
            .map_err(|failure| registrar_exception(&failure))
    }

    #[getter]
    fn ticket(&self) -> String {
        self.inner.ticket().encode_text()
    }

    #[getter]
    fn job_id(&self) -> &str {
        &self.inner.job_id().0
    }

    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.inner.ticket().registrar_addresses().to_vec()
    }

    fn events(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<PyJobEvent>> {
        let timeout = Duration::try_from_secs_f64(timeout.max(0.0))
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        let drained = wait_interruptibly(py, Some(Instant::now() + timeout), |slice| {
            let drained = self
                .inner
                .drain_events(Instant::now() + slice)
                .map_err(|failure| registrar_exception(&failure))?;
            // A closed registrar returns at once without events; without this check, the wait would
            // spin.
            let over = !drained.records.is_empty() || self.inner.is_finished();
            Ok(over.then_some(drained))
        })?;
        let Some(drained) = drained else { return Ok(Vec::new()) };
        let mut events: Vec<PyJobEvent> = drained
            .records
            .into_iter()
            .map(|event| PyJobEvent::from_registrar_event(py, event))
            .collect();
        // Only records are ever dropped, so the count belongs to the next one that was kept.
        let first = events.iter_mut().find(|event| matches!(event.kind, "log" | "metric"));
        if let Some(first) = first {
            first.dropped = drained.dropped;
        }
        Ok(events)
    }

    fn rank_assignment<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.inner.current_world().map(|world| rank_placement_entries(py, &world)).transpose()
    }

    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        py.detach(|| self.inner.abort_job(reason)).map_err(|failure| registrar_exception(&failure))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!(
            "Registrar(job_id={:?}, addresses={:?})",
            self.inner.job_id().0,
            self.inner.ticket().registrar_addresses()
        )
    }
}

fn rank_placement_entries<'py>(py: Python<'py>, world: &World) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (rank, seat) in world.seats.iter().enumerate() {
        let entry = PyDict::new(py);
        entry.set_item("rank", rank)?;
        entry.set_item("task", seat.task.0)?;
        entry.set_item("host", &seat.host.0)?;
        entry.set_item("local_rank", seat.local_rank.0)?;
        entry.set_item("local_size", seat.local_size)?;
        entry.set_item("cross_rank", seat.cross_rank.0)?;
        entry.set_item("cross_size", seat.cross_size)?;
        list.append(entry)?;
    }
    Ok(list)
}
