// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An elastic job: executes the decisions of the registrar.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{
    ElasticOptions, JobEvent, MembershipJournal, Registrar, RegistrarOptions, ResumedJob,
};
use farandole_telemetry::RecordSink;
use farandole_world::{TaskId, World};

use super::discovery::DiscoverySource;
use super::host_watcher::{DiscoveredHosts, HostWatcher};
use super::outcomes::ElasticJobOutcomes;
use crate::agent::OutputTarget;
use crate::agent_pool::{AgentPool, AgentPoolEvent, RemoteHost, StopLevel};
use crate::error::{Error, Result};
use crate::report::JobReport;
use crate::worker_program::WorkerProgram;

/// Interval at which the caller is asked whether to stop.
// A user who presses Ctrl-C notices no delay, and the loop uses little processor time.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for the last messages of a host whose agent fell silent.
const SILENT_HOST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest silence of a connection after the registrar has reported the ends of all its workers.
const EXIT_CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time in which a host must end its workers.
const JOB_END_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time in which a dismissed worker must end while the job continues: its script may have
/// to write files.
const DISMISSED_WORKER_TIMEOUT: Duration = Duration::from_secs(120);

/// The program to run, and the limits on its number of workers.
#[derive(Clone, Debug)]
pub struct ElasticJob {
    /// Number of workers, and the limits of the job.
    pub rules: ElasticOptions,
    /// The program of each worker.
    pub program: WorkerProgram,
    /// The file from which another process can continue the job after this one was killed, if any.
    pub journal: Option<PathBuf>,
}

/// An event of an elastic job for the user.
#[derive(Clone, Copy, Debug)]
pub enum ElasticJobUpdate<'a> {
    /// A world has started to work.
    World {
        /// The world.
        world: &'a World,
        /// The host of each worker under its discovered name, by task.
        hosts: &'a BTreeMap<u32, String>,
    },
    /// This process continues the job of an earlier launcher.
    Resumed {
        /// Number of workers.
        workers: usize,
    },
    /// A worker or a host was lost or could not be used; a sentence says which.
    Loss(&'a str),
}

/// Receives the updates of a job.
type ElasticJobObserver<'a> = dyn Fn(ElasticJobUpdate<'_>) + 'a;

impl ElasticJob {
    /// Returns the rules of the configuration for a first world of `num_proc` workers. With spares
    /// and without a maximum, the maximum is `num_proc`.
    ///
    /// # Errors
    /// `Usage` for numbers that contradict each other; the text names their flags.
    pub fn rules_from_config(num_proc: u32, config: &Config) -> Result<ElasticOptions> {
        let spares = u32::try_from(config.spares).unwrap_or(u32::MAX);
        // Without a maximum, spares would join the world instead of waiting.
        let unbounded = if spares > 0 { num_proc } else { u32::MAX };
        let rules = ElasticOptions {
            first: num_proc,
            min_workers: config.min_num_proc.unwrap_or(num_proc),
            max_workers: config.max_num_proc.unwrap_or(unbounded),
            spares,
            timeout: config.elastic_timeout,
            reset_limit: config.reset_limit,
            cooldown: (config.blacklist_cooldown_range.least, config.blacklist_cooldown_range.most),
        };
        let ElasticOptions { first, min_workers, max_workers, .. } = rules;
        let wrong = |reason| Err(Error::Usage { reason });
        if min_workers == 0 || first == 0 {
            return wrong(
                "an elastic job has at least one process: --num-proc and --min-num-proc".to_owned(),
            );
        }
        if min_workers > first {
            return wrong(format!(
                "--min-num-proc ({min_workers}) is larger than --num-proc ({first})"
            ));
        }
        if max_workers < first {
            return wrong(format!(
                "--max-num-proc ({max_workers}) is smaller than --num-proc ({first})"
            ));
        }
        Ok(rules)
    }

    /// Runs the command on the hosts that `discovery` finds, until it has returned on every rank of
    /// one world, or the job has failed, or `stop_level` asks to stop. Lines of the workers go to
    /// `sink`.
    ///
    /// # Errors
    /// `Discovery` when the first discovery fails; `Usage` for an empty command, or if hosts that
    /// do not change have fewer slots than processes; `Registrar`, `System`.
    pub fn run(
        &self,
        discovery: Box<dyn DiscoverySource>,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
        observer: &ElasticJobObserver<'_>,
    ) -> Result<JobReport> {
        self.program.check_command()?;
        // Opened first: this fails if another launcher uses the journal.
        let purpose = self.program.command.join(" ");
        let journal =
            self.journal.as_ref().map(|path| MembershipJournal::open_or_create(path, &purpose));
        let journal = journal.transpose().map_err(job_start_error)?;
        let lasting = journal.is_some();
        let fixed = discovery.is_fixed();
        let watch = HostWatcher::spawn_thread(discovery)?;
        let Some(found) = wait_for_first_hosts(&watch, stop_level)? else {
            return Ok(ElasticJobOutcomes::default().into_report(true));
        };
        let mut options = RegistrarOptions::from_config(self.rules.first, &self.program.config);
        if fixed {
            self.check_slots(&found)?;
            if found.are_all_hosts_local() {
                // No other host needs to connect to it.
                options.host = Some("127.0.0.1".to_owned());
                options.bind = String::new();
            }
        }
        let registrar = Registrar::start_with_journal(options, &self.rules, journal)
            .map_err(job_start_error)?;
        let mut job_run = ElasticJobRun {
            registrar: &registrar,
            sink,
            observe: observer,
            agent_pool: AgentPool::new(&self.program, registrar.ticket().clone(), true),
            discovered: DiscoveredHosts::default(),
            hosts: BTreeMap::new(),
            detached_agents: lasting,
            adopted_tasks: BTreeSet::new(),
            report_timeout: JOB_END_TIMEOUT.max(self.program.config.peer_timeout),
            outcomes: ElasticJobOutcomes::default(),
            ending_since: BTreeMap::new(),
            silent_since: BTreeMap::new(),
            exited_at: BTreeMap::new(),
            over_at: None,
            stop_level: StopLevel::Continue,
        };
        job_run.adopt_workers();
        let ended = job_run.run_until_done(found, &watch, stop_level);
        // Before the registrar closes: agents end their workers on the order that this drop sends.
        drop(job_run);
        drop(watch);
        registrar.close();
        ended
    }

    /// Checks that hosts that do not change have slots for all processes of the first world.
    fn check_slots(&self, found: &DiscoveredHosts) -> Result<()> {
        let slots: u64 = found.hosts.iter().map(|host| u64::from(host.slots)).sum();
        let first = self.rules.first;
        if u64::from(first) <= slots {
            return Ok(());
        }
        Err(Error::Usage {
            reason: format!(
                "Requested more processes ({first}) than there are available slots ({slots})"
            ),
        })
    }
}

fn job_start_error(source: farandole_registrar::Error) -> Error {
    Error::JobStart { source: Box::new(source) }
}

/// Returns the first discovered hosts; `None` when the caller wants to stop.
fn wait_for_first_hosts(
    watch: &HostWatcher,
    stop_level: &dyn Fn() -> StopLevel,
) -> Result<Option<DiscoveredHosts>> {
    loop {
        match watch.next_change(STOP_POLL_INTERVAL) {
            Some(Ok(found)) => return Ok(Some(found)),
            Some(Err(reason)) => return Err(Error::Discovery { reason }),
            None if stop_level() > StopLevel::Continue => return Ok(None),
            None => {}
        }
    }
}

/// A running job.
struct ElasticJobRun<'a> {
    registrar: &'a Registrar,
    sink: &'a Arc<dyn RecordSink>,
    observe: &'a ElasticJobObserver<'a>,
    agent_pool: AgentPool<'a>,
    discovered: DiscoveredHosts,
    /// Host of each worker.
    hosts: BTreeMap<u32, String>,
    /// Whether agents of this host are separate processes, which continue without this one.
    detached_agents: bool,
    /// Workers of an earlier launcher whose ends were not reported.
    adopted_tasks: BTreeSet<u32>,
    /// Longest time in which agents must learn that the job is over and report their workers' ends.
    report_timeout: Duration,
    outcomes: ElasticJobOutcomes,
    /// Workers that were asked to end, and when.
    ending_since: BTreeMap<u32, Instant>,
    /// Workers whose agents were lost, and when.
    silent_since: BTreeMap<u32, Instant>,
    /// Workers whose ends the registrar has reported, and when.
    exited_at: BTreeMap<u32, Instant>,
    over_at: Option<Instant>,
    stop_level: StopLevel,
}

impl ElasticJobRun<'_> {
    /// Takes over the workers and the world of an earlier launcher.
    fn adopt_workers(&mut self) {
        let Some(ResumedJob { workers, world }) = self.registrar.resumed_job().cloned() else {
            return;
        };
        (self.observe)(ElasticJobUpdate::Resumed { workers: workers.len() });
        self.adopted_tasks = workers.keys().map(|task| task.0).collect();
        self.hosts.extend(workers.into_iter().map(|(task, host)| (task.0, host)));
        if let Some(world) = world {
            self.outcomes.set_world(world);
        }
    }

    fn have_all_tasks_ended(&self) -> bool {
        self.agent_pool.have_all_tasks_ended() && self.adopted_tasks.is_empty()
    }

    fn run_until_done(
        &mut self,
        found: DiscoveredHosts,
        watch: &HostWatcher,
        stop_level: &dyn Fn() -> StopLevel,
    ) -> Result<JobReport> {
        self.publish_hosts(found)?;
        while !(self.have_all_tasks_ended()
            && (self.over_at.is_some() || self.stop_level > StopLevel::Continue))
        {
            self.handle_registrar_events(Instant::now() + STOP_POLL_INTERVAL);
            while let Some(Ok(found)) = watch.next_change(Duration::ZERO) {
                self.publish_hosts(found)?;
            }
            self.handle_agent_events();
            self.apply_stop_level(stop_level());
            self.abandon_silent_hosts();
        }
        // The last lines of workers on other hosts arrived before the reports of their ends.
        self.handle_registrar_events(Instant::now());
        Ok(std::mem::take(&mut self.outcomes).into_report(self.stop_level > StopLevel::Continue))
    }

    fn publish_hosts(&mut self, found: DiscoveredHosts) -> Result<()> {
        let hosts: Vec<(String, u32)> =
            found.hosts.iter().map(|host| (host.host.clone(), host.slots)).collect();
        tracing::info!(?hosts, "these hosts were found");
        self.discovered = found;
        self.registrar.update_hosts(&hosts).map_err(job_start_error)
    }

    /// Handles the decisions and reports of the registrar.
    fn handle_registrar_events(&mut self, deadline: Instant) {
        // Fails only in a forked process; this process started the registrar.
        let Ok(drained) = self.registrar.drain_events(deadline) else { return };
        if drained.dropped > 0 {
            tracing::warn!(
                lines = drained.dropped,
                "lines of workers were lost: this process could not keep up"
            );
        }
        let mut starting: Vec<(String, Vec<u32>)> = Vec::new();
        for event in drained.records {
            match event {
                JobEvent::Record(record) => self.sink.accept_record(record),
                JobEvent::Start { task, host } => match starting.last_mut() {
                    // One connection for all workers of a host: each ssh login costs a round of
                    // keys and a process.
                    Some((last, tasks)) if *last == host => tasks.push(task.0),
                    _ => starting.push((host, vec![task.0])),
                },
                JobEvent::Stop { task, reason } => self.stop_worker(task.0, &reason),
                JobEvent::Dismissed { task, reason } => {
                    tracing::info!(task = task.0, reason, "a worker is dismissed");
                    self.ending_since.insert(task.0, Instant::now());
                }
                JobEvent::Assigned { world } => {
                    (self.observe)(ElasticJobUpdate::World { world: &world, hosts: &self.hosts });
                    self.outcomes.set_world(world);
                }
                JobEvent::Exited { task, exit, .. } => {
                    self.silent_since.remove(&task.0);
                    self.adopted_tasks.remove(&task.0);
                    self.exited_at.entry(task.0).or_insert_with(Instant::now);
                    self.outcomes.record_exit(task.0, &exit);
                }
                JobEvent::Result { task, data, .. } => self.outcomes.record_result(task.0, data),
                JobEvent::Lost { task, rank, reason } => {
                    self.handle_lost_worker(task.0, rank.map(|rank| rank.0), &reason)
                }
                JobEvent::Finished { .. } => {
                    self.outcomes.mark_finished();
                    self.end_remaining_workers();
                }
                JobEvent::Aborted { verdict, rank } => {
                    self.outcomes.mark_aborted(verdict, rank);
                    self.end_remaining_workers();
                }
                _ => {}
            }
        }
        for (host, tasks) in starting {
            self.start_workers(host, tasks);
        }
    }

    fn start_workers(&mut self, host: String, tasks: Vec<u32>) {
        if self.over_at.is_some() || self.stop_level > StopLevel::Continue {
            return;
        }
        self.hosts.extend(tasks.iter().map(|task| (*task, host.clone())));
        let is_local = self.discovered.is_local_host(&host);
        if !is_local || self.detached_agents {
            let started = if is_local {
                self.agent_pool.start_detached_agents(host, tasks.clone())
            } else {
                self.agent_pool.start_remote_agents(host, tasks.clone())
            };
            if let Err(error) = started {
                self.report_not_started(tasks, &error);
            }
            return;
        }
        for task in tasks {
            if let Err(error) = self.agent_pool.start_local_agent(task, OutputTarget::Registrar) {
                self.report_not_started([task], &error);
            }
        }
    }

    /// Reports to the registrar that these tasks have no worker, or none that can be reached.
    fn report_not_started(&mut self, tasks: impl IntoIterator<Item = u32>, error: &Error) {
        let reason = error.message_with_causes();
        for task in tasks {
            if !self.ending_since.contains_key(&task) {
                // Fails only in a forked process; this process started the registrar.
                drop(self.registrar.report_not_started(TaskId(task), &reason));
            }
        }
    }

    fn stop_worker(&mut self, task: u32, reason: &str) {
        self.ending_since.insert(task, Instant::now());
        // Agents on other hosts get this order from the registrar.
        if let Some(agent) = self.agent_pool.agents.get(&task) {
            agent.cancel_worker(reason);
        }
    }

    fn handle_lost_worker(&mut self, task: u32, rank: Option<u32>, reason: &str) {
        if !self.outcomes.has_ended(task) {
            self.silent_since.insert(task, Instant::now());
        }
        let host = self.hosts.get(&task).map_or("an unknown host", String::as_str);
        let who = match rank {
            Some(rank) => format!("rank {rank} on {host}"),
            None => format!("a worker on {host}"),
        };
        (self.observe)(ElasticJobUpdate::Loss(&format!("{who} {reason}")));
    }

    /// Ends all workers that still run.
    fn end_remaining_workers(&mut self) {
        self.over_at.get_or_insert_with(Instant::now);
        for (task, agent) in &self.agent_pool.agents {
            if !self.outcomes.has_ended(*task) {
                agent.cancel_worker("the job is over");
            }
        }
    }

    fn handle_agent_events(&mut self) {
        let over = self.over_at.is_some() || self.stop_level > StopLevel::Continue;
        for event in self.agent_pool.take_events() {
            match event {
                AgentPoolEvent::WorkerEnded { task, outcome: Ok(outcome) } => {
                    self.outcomes.record_outcome(task, outcome)
                }
                AgentPoolEvent::WorkerEnded { task, outcome: Err(error) } if over => {
                    tracing::info!(task, %error, "a worker ended, and its last messages were lost");
                }
                AgentPoolEvent::HostLost { error, .. } if over => {
                    tracing::info!(%error, "a host disconnected, and its last messages were lost");
                }
                AgentPoolEvent::WorkerEnded { task, outcome: Err(error) } => {
                    self.report_not_started([task], &error)
                }
                AgentPoolEvent::HostLost { tasks, error, .. } => {
                    self.report_not_started(tasks, &error)
                }
            }
        }
    }

    /// Closes connections to hosts that will send nothing more.
    fn abandon_silent_hosts(&mut self) {
        let now = Instant::now();
        let passed =
            |since: Option<&Instant>, limit| since.is_some_and(|since| now >= *since + limit);
        let late = passed(self.over_at.as_ref(), JOB_END_TIMEOUT);
        let (silent, ending) = (&self.silent_since, &self.ending_since);
        let over = self.over_at.is_some();
        let limit = if over { JOB_END_TIMEOUT } else { DISMISSED_WORKER_TIMEOUT };
        let gone = |task: &u32| {
            passed(silent.get(task), SILENT_HOST_TIMEOUT) || passed(ending.get(task), limit)
        };
        let unheard = passed(self.over_at.as_ref(), self.report_timeout);
        self.adopted_tasks.retain(|task| !unheard && !gone(task));
        let exited = &self.exited_at;
        let confirmed = |host: &RemoteHost, task: &u32| {
            let silent_since = host.agent.last_received_at();
            let since = exited.get(task).map(|at| silent_since.max(*at));
            passed(since.as_ref(), EXIT_CONFIRMATION_TIMEOUT)
        };
        let given_up = |host: &RemoteHost| {
            // A large result may be on its way for longer than any fixed limit.
            let received_at = host.agent.last_received_at();
            (late && passed(Some(&received_at), EXIT_CONFIRMATION_TIMEOUT))
                || host.open_tasks.iter().all(|task| gone(task) || confirmed(host, task))
        };
        for (host, tasks) in self.agent_pool.close_connections(given_up) {
            tracing::info!(?tasks, host, "stop waiting for the reports of these tasks");
        }
    }

    fn apply_stop_level(&mut self, stop_level: StopLevel) {
        if stop_level <= self.stop_level {
            return;
        }
        self.stop_level = stop_level;
        // End the journal first: if this process is killed while the workers end, the job is not
        // continued.
        self.registrar.end_journal();
        // A connection may be silent, so the registrar's interrupt goes to the same agents. Fails
        // only in a forked process; this process started the registrar.
        drop(self.registrar.interrupt_workers());
        self.agent_pool.apply_stop_level(stop_level);
        // Agents of an earlier launcher are connected only to the registrar.
        if stop_level > StopLevel::Interrupt || !self.adopted_tasks.is_empty() {
            // Fails only in a forked process; this process started the registrar.
            drop(self.registrar.abort_job("interrupted"));
        }
    }
}
