// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar, this host's agents, and an agent on each other host: `farandole run`.
//!
//! ```text
//! run --+-- Registrar <---------------- TLS ----------------+
//!       |-- Agent (thread) --> worker                       |
//!       '-- RemoteAgent --ssh--> serve_host --> Agent ... --'
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{JobEvent, MAX_RESULT_BYTES, Registrar, RegistrarOptions};
use farandole_telemetry::RecordSink;
use farandole_world::World;

use crate::agent::{OutputTarget, WorkerOutcome};
use crate::agent_pool::{AgentPool, AgentPoolEvent, RemoteHost, StopLevel};
use crate::error::{Error, Result};
use crate::hosts::{HostPlacement, HostSlots};
use crate::local_hosts::split_local_tasks;
use crate::registrar_reports::RegistrarReports;
use crate::report::JobReport;
use crate::worker_program::WorkerProgram;

/// Interval at which the caller is asked whether to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time in which the other hosts must answer after one has failed before the start, so that
/// the error can name all failed hosts.
const HOST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the last messages of a host whose agent fell silent.
const SILENT_HOST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest silence of a connection after the registrar has reported the end of a worker there. Then
/// the connection's own report is not waited for.
const EXIT_CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time in which hosts must end their workers after the end of the job.
const JOB_END_TIMEOUT: Duration = Duration::from_secs(20);

/// The program to run, and the hosts.
#[derive(Clone, Debug)]
pub struct StaticJob {
    /// Number of processes.
    pub num_proc: u32,
    /// Hosts and their slots, in the order of ranks; an empty list means only this host.
    pub hosts: Vec<HostSlots>,
    /// The program of each process.
    pub program: WorkerProgram,
}

/// Observes the world when ranks are assigned.
type WorldObserver<'a> = dyn Fn(&World) + 'a;

impl StaticJob {
    /// Returns a job that uses only this host.
    pub fn on_this_host(
        num_proc: u32,
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self {
            num_proc,
            hosts: Vec::new(),
            program: WorkerProgram::for_this_host(command, environment, config),
        }
    }

    /// Like [`StaticJob::run_with_observer`], without an observer.
    ///
    /// # Errors
    /// Like [`StaticJob::run_with_observer`].
    pub fn run(
        &self,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
    ) -> Result<JobReport> {
        self.run_with_observer(sink, stop_level, &|_| {})
    }

    /// Runs the command until all processes have ended, or until one has failed and the others were
    /// ended, or until `stop_level` asks to stop. Lines of the workers go to `sink`; `assigned`
    /// receives the world when ranks are assigned.
    ///
    /// # Errors
    /// `Usage` for no process, an empty command or too few slots; `JobStart` without a registrar;
    /// `Host` and `Hosts` for hosts that cannot be used, or were lost; `Registrar`, `Spawn`,
    /// `System`.
    pub fn run_with_observer(
        &self,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
        assigned: &WorldObserver<'_>,
    ) -> Result<JobReport> {
        if self.num_proc == 0 {
            return Err(Error::Usage { reason: "at least one process is needed".to_owned() });
        }
        self.program.check_command()?;
        let (local_tasks, remote_placements) = split_local_tasks(&self.hosts, self.num_proc)?;
        let mut options = RegistrarOptions::from_config(self.num_proc, &self.program.config);
        if remote_placements.is_empty() {
            // No other host needs to connect to it.
            options.host = Some("127.0.0.1".to_owned());
            // A bind address is for other hosts, and would win over `host`.
            options.bind = String::new();
        }
        let registrar = Registrar::start_job(options)
            .map_err(|source| Error::JobStart { source: Box::new(source) })?;
        let mut job_run = JobRun::start_agents(
            self,
            &registrar,
            (sink, assigned),
            local_tasks,
            remote_placements,
        )?;
        let ended = job_run.run_until_done(stop_level);
        drop(job_run);
        registrar.close();
        ended
    }
}

/// A connection to a host that ended before the workers there.
struct LostConnection {
    error: Error,
    tasks: BTreeSet<u32>,
}

/// A running job.
struct JobRun<'a> {
    program: &'a WorkerProgram,
    registrar: &'a Registrar,
    sink: &'a Arc<dyn RecordSink>,
    observe_world: &'a WorldObserver<'a>,
    agent_pool: AgentPool<'a>,
    outcomes: BTreeMap<u32, WorkerOutcome>,
    reports: RegistrarReports,
    /// Connections that ended while the agents of their hosts stayed connected to the registrar.
    lost_connections: Vec<LostConnection>,
    /// Errors of hosts and agents.
    errors: Vec<Error>,
    /// Errors of hosts whose last messages were given up.
    silent_host_errors: Vec<Error>,
    started_at: Instant,
    failed_at: Option<Instant>,
    over_at: Option<Instant>,
    stop_level: StopLevel,
}

impl<'a> JobRun<'a> {
    fn start_agents(
        job: &'a StaticJob,
        registrar: &'a Registrar,
        (sink, assigned): (&'a Arc<dyn RecordSink>, &'a WorldObserver<'a>),
        local_tasks: Vec<u32>,
        remote_placements: Vec<HostPlacement>,
    ) -> Result<Self> {
        let mut agent_pool = AgentPool::new(&job.program, registrar.ticket().clone(), false);
        for placement in remote_placements {
            agent_pool.start_remote_agents(placement.host, placement.tasks.collect())?;
        }
        for task in local_tasks {
            agent_pool.start_local_agent(task, OutputTarget::Sink(Arc::clone(sink)))?;
        }
        Ok(Self {
            program: &job.program,
            registrar,
            sink,
            observe_world: assigned,
            agent_pool,
            outcomes: BTreeMap::new(),
            reports: RegistrarReports::default(),
            lost_connections: Vec::new(),
            errors: Vec::new(),
            silent_host_errors: Vec::new(),
            started_at: Instant::now(),
            failed_at: None,
            over_at: None,
            stop_level: StopLevel::Continue,
        })
    }

    fn run_until_done(&mut self, stop_level: &dyn Fn() -> StopLevel) -> Result<JobReport> {
        while !(self.agent_pool.have_all_tasks_ended() && self.lost_connections.is_empty()) {
            self.handle_registrar_events(Instant::now() + STOP_POLL_INTERVAL);
            self.handle_agent_events();
            self.accept_reported_exits();
            self.apply_stop_level(stop_level());
            self.abandon_silent_hosts();
        }
        // The last lines of workers on other hosts arrived before the reports of their ends.
        self.handle_registrar_events(Instant::now());
        let interrupted = self.stop_level > StopLevel::Continue;
        if self.errors.is_empty() && self.outcomes.values().all(WorkerOutcome::is_success) {
            // If hosts fall silent together, no agent is left to report why the job ended.
            self.errors.append(&mut self.silent_host_errors);
        }
        match Error::combine_host_errors(std::mem::take(&mut self.errors)) {
            Some(error) if !interrupted => Err(error),
            _ => Ok(JobReport {
                outcomes: std::mem::take(&mut self.outcomes).into_values().collect(),
                interrupted,
            }),
        }
    }

    /// Handles the reports of the registrar.
    fn handle_registrar_events(&mut self, deadline: Instant) {
        // Fails only in a forked process; this process started the registrar.
        let Ok(drained) = self.registrar.drain_events(deadline) else { return };
        if drained.dropped > 0 {
            tracing::warn!(
                lines = drained.dropped,
                "lines of workers were lost: this process could not keep up"
            );
        }
        for event in drained.records {
            match event {
                JobEvent::Record(record) => self.sink.accept_record(record),
                JobEvent::Registered { task } => self.reports.record_registration(task.0),
                JobEvent::Assigned { world } => {
                    self.reports.record_size(world.size());
                    (self.observe_world)(&world);
                }
                JobEvent::Exited { task, rank, exit } => {
                    self.reports.record_exit(task.0, rank, exit);
                }
                JobEvent::Result { task, data, .. } => self.reports.record_result(task.0, data),
                JobEvent::Lost { task, .. } => {
                    self.reports.record_loss(task.0);
                    self.abandon_lost_connection(task.0);
                    if let Some(host) = self.agent_pool.host_of_task(task.0) {
                        host.silent_since.get_or_insert_with(Instant::now);
                    }
                }
                JobEvent::Aborted { verdict, .. } => {
                    self.reports.record_mapping_verdict(verdict);
                    self.over_at.get_or_insert_with(Instant::now);
                }
                _ => {}
            }
        }
    }

    fn handle_agent_events(&mut self) {
        for event in self.agent_pool.take_events() {
            match event {
                AgentPoolEvent::WorkerEnded { task, outcome: Ok(outcome) } => {
                    self.outcomes.insert(task, outcome);
                }
                // The registrar informs the other agents; the job still waits for their ends.
                AgentPoolEvent::WorkerEnded { outcome: Err(error), .. } => self.record_error(error),
                AgentPoolEvent::HostLost { tasks, error, .. }
                    if tasks.iter().all(|task| self.reports.covers_task(*task)) =>
                {
                    tracing::warn!(
                        %error,
                        "the connection to a host has ended, and the registrar still hears its \
                         agents: the job continues"
                    );
                    self.lost_connections.push(LostConnection { error, tasks });
                }
                AgentPoolEvent::HostLost { error, .. }
                    if self.over_at.is_some() || self.stop_level > StopLevel::Continue =>
                {
                    // The error that ended the job is already recorded.
                    tracing::info!(%error, "a host disconnected, and its last messages were lost");
                }
                AgentPoolEvent::HostLost { error, begun, .. } => {
                    // Before the start, the job waits a moment for all hosts, so that one error
                    // names all of them.
                    if begun {
                        self.abort_job(&error.message_with_causes());
                    }
                    self.record_error(error);
                }
            }
        }
    }

    /// Takes ends of workers from the registrar that their connections do not report: those that
    /// have ended, and those that are silent.
    fn accept_reported_exits(&mut self) {
        let now = Instant::now();
        let mut accepted = Vec::new();
        for host in &self.agent_pool.hosts {
            let silent_since = host.agent.last_received_at();
            accepted.extend(host.open_tasks.iter().copied().filter(|task| {
                self.reports.exit_time(*task).is_some_and(|exit_time| {
                    now >= exit_time.max(silent_since) + EXIT_CONFIRMATION_TIMEOUT
                })
            }));
        }
        for lost in &self.lost_connections {
            accepted.extend(lost.tasks.iter().copied().filter(|task| {
                self.reports.is_settled(*task)
                    || self
                        .reports
                        .exit_time(*task)
                        .is_some_and(|exit_time| now >= exit_time + EXIT_CONFIRMATION_TIMEOUT)
            }));
        }
        for task in accepted {
            self.accept_reported_exit(task);
        }
        self.lost_connections.retain(|lost| !lost.tasks.is_empty());
    }

    fn accept_reported_exit(&mut self, task: u32) {
        let interrupted = self.stop_level > StopLevel::Continue;
        let Some(outcome) = self.reports.take_outcome(task, interrupted) else { return };
        tracing::info!(task, "the end of a worker was reported by the registrar alone");
        if self.program.collect_result && outcome.is_success() && outcome.result.is_none() {
            let host = self
                .agent_pool
                .host_of_task(task)
                .map_or_else(|| format!("task {task}"), |host| host.agent.host_name().to_owned());
            let reason = format!(
                "the result of task {task} has more than {} MiB and can come only through the \
                 connection to its host, which is silent or has ended: return less, or write it \
                 to a file",
                MAX_RESULT_BYTES >> 20
            );
            self.record_error(Error::Host { host, reason });
        }
        self.outcomes.insert(task, outcome);
        self.agent_pool.release_task(task);
        for lost in &mut self.lost_connections {
            lost.tasks.remove(&task);
        }
    }

    /// Reports the end of a connection as an error once the registrar has lost the agent, too.
    fn abandon_lost_connection(&mut self, task: u32) {
        if let Some(at) = self.lost_connections.iter().position(|lost| lost.tasks.contains(&task)) {
            let lost = self.lost_connections.swap_remove(at);
            self.record_error(lost.error);
        }
    }

    fn record_error(&mut self, error: Error) {
        self.failed_at.get_or_insert_with(Instant::now);
        self.errors.push(error);
    }

    fn abort_job(&mut self, reason: &str) {
        self.over_at.get_or_insert_with(Instant::now);
        // Fails only in a forked process; this process started the registrar.
        drop(self.registrar.abort_job(reason));
    }

    /// Aborts a job that cannot start or continue, and closes connections after the end of the job.
    fn abandon_silent_hosts(&mut self) {
        let now = Instant::now();
        let passed =
            |since: Option<Instant>, limit| since.is_some_and(|since| now >= since + limit);
        let all_answered = self.agent_pool.hosts.iter().all(|host| host.ready);
        if self.over_at.is_none()
            && self.failed_at.is_some()
            && (all_answered || passed(self.failed_at, HOST_ANSWER_TIMEOUT))
        {
            let reasons: Vec<String> = self.errors.iter().map(Error::message_with_causes).collect();
            self.abort_job(&reasons.join("; "));
        }
        let (over, late) = (self.over_at.is_some(), passed(self.over_at, JOB_END_TIMEOUT));
        let ending = over || self.stop_level > StopLevel::Continue;
        for (host, _) in self.agent_pool.close_connections(|host| ending && !host.ready) {
            // No worker runs there, so there is no end to wait for.
            let reason = format!("it has not answered within {:.1?}", self.started_at.elapsed());
            self.errors.push(Error::Host { host, reason });
        }
        let given_up =
            |host: &RemoteHost| late || (over && passed(host.silent_since, SILENT_HOST_TIMEOUT));
        if late {
            let lost = std::mem::take(&mut self.lost_connections);
            self.silent_host_errors.extend(lost.into_iter().map(|lost| lost.error));
        }
        for (host, tasks) in self.agent_pool.close_connections(given_up) {
            tracing::info!(?tasks, host, "stop waiting for the reports of these tasks");
            self.silent_host_errors
                .push(Error::Host { host, reason: "its agent fell silent".to_owned() });
        }
    }

    fn apply_stop_level(&mut self, stop_level: StopLevel) {
        if stop_level <= self.stop_level {
            return;
        }
        self.stop_level = stop_level;
        // A connection may be silent, so the registrar's interrupt goes to the same agents.
        drop(self.registrar.interrupt_workers());
        self.agent_pool.apply_stop_level(stop_level);
        if stop_level > StopLevel::Interrupt {
            self.abort_job("interrupted");
        }
    }
}
