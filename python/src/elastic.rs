// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.elastic`: elastic jobs, for drivers in Python.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use farandole::config::{Config, environment_variable};
use farandole::launcher::allocation::{LocalEnvironment, detect_allocation};
use farandole::launcher::elastic::{
    DiscoverySource, DiscoveryStopFlag, ElasticJob, ElasticJobUpdate, choose_discovery,
};
use farandole::launcher::hosts::parse_hosts;
use farandole::launcher::{Error, HostSlots, JobReport, StopLevel, WorkerProgram};
use farandole::telemetry::{LogLine, RecordSink, WorkerMetric, WorkerRecord};
use farandole::world::FaultOrigin;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_exception;
use crate::hosts::{launcher_exception, remote_shell};
use crate::interruptible_wait::wait_interruptibly;
use crate::launcher::PyWorkerOutcome;

/// News that wait to be taken; then the job waits.
// Bounded, so that a driver that takes no events slows the job down instead of filling its memory.
const MAX_PENDING_EVENTS: usize = 1 << 14;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyElasticJob>()
}

/// An event of a job.
enum ElasticJobEvent {
    Line(LogLine),
    Metric(WorkerMetric),
    Loss(String),
    /// The generation, and task and host of each rank.
    World(u64, Vec<(u32, String)>),
    Ended(Result<JobReport, Error>),
}

struct JobRecordSink(mpsc::SyncSender<ElasticJobEvent>);

impl RecordSink for JobRecordSink {
    fn accept_record(&self, record: WorkerRecord) {
        // A job without a listener ends soon.
        drop(self.0.send(match record {
            WorkerRecord::Log(line) => ElasticJobEvent::Line(line),
            WorkerRecord::Metric(metric) => ElasticJobEvent::Metric(metric),
        }));
    }
}

/// Hosts as an object of Python's says.
struct PythonDiscovery {
    object: Py<PyAny>,
    slots_per_host: Option<u32>,
}

impl DiscoverySource for PythonDiscovery {
    fn find_hosts(&mut self, _: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String> {
        Python::attach(|py| {
            let discovered = self.object.call_method0(py, "find_available_hosts_and_slots");
            let discovered = discovered.map_err(|error| discovery_failure_text(py, &error))?;
            self.read_hosts(discovered.bind(py)).map_err(|error| discovery_failure_text(py, &error))
        })
    }
}

impl PythonDiscovery {
    /// Returns the slots of each host of a dictionary, in its order. A host without a number gets
    /// `slots_per_host` slots.
    fn read_hosts(&self, discovered: &Bound<'_, PyAny>) -> PyResult<Vec<HostSlots>> {
        let mut hosts = Vec::new();
        for item in discovered.call_method0("items")?.try_iter()? {
            let (host, slots): (String, Option<u32>) = item?.extract()?;
            let slots = slots.or(self.slots_per_host).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "the host {host} has no slots, and there is no number for all hosts"
                ))
            })?;
            hosts.push(HostSlots::new(host, slots));
        }
        Ok(hosts)
    }
}

fn discovery_failure_text(py: Python<'_>, error: &PyErr) -> String {
    let kind = error
        .get_type(py)
        .name()
        .map_or_else(|_| "an exception".to_owned(), |name| name.to_string());
    format!("find_available_hosts_and_slots failed: {kind}: {}", error.value(py))
}

/// A running elastic job. Dropping it ends it.
#[pyclass(frozen, name = "ElasticJob", module = "farandole._native.elastic")]
struct PyElasticJob {
    events: Mutex<mpsc::Receiver<ElasticJobEvent>>,
    stop_requests: Arc<AtomicU8>,
}

#[pymethods]
impl PyElasticJob {
    #[new]
    #[pyo3(signature = (num_proc, command, *, env, payload, python, same_python, options=BTreeMap::new(), discovery=None, hosts=None, hostfile=None, ssh_command=None, ssh_port=None, ssh_identity_file=None))]
    #[expect(clippy::too_many_arguments, reason = "the Python signature")]
    fn new(
        py: Python<'_>,
        num_proc: u32,
        command: Vec<String>,
        env: BTreeMap<String, Option<String>>,
        payload: Vec<u8>,
        python: String,
        same_python: String,
        options: BTreeMap<String, String>,
        discovery: Option<Py<PyAny>>,
        hosts: Option<&str>,
        hostfile: Option<PathBuf>,
        ssh_command: Option<&str>,
        ssh_port: Option<u16>,
        ssh_identity_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        let config = Config::read(environment_variable, &options)
            .map_err(|error| to_exception(FaultOrigin::Usage, &error))?;
        let elastic = ElasticJob::elastic_rules_from_config(num_proc, &config)
            .map_err(|failure| launcher_exception(&failure))?;
        let discovery: Box<dyn DiscoverySource> = match discovery {
            Some(object) => {
                Box::new(PythonDiscovery { object, slots_per_host: config.slots_per_host })
            }
            None => {
                let max_workers =
                    if elastic.max_workers == u32::MAX { num_proc } else { elastic.max_workers };
                let named = hosts
                    .map(parse_hosts)
                    .transpose()
                    .map_err(|failure| launcher_exception(&failure))?;
                let given = py
                    .detach(|| detect_allocation(&LocalEnvironment))
                    .map_err(|failure| launcher_exception(&failure))?;
                // Hosts that the caller names win over the hosts of the batch system.
                let given = given.filter(|_| named.is_none() && hostfile.is_none());
                if let Some(given) = &given {
                    given.check_launch_host().map_err(|failure| launcher_exception(&failure))?;
                }
                // Without hosts, this host gets as many slots as the job can use.
                let slots = max_workers.saturating_add(elastic.spares);
                choose_discovery(
                    &config,
                    hostfile,
                    named.unwrap_or_default(),
                    given.as_ref(),
                    slots,
                )
            }
        };
        let shell = remote_shell(ssh_command, ssh_port, ssh_identity_file, config.start_timeout)
            .map_err(|failure| launcher_exception(&failure))?;
        let work = WorkerProgram {
            payload: Some(Arc::new(payload)),
            collect_result: true,
            shell,
            python,
            same_python: Some(same_python),
            ..WorkerProgram::for_this_host(command, env, config)
        };
        // A function's results would not outlive this process.
        Self::spawn_job(ElasticJob { rules: elastic, program: work, journal: None }, discovery)
    }

    /// Returns the events since the last call, oldest first, waiting up to `timeout` seconds for
    /// the first: `("line", (rank, stream, text))`, `("metric", (task, rank, kind, data))`,
    /// `("loss", sentence)`, `("world", (generation, task and host by rank))`, and last `("ended",
    /// outcomes)` or `("failed", exception)`.
    fn take_events(
        &self,
        py: Python<'_>,
        timeout: f64,
    ) -> PyResult<Vec<(&'static str, Py<PyAny>)>> {
        let timeout = Duration::try_from_secs_f64(timeout.max(0.0))
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        let first = wait_interruptibly(py, Some(Instant::now() + timeout), |slice| {
            // Inside the slice only: the lock is free while Python handles a signal.
            Ok(self.events.lock().recv_timeout(slice).ok())
        })?;
        let Some(first) = first else { return Ok(Vec::new()) };
        let rest: Vec<ElasticJobEvent> = self.events.lock().try_iter().collect();
        [first].into_iter().chain(rest).map(|events| event_to_python(py, events)).collect()
    }

    /// Ends the job: with time for last checkpoints the first time, soon the second, at once the
    /// third.
    fn request_end(&self) {
        let before = self.stop_requests.load(Ordering::Acquire);
        // Pairs with the load in the thread of the job.
        self.stop_requests.store(before.saturating_add(1).min(3), Ordering::Release);
    }
}

impl PyElasticJob {
    fn spawn_job(job: ElasticJob, discovery: Box<dyn DiscoverySource>) -> PyResult<Self> {
        let (sender, events) = mpsc::sync_channel(MAX_PENDING_EVENTS);
        let stop_requests = Arc::new(AtomicU8::new(0));
        let wanted = Arc::clone(&stop_requests);
        let run = move || {
            let sink = Arc::new(JobRecordSink(sender.clone())) as Arc<dyn RecordSink>;
            let report_update = |happening: ElasticJobUpdate<'_>| {
                // As above.
                drop(sender.send(match happening {
                    ElasticJobUpdate::Resumed { .. } => return,
                    ElasticJobUpdate::Loss(what) => ElasticJobEvent::Loss(what.to_owned()),
                    ElasticJobUpdate::World { world, hosts } => {
                        let host = |task| hosts.get(task).cloned().unwrap_or_default();
                        let places = world
                            .seats
                            .iter()
                            .map(|seat| (seat.task.0, host(&seat.task.0)))
                            .collect();
                        ElasticJobEvent::World(world.generation.0, places)
                    }
                }));
            };
            let stop_requests = || match wanted.load(Ordering::Acquire) {
                0 => StopLevel::Continue,
                1 => StopLevel::Interrupt,
                2 => StopLevel::Terminate,
                _ => StopLevel::Kill,
            };
            let ended = job.run(discovery, &sink, &stop_requests, &report_update);
            drop(sender.send(ElasticJobEvent::Ended(ended)));
        };
        let started = thread::Builder::new().name("farandole-elastic".to_owned()).spawn(run);
        started.map_err(|source| {
            launcher_exception(&Error::System { what: "starting a thread", source })
        })?;
        Ok(Self { events: Mutex::new(events), stop_requests })
    }
}

impl Drop for PyElasticJob {
    fn drop(&mut self) {
        // At once: no caller is left that could take the results.
        self.stop_requests.store(3, Ordering::Release);
    }
}

fn event_to_python(py: Python<'_>, events: ElasticJobEvent) -> PyResult<(&'static str, Py<PyAny>)> {
    Ok(match events {
        ElasticJobEvent::Line(line) => (
            "line",
            (line.rank, line.stream.as_str(), line.text).into_pyobject(py)?.into_any().unbind(),
        ),
        ElasticJobEvent::Metric(WorkerMetric { task, rank, kind, data }) => {
            let data = PyBytes::new(py, &data);
            ("metric", (task, rank, kind, data).into_pyobject(py)?.into_any().unbind())
        }
        ElasticJobEvent::Loss(what) => ("loss", what.into_pyobject(py)?.into_any().unbind()),
        ElasticJobEvent::World(generation, places) => {
            ("world", (generation, places).into_pyobject(py)?.into_any().unbind())
        }
        ElasticJobEvent::Ended(Ok(report)) => {
            let outcomes: Vec<PyWorkerOutcome> = report
                .outcomes
                .into_iter()
                .map(|outcome| PyWorkerOutcome::new(py, outcome))
                .collect();
            ("ended", outcomes.into_pyobject(py)?.into_any().unbind())
        }
        ElasticJobEvent::Ended(Err(failure)) => {
            ("failed", launcher_exception(&failure).into_value(py).into_any())
        }
    })
}
