// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The decisions of a launcher: a pure state machine, which knows the ends of workers from two
//! channels and believes either.
//!
//! Owns the rules by which a job ends: which ends are awaited, when a silent channel is given up,
//! when the job is aborted, and the report. It has no clock, I/O, lock or thread. The registrar
//! decides which worker failed first. [`crate::job_run`] supplies the inputs and carries out the
//! actions. Time is a `Duration` since the job began.
//!
//! ```text
//! registrar: events of the job ─────────┐
//! agents and connections: ends, losses ─┼─> step(now, inputs) ──> ConductorAction, ...
//! caller: stop level ───────────────────┘        into_report ──> JobReport or errors of hosts
//! ```
//!
//! A job of a fixed size has all its workers from the beginning, and ends when all of them have
//! ended. In an elastic job the registrar orders workers and replaces lost ones, and decides when
//! the job is over.
//!
//! Invariants, which the simulations in `simulation` hold:
//! - `CO-1`: a job that is over is done after the limits of this module, whatever falls silent.
//! - `CO-2`: a job is a success exactly if its workers succeeded.
//! - `CO-3`: the report blames the worker that the registrar's first verdict blames.

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_registrar::{ExitKind, ExitReport, GenerationVerdict, JobEvent, MAX_RESULT_BYTES};
use farandole_world::{Rank, TaskId, World};

use crate::agent::WorkerOutcome;
use crate::error::Error;

mod outcomes;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

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
/// Longest time in which a dismissed worker must end while the job continues: its script may have
/// to write files.
const DISMISSED_WORKER_TIMEOUT: Duration = Duration::from_secs(120);

/// The degree to which the caller wants to stop a running job. It can only increase: a lower level
/// after a higher one has no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopLevel {
    /// The job continues.
    #[default]
    Continue,
    /// The job ends, with time for a last checkpoint: workers get SIGINT.
    Interrupt,
    /// The job ends soon: workers get SIGTERM.
    Terminate,
    /// The job ends at once: workers get SIGKILL.
    Kill,
}

/// The differences between jobs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConductorRules {
    /// Whether the registrar orders workers and replaces lost ones.
    pub(crate) elastic: bool,
    /// Whether workers return results.
    pub(crate) collect_result: bool,
    /// Longest time in which agents that are connected only to the registrar must learn that the
    /// job is over and report their workers' ends.
    pub(crate) exit_report_timeout: Duration,
}

/// The way in which the end of a worker is reported, besides the registrar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkerExitChannel {
    /// Its agent is a thread of this process.
    Thread,
    /// Its agent is at the other end of this connection.
    Connection(usize),
    /// An earlier launcher started its agent, which is connected only to the registrar.
    RegistrarOnly,
}

/// An event for the conductor.
#[derive(Debug)]
pub(crate) enum ConductorInput {
    /// The registrar decided or received something.
    Registrar(JobEvent),
    /// The agent behind a connection has its order.
    ConnectionReady { connection: usize },
    /// The time of the last bytes of a connection.
    ConnectionActive { connection: usize, at: Duration },
    /// A connection ended before it had reported all ends.
    ConnectionLost { connection: usize, error: Error },
    /// A worker ended, as its agent reports.
    WorkerEnded { task: u32, outcome: WorkerOutcome },
    /// Workers could not be run.
    NoWorkers { tasks: Vec<u32>, error: Error },
    /// The degree to which the caller wants to stop.
    StopWanted(StopLevel),
}

/// A decision of the conductor.
#[derive(Debug)]
pub(crate) enum ConductorAction {
    /// Workers of an elastic job must be started.
    StartWorkers { host: String, tasks: Vec<u32> },
    /// A worker must be ended, if its agent is a thread of this process. Other agents get the same
    /// order from the registrar.
    CancelWorker { task: u32, reason: String },
    /// The registrar must learn that a worker does not run, or cannot be reached.
    ReportNotStarted { task: u32, reason: String },
    /// The registrar must abort the job.
    AbortJob { reason: String },
    /// All agents must apply a stop level.
    ApplyStopLevel(StopLevel),
    /// A connection must be closed: nothing more is awaited from it.
    CloseConnection(usize),
    /// The user must learn of a new world.
    ShowWorld(World),
    /// The user must learn of a loss, in a sentence.
    ShowLoss(String),
}

/// The end of the job, as the registrar decided it.
#[derive(Debug)]
enum JobEnd {
    Finished,
    Failed(GenerationVerdict, Option<Rank>),
}

/// The end of a worker, as the registrar reported it.
#[derive(Debug)]
struct ReportedExit {
    at: Duration,
    rank: Rank,
    exit: ExitReport,
}

#[derive(Debug, Default)]
struct JobTask {
    /// The channel that is still to report the worker's end.
    awaited: Option<WorkerExitChannel>,
    outcome: Option<WorkerOutcome>,
    exit: Option<ReportedExit>,
    result: Option<Vec<u8>>,
    /// Whether its agent is connected to the registrar.
    is_registered: bool,
    /// The time at which the worker was asked to end.
    ending_since: Option<Duration>,
    /// The time at which the registrar lost the agent.
    lost_since: Option<Duration>,
}

impl JobTask {
    fn has_ended(&self) -> bool {
        self.outcome.is_some() || self.exit.is_some()
    }
}

/// A connection to another host.
#[derive(Debug)]
struct HostConnection {
    host: String,
    /// Whether the agent there has its order, or never will.
    is_ready: bool,
    last_active: Duration,
    /// The error with which the connection ended while the agents there stayed connected to the
    /// registrar.
    lost: Option<Error>,
}

/// The state of a job.
#[derive(Debug, Default)]
pub(crate) struct Conductor {
    rules: ConductorRules,
    tasks: BTreeMap<u32, JobTask>,
    connections: Vec<HostConnection>,
    /// Host of each worker of an elastic job, under its discovered name.
    hosts: BTreeMap<u32, String>,
    world: Option<World>,
    end: Option<JobEnd>,
    /// The worker that failed by itself before a world was formed.
    failed_before_world: Option<u32>,
    /// Errors of hosts and agents.
    errors: Vec<Error>,
    /// Errors of hosts whose last messages were given up or lost.
    silent_host_errors: Vec<Error>,
    failed_at: Option<Duration>,
    over_at: Option<Duration>,
    stop_level: StopLevel,
    starting: Vec<(String, Vec<u32>)>,
    actions: Vec<ConductorAction>,
}

fn has_time_passed(now: Duration, since: Option<Duration>, limit: Duration) -> bool {
    since.is_some_and(|since| now.saturating_sub(since) >= limit)
}

impl Conductor {
    pub(crate) fn new(rules: ConductorRules) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Awaits the end of a worker from this channel.
    pub(crate) fn expect_worker_end(&mut self, task: u32, channel: WorkerExitChannel) {
        self.task_mut(task).awaited = Some(channel);
    }

    /// Awaits the ends of workers from a new connection, the next in order.
    pub(crate) fn expect_ends_from_connection(
        &mut self,
        now: Duration,
        host: String,
        tasks: Vec<u32>,
    ) {
        let connection = WorkerExitChannel::Connection(self.connections.len());
        tasks.into_iter().for_each(|task| self.expect_worker_end(task, connection));
        self.connections.push(HostConnection {
            host,
            is_ready: false,
            last_active: now,
            lost: None,
        });
    }

    /// Sets the host of a worker, for messages.
    pub(crate) fn set_worker_host(&mut self, task: u32, host: String) {
        self.hosts.insert(task, host);
    }

    pub(crate) fn set_world(&mut self, world: World) {
        self.world = Some(world);
    }

    /// Returns the present world, once ranks were assigned.
    pub(crate) fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    /// Returns the host of each worker of an elastic job.
    pub(crate) fn hosts(&self) -> &BTreeMap<u32, String> {
        &self.hosts
    }

    /// Returns whether no end is awaited any more, and no worker will be started.
    pub(crate) fn is_done(&self) -> bool {
        (self.is_ending() || !self.rules.elastic)
            && self.tasks.values().all(|task| task.awaited.is_none())
    }

    /// Takes what has happened since the last step, and returns what must be done.
    pub(crate) fn step(
        &mut self,
        now: Duration,
        inputs: impl IntoIterator<Item = ConductorInput>,
    ) -> Vec<ConductorAction> {
        inputs.into_iter().for_each(|input| self.handle_conductor_input(now, input));
        self.accept_reported_exits(now);
        self.abort_after_failure(now);
        self.give_up_silent_agents(now);
        let starting = std::mem::take(&mut self.starting);
        if !self.is_ending() {
            self.actions.extend(
                starting
                    .into_iter()
                    .map(|(host, tasks)| ConductorAction::StartWorkers { host, tasks }),
            );
        }
        std::mem::take(&mut self.actions)
    }

    fn task_mut(&mut self, task: u32) -> &mut JobTask {
        self.tasks.entry(task).or_default()
    }

    fn is_ending(&self) -> bool {
        self.over_at.is_some() || self.stop_level > StopLevel::Continue
    }

    /// Returns the tasks whose ends this connection is still to report.
    fn awaited_tasks(&self, connection: usize) -> Vec<u32> {
        let channel = Some(WorkerExitChannel::Connection(connection));
        let awaited = self.tasks.iter().filter(|(_, task)| task.awaited == channel);
        awaited.map(|(number, _)| *number).collect()
    }

    fn stop_expecting_ends(&mut self, tasks: &[u32]) {
        tasks.iter().for_each(|task| self.task_mut(*task).awaited = None);
    }

    fn handle_conductor_input(&mut self, now: Duration, input: ConductorInput) {
        match input {
            ConductorInput::Registrar(event) => self.handle_registrar_event(now, event),
            ConductorInput::ConnectionReady { connection } => {
                self.connections[connection].is_ready = true;
            }
            ConductorInput::ConnectionActive { connection, at } => {
                self.connections[connection].last_active = at;
            }
            ConductorInput::ConnectionLost { connection, error } => {
                self.handle_connection_loss(now, connection, error);
            }
            ConductorInput::WorkerEnded { task, outcome } => {
                let state = self.task_mut(task);
                let was_awaited = state.awaited.take().is_some();
                // The registrar may have reported this end before, and each end counts once. But
                // its report lacks a large result, and before the verdict the cause of a failure.
                let is_complete = state
                    .outcome
                    .as_ref()
                    .is_some_and(|kept| !kept.is_success() || kept.result.is_some());
                if was_awaited || !is_complete {
                    state.outcome = Some(outcome);
                }
            }
            ConductorInput::NoWorkers { tasks, error } => {
                self.handle_missing_workers(now, &tasks, error)
            }
            ConductorInput::StopWanted(level) if level > self.stop_level => {
                self.stop_level = level;
                self.actions.push(ConductorAction::ApplyStopLevel(level));
                let has_adopted = self
                    .tasks
                    .values()
                    .any(|task| task.awaited == Some(WorkerExitChannel::RegistrarOnly));
                if level > StopLevel::Interrupt || has_adopted {
                    self.abort_job(now, "interrupted".to_owned());
                }
            }
            ConductorInput::StopWanted(_) => {}
        }
    }

    fn handle_registrar_event(&mut self, now: Duration, event: JobEvent) {
        match event {
            JobEvent::Registered { task } => self.task_mut(task.0).is_registered = true,
            JobEvent::Start { task, host } => {
                self.set_worker_host(task.0, host.clone());
                match self.starting.last_mut() {
                    // One connection for all workers of a host: each ssh login costs a round of
                    // keys and a process.
                    Some((last, tasks)) if *last == host => tasks.push(task.0),
                    _ => self.starting.push((host, vec![task.0])),
                }
            }
            JobEvent::Stop { task: TaskId(task), reason } => {
                self.task_mut(task).ending_since = Some(now);
                self.cancel_workers(&[task], &reason);
            }
            JobEvent::Dismissed { task, reason } => {
                tracing::info!(task = task.0, reason, "a worker is dismissed");
                self.task_mut(task.0).ending_since = Some(now);
            }
            JobEvent::Assigned { world } => {
                self.world = Some(world.clone());
                self.actions.push(ConductorAction::ShowWorld(world));
            }
            JobEvent::Exited { task: TaskId(task), rank, exit } => {
                // A signal or a peer's error is a consequence; the user wants the first cause.
                let has_failed = matches!(exit.kind, ExitKind::Code(code) if code != 0)
                    && !exit.peer_error
                    && !exit.stopped;
                if has_failed && self.world.is_none() {
                    self.failed_before_world.get_or_insert(task);
                }
                let state = self.task_mut(task);
                state.exit.get_or_insert(ReportedExit { at: now, rank, exit });
                state.lost_since = None;
                state.awaited =
                    state.awaited.filter(|one| *one != WorkerExitChannel::RegistrarOnly);
            }
            JobEvent::Result { task, data, .. } => self.task_mut(task.0).result = Some(data),
            JobEvent::Lost { task, rank, reason } => {
                self.handle_task_loss(now, task.0, rank, &reason)
            }
            JobEvent::Finished { .. } => self.record_job_end(now, JobEnd::Finished),
            JobEvent::Aborted { verdict, rank } => {
                self.record_job_end(now, JobEnd::Failed(verdict, rank));
            }
            _ => {}
        }
    }

    fn handle_task_loss(&mut self, now: Duration, task: u32, rank: Option<Rank>, reason: &str) {
        let host = self.hosts.get(&task).map_or("an unknown host", String::as_str);
        let who = match rank {
            Some(rank) => format!("rank {rank} on {host}"),
            None => format!("a worker on {host}"),
        };
        self.actions.push(ConductorAction::ShowLoss(format!("{who} {reason}")));
        let state = self.task_mut(task);
        state.is_registered = false;
        if !state.has_ended() {
            state.lost_since = Some(now);
        }
        let Some(WorkerExitChannel::Connection(connection)) = state.awaited else { return };
        let tasks = self.awaited_tasks(connection);
        // Without it, the end of the connection says why the agent is gone.
        if let Some(error) = self.connections[connection].lost.take() {
            self.stop_expecting_ends(&tasks);
            self.record_error(now, error);
        } else if !self.rules.elastic {
            // One process holds the agents of a host, and after an abort the registrar reports no
            // further loss.
            for task in tasks {
                self.task_mut(task).lost_since.get_or_insert(now);
            }
        }
    }

    /// Takes the end of the job from the registrar.
    fn record_job_end(&mut self, now: Duration, end: JobEnd) {
        // Later verdicts are consequences of the first.
        self.end.get_or_insert(end);
        self.over_at.get_or_insert(now);
        // In a job of a fixed size, agents get the verdict from the registrar, and report it.
        let unended = self.tasks.iter().filter(|(_, task)| {
            self.rules.elastic
                && task.awaited == Some(WorkerExitChannel::Thread)
                && !task.has_ended()
        });
        let unended: Vec<u32> = unended.map(|(task, _)| *task).collect();
        self.cancel_workers(&unended, "the job is over");
    }

    fn cancel_workers(&mut self, tasks: &[u32], reason: &str) {
        // After a stop level, every agent has its order already. SIGTERM would end an interrupted
        // worker in its last checkpoint as soon as a faster worker has ended.
        if self.stop_level > StopLevel::Continue {
            return;
        }
        self.actions.extend(
            tasks.iter().map(|task| ConductorAction::CancelWorker {
                task: *task,
                reason: reason.to_owned(),
            }),
        );
    }

    fn handle_connection_loss(&mut self, now: Duration, connection: usize, error: Error) {
        // Marked as ready, because no answer of this host is to be waited for any more.
        let was_ready = std::mem::replace(&mut self.connections[connection].is_ready, true);
        let tasks = self.awaited_tasks(connection);
        let is_known_to_registrar = |task: &u32| {
            self.tasks.get(task).is_some_and(|task| task.is_registered || task.exit.is_some())
        };
        if tasks.is_empty() {
            return;
        }
        if !self.rules.elastic && tasks.iter().all(is_known_to_registrar) {
            tracing::warn!(
                %error,
                "the connection to a host has ended, and the registrar still hears its agents: \
                 the job continues"
            );
            self.connections[connection].lost = Some(error);
        } else if self.is_ending() {
            tracing::info!(%error, "a host disconnected, and its last messages were lost");
            self.stop_expecting_ends(&tasks);
            // If all others have succeeded, nothing else says that these have not.
            self.silent_host_errors.push(error);
        } else {
            // Before the start, the job waits a moment for all hosts, so that one error names all
            // of them.
            if was_ready && !self.rules.elastic {
                self.abort_job(now, error.message_with_causes());
            }
            self.handle_missing_workers(now, &tasks, error);
        }
    }

    /// Takes note that these tasks have no worker, or none that can be reached.
    fn handle_missing_workers(&mut self, now: Duration, tasks: &[u32], error: Error) {
        self.stop_expecting_ends(tasks);
        if !self.rules.elastic {
            // The registrar informs the other agents; the job still waits for their ends.
            return self.record_error(now, error);
        }
        if self.is_ending() {
            tracing::info!(?tasks, %error, "workers ended, and their last messages were lost");
            return;
        }
        let reason = error.message_with_causes();
        for &task in tasks {
            if self.task_mut(task).ending_since.is_none() {
                let reason = reason.clone();
                self.actions.push(ConductorAction::ReportNotStarted { task, reason });
            }
        }
    }

    /// Takes ends of workers from the registrar that their connections do not report, because the
    /// connections have ended or are silent.
    fn accept_reported_exits(&mut self, now: Duration) {
        let confirmed = |task: &JobTask| {
            let Some(WorkerExitChannel::Connection(number)) = task.awaited else { return None };
            let (connection, exit) = (&self.connections[number], task.exit.as_ref()?);
            // Nothing more about the outcome of a worker can follow if it succeeded, or if the
            // failure of the job is decided.
            let is_settled = exit.exit.kind.is_success() || self.end.is_some();
            let silent_since = exit.at.max(connection.last_active);
            ((connection.lost.is_some() && is_settled)
                || now >= silent_since + EXIT_CONFIRMATION_TIMEOUT)
                .then_some(number)
        };
        let accepted: Vec<(u32, usize)> = self
            .tasks
            .iter()
            .filter_map(|(number, task)| Some((*number, confirmed(task)?)))
            .collect();
        for (task, connection) in accepted {
            tracing::info!(task, "the end of a worker was reported by the registrar alone");
            let outcome = self.reported_outcome(task);
            let lacks_result = outcome
                .as_ref()
                .is_some_and(|outcome| outcome.is_success() && outcome.result.is_none());
            if self.rules.collect_result && lacks_result && !self.rules.elastic {
                let reason = format!(
                    "the result of task {task} has more than {} MiB and can come only through the \
                     connection to its host, which is silent or has ended: return less, or write \
                     it to a file",
                    MAX_RESULT_BYTES >> 20
                );
                let host = self.connections[connection].host.clone();
                self.record_error(now, Error::Host { host, reason });
            }
            // Before the verdict it is unknown whether a failed worker is the cause or was aborted.
            let is_certain = self.rules.elastic
                || self.end.is_some()
                || outcome.as_ref().is_some_and(WorkerOutcome::is_success);
            let state = self.task_mut(task);
            (state.awaited, state.outcome) = (None, outcome.filter(|_| is_certain));
            if self.awaited_tasks(connection).is_empty() {
                self.actions.push(ConductorAction::CloseConnection(connection));
            }
        }
    }

    fn record_error(&mut self, now: Duration, error: Error) {
        self.failed_at.get_or_insert(now);
        self.errors.push(error);
    }

    fn abort_job(&mut self, now: Duration, reason: String) {
        self.over_at.get_or_insert(now);
        self.actions.push(ConductorAction::AbortJob { reason });
    }

    /// Aborts a job that cannot start or continue.
    fn abort_after_failure(&mut self, now: Duration) {
        let all_answered = self.connections.iter().all(|connection| connection.is_ready);
        if self.over_at.is_none()
            && self.failed_at.is_some()
            && (all_answered || has_time_passed(now, self.failed_at, HOST_ANSWER_TIMEOUT))
        {
            let reasons: Vec<String> = self.errors.iter().map(Error::message_with_causes).collect();
            self.abort_job(now, reasons.join("; "));
        }
    }

    /// Closes the connections that will send nothing more, and stops waiting for their reports and
    /// for those of agents that only the registrar hears.
    fn give_up_silent_agents(&mut self, now: Duration) {
        let is_late = has_time_passed(now, self.over_at, JOB_END_TIMEOUT);
        let has_no_use_for_results =
            self.stop_level > StopLevel::Interrupt || matches!(self.end, Some(JobEnd::Failed(..)));
        let mut awaited = vec![Vec::new(); self.connections.len()];
        for (number, task) in &self.tasks {
            if let Some(WorkerExitChannel::Connection(connection)) = task.awaited {
                awaited[connection].push(*number);
            }
        }
        for (number, tasks) in awaited.into_iter().enumerate() {
            if tasks.is_empty() {
                continue;
            }
            let connection = &self.connections[number];
            let host = connection.host.clone();
            // A large result may be on its way for longer than any fixed limit.
            let is_silent =
                has_time_passed(now, Some(connection.last_active), EXIT_CONFIRMATION_TIMEOUT);
            if self.is_ending() && !self.rules.elastic && !connection.is_ready {
                // No worker runs there, so there is no end to wait for.
                let reason = format!("it has not answered within {now:.1?}");
                self.errors.push(Error::Host { host, reason });
            } else if (is_late && (is_silent || has_no_use_for_results))
                || tasks.iter().all(|task| self.is_agent_gone(now, *task))
            {
                tracing::info!(?tasks, host, "stop waiting for the reports of these tasks");
                let error = self.connections[number].lost.take();
                let reason = "its agent fell silent".to_owned();
                self.silent_host_errors.push(error.unwrap_or(Error::Host { host, reason }));
            } else {
                continue;
            }
            self.stop_expecting_ends(&tasks);
            self.actions.push(ConductorAction::CloseConnection(number));
        }
        let is_unheard = has_time_passed(now, self.over_at, self.rules.exit_report_timeout);
        let adopted = self.tasks.iter().filter(|(task, state)| {
            state.awaited == Some(WorkerExitChannel::RegistrarOnly)
                && (is_unheard || self.is_agent_gone(now, **task))
        });
        let adopted: Vec<u32> = adopted.map(|(task, _)| *task).collect();
        self.stop_expecting_ends(&adopted);
    }

    /// Returns whether no report of a worker's agent is to be expected.
    fn is_agent_gone(&self, now: Duration, task: u32) -> bool {
        let is_over = self.over_at.is_some();
        let end_timeout = if is_over { JOB_END_TIMEOUT } else { DISMISSED_WORKER_TIMEOUT };
        self.tasks.get(&task).is_some_and(|task| {
            ((is_over || self.rules.elastic)
                && has_time_passed(now, task.lost_since, SILENT_HOST_TIMEOUT))
                || has_time_passed(now, task.ending_since, end_timeout)
        })
    }
}
