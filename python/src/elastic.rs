// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.elastic`: elastic jobs, for drivers in Python.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use farandole::config::{Config, environment};
use farandole::launcher::allocation::{Here, allocation};
use farandole::launcher::elastic::{Discovery, ElasticJob, Happening, Stop, chosen};
use farandole::launcher::hosts::parse_hosts;
use farandole::launcher::{Error, HostSlots, Report, Wish, Work};
use farandole::telemetry::{LogLine, Metric, Record, Sink};
use farandole::world::Fault;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;
use crate::hosts::{error, shell};
use crate::launcher::PyOutcome;
use crate::runtime::wait;

/// News that wait to be taken; then the job waits.
const WAITING: usize = 1 << 14;

/// Fills the submodule.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyElasticJob>()
}

/// An event of a job.
enum News {
    Line(LogLine),
    Metric(Metric),
    Loss(String),
    /// The generation, and task and host of each rank.
    World(u64, Vec<(u32, String)>),
    Ended(Result<Report, Error>),
}

struct Lines(mpsc::SyncSender<News>);

impl Sink for Lines {
    fn accept(&self, record: Record) {
        // A job without a listener ends soon.
        drop(self.0.send(match record {
            Record::Log(line) => News::Line(line),
            Record::Metric(metric) => News::Metric(metric),
        }));
    }
}

/// Hosts as an object of Python's says.
struct Asked {
    object: Py<PyAny>,
    slots_per_host: Option<u32>,
}

impl Discovery for Asked {
    fn find(&mut self, _: &Stop) -> Result<Vec<HostSlots>, String> {
        Python::attach(|py| {
            let told = self.object.call_method0(py, "find_available_hosts_and_slots");
            let told = told.map_err(|error| sentence(py, &error))?;
            self.read(told.bind(py)).map_err(|error| sentence(py, &error))
        })
    }
}

impl Asked {
    /// Returns a dictionary of slots by host, in its order; a host without a number has those of
    /// `slots_per_host`.
    fn read(&self, told: &Bound<'_, PyAny>) -> PyResult<Vec<HostSlots>> {
        let mut hosts = Vec::new();
        for item in told.call_method0("items")?.try_iter()? {
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

fn sentence(py: Python<'_>, error: &PyErr) -> String {
    let kind = error
        .get_type(py)
        .name()
        .map_or_else(|_| "an exception".to_owned(), |name| name.to_string());
    format!("find_available_hosts_and_slots failed: {kind}: {}", error.value(py))
}

/// A running elastic job. Dropping it ends it.
#[pyclass(frozen, name = "ElasticJob", module = "farandole._native.elastic")]
struct PyElasticJob {
    news: Mutex<mpsc::Receiver<News>>,
    wish: Arc<AtomicU8>,
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
        let config =
            Config::read(environment, &options).map_err(|error| raise(Fault::Usage, &error))?;
        let elastic = ElasticJob::rules(num_proc, &config).map_err(|failure| error(&failure))?;
        let discovery: Box<dyn Discovery> = match discovery {
            Some(object) => Box::new(Asked { object, slots_per_host: config.slots_per_host }),
            None => {
                let most = if elastic.most == u32::MAX { num_proc } else { elastic.most };
                let named =
                    hosts.map(parse_hosts).transpose().map_err(|failure| error(&failure))?;
                let given = py.detach(|| allocation(&Here)).map_err(|failure| error(&failure))?;
                let given = given.filter(|_| named.is_none());
                let slots = most.saturating_add(elastic.spares);
                chosen(&config, hostfile, named.unwrap_or_default(), given.as_ref(), slots)
            }
        };
        let shell = shell(ssh_command, ssh_port, ssh_identity_file, config.start_timeout)
            .map_err(|failure| error(&failure))?;
        let work = Work {
            payload: Some(Arc::new(payload)),
            collect_result: true,
            shell,
            python,
            same_python: Some(same_python),
            ..Work::program(command, env, config)
        };
        // A function's results would not outlive this process.
        Self::start(ElasticJob { elastic, work, journal: None }, discovery)
    }

    /// Returns the events since the last call, oldest first, waiting up to `timeout` seconds for
    /// the first: `("line", (rank, stream, text))`, `("metric", (task, rank, kind, data))`,
    /// `("loss", sentence)`, `("world", (generation, task and host by rank))`, and last `("ended",
    /// outcomes)` or `("failed", exception)`.
    fn news(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<(&'static str, Py<PyAny>)>> {
        let timeout = Duration::try_from_secs_f64(timeout.max(0.0))
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        let first = wait(py, Some(Instant::now() + timeout), |slice| {
            Ok(self.news.lock().recv_timeout(slice).ok())
        })?;
        let Some(first) = first else { return Ok(Vec::new()) };
        let rest: Vec<News> = self.news.lock().try_iter().collect();
        [first].into_iter().chain(rest).map(|news| told(py, news)).collect()
    }

    /// Ends the job: with time for last checkpoints the first time, soon the second, at once the
    /// third.
    fn end(&self) {
        let before = self.wish.load(Ordering::Acquire);
        self.wish.store(before.saturating_add(1).min(3), Ordering::Release);
    }
}

impl PyElasticJob {
    fn start(job: ElasticJob, discovery: Box<dyn Discovery>) -> PyResult<Self> {
        let (sender, news) = mpsc::sync_channel(WAITING);
        let wish = Arc::new(AtomicU8::new(0));
        let wanted = Arc::clone(&wish);
        let run = move || {
            let sink = Arc::new(Lines(sender.clone())) as Arc<dyn Sink>;
            let tell = |happening: Happening<'_>| {
                // As above.
                drop(sender.send(match happening {
                    Happening::Resumed { .. } => return,
                    Happening::Loss(what) => News::Loss(what.to_owned()),
                    Happening::World { world, hosts } => {
                        let host = |task| hosts.get(task).cloned().unwrap_or_default();
                        let places = world
                            .seats
                            .iter()
                            .map(|seat| (seat.task.0, host(&seat.task.0)))
                            .collect();
                        News::World(world.generation.0, places)
                    }
                }));
            };
            let wish = || match wanted.load(Ordering::Acquire) {
                0 => Wish::GoOn,
                1 => Wish::Interrupt,
                2 => Wish::Terminate,
                _ => Wish::Kill,
            };
            let ended = job.run(discovery, &sink, &wish, &tell);
            drop(sender.send(News::Ended(ended)));
        };
        let started = thread::Builder::new().name("farandole-elastic".to_owned()).spawn(run);
        started.map_err(|source| error(&Error::System { what: "starting a thread", source }))?;
        Ok(Self { news: Mutex::new(news), wish })
    }
}

impl Drop for PyElasticJob {
    fn drop(&mut self) {
        self.wish.store(3, Ordering::Release);
    }
}

fn told(py: Python<'_>, news: News) -> PyResult<(&'static str, Py<PyAny>)> {
    Ok(match news {
        News::Line(line) => (
            "line",
            (line.rank, line.stream.name(), line.text).into_pyobject(py)?.into_any().unbind(),
        ),
        News::Metric(Metric { task, rank, kind, data }) => {
            let data = PyBytes::new(py, &data);
            ("metric", (task, rank, kind, data).into_pyobject(py)?.into_any().unbind())
        }
        News::Loss(what) => ("loss", what.into_pyobject(py)?.into_any().unbind()),
        News::World(generation, places) => {
            ("world", (generation, places).into_pyobject(py)?.into_any().unbind())
        }
        News::Ended(Ok(report)) => {
            let outcomes: Vec<PyOutcome> =
                report.outcomes.into_iter().map(|outcome| PyOutcome::new(py, outcome)).collect();
            ("ended", outcomes.into_pyobject(py)?.into_any().unbind())
        }
        News::Ended(Err(failure)) => ("failed", error(&failure).into_value(py).into_any()),
    })
}
