// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A task's side of a job.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use farandole_registrar::{
    CancellationToken, ExitKind, ExitReport, GenerationVerdict, MAX_RESULT_BYTES, RegistrarOrder,
    TaskClient, Ticket, local_host_facts,
};
use farandole_telemetry::{LogLine, RecordSink, WorkerRecord};
use farandole_world::{Rank, TaskId, World};
use parking_lot::Mutex;

use crate::environment::{
    MasterAddress, elastic_worker_variables, unset_elastic_variables, worker_variables,
};
use crate::error::{Error, Result};
use crate::master_address::share_master_address;
use crate::timeline_upload::WorkerTimelineFolder;
use crate::worker::{
    ExitWait, LineReceiver, StopSignal, WorkerExit, WorkerProcess, WorkerStartOptions,
};

/// Longest time to connect to the registrar.
const REGISTRAR_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time to report the end of a worker.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time to report the end of a worker when the job is over and the driver may be gone.
// The verdict is known, so the report changes nothing, and the host should be free soon.
const LATE_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time to report the end of a cancelled agent's worker: the verdict is known already.
const CANCELLED_REPORT_TIMEOUT: Duration = Duration::from_secs(3);
/// The reason for the end of a worker whose launcher has ended.
pub(crate) const LAUNCHER_GONE: &str = "the launcher is gone";
/// Limits for configured times: shorter timers would fire at once, longer ones would overflow.
const MIN_PEER_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_AGENT_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);
/// Python's switch for unbuffered output.
const PYTHON_UNBUFFERED_VARIABLE: &str = "PYTHONUNBUFFERED";
/// Errors in which a worker says that another worker failed first.
const PEER_ERROR_CLASSES: [&str; 2] = ["FarandoleInternalError", "HorovodInternalError"];

/// The receiver of a worker's lines.
#[derive(Clone)]
pub enum OutputTarget {
    /// The driver, through the registrar.
    Registrar,
    /// A sink in this process.
    Sink(Arc<dyn RecordSink>),
}

/// The task of an agent.
#[derive(Clone)]
pub struct AgentTask {
    /// Address and secrets of the registrar.
    pub ticket: Ticket,
    /// The task to register as.
    pub task: TaskId,
    /// Name of the host to register under; the host's own name by default. Tasks under different
    /// names count as tasks of different hosts.
    pub host: Option<String>,
    /// Fencing token: a start with a higher one replaces earlier starts of the task.
    pub attempt: u64,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes a variable.
    pub environment: BTreeMap<String, Option<String>>,
    /// Bytes the worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Vec<u8>>,
    /// Whether the worker may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// Whether the worker starts at once, without a rank, and requests one itself: a worker of an
    /// elastic job.
    pub elastic: bool,
    /// Whether an agent whose worker has succeeded waits for the other agents, because the job
    /// starts over if one of them is lost.
    pub wait_for_peers: bool,
    /// Receiver of the worker's lines.
    pub output: OutputTarget,
    /// Longest time for registration and assignment.
    pub start_timeout: Duration,
    /// Longest time for which the registrar may be silent before the agent ends the worker.
    pub peer_timeout: Duration,
    /// Like `peer_timeout`, for a registrar with a journal, which may be restarted; zero without
    /// one.
    pub outage: Duration,
}

/// The outcome of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerOutcome {
    /// Rank of the worker; `None` when the job ended before ranks were assigned.
    pub rank: Option<Rank>,
    /// Number of ranks.
    pub size: Option<usize>,
    /// The way in which the worker ended; `None` when none was started.
    pub exit_kind: Option<ExitKind>,
    /// The last lines of the worker's stderr.
    pub stderr_tail: Vec<String>,
    /// The bytes that the worker wrote to its result pipe.
    pub result: Option<Vec<u8>>,
    /// Whether the job's abort or another rank's failure ended the worker.
    pub aborted: bool,
    /// The reason why the job ended; `None` if it succeeded.
    pub reason: Option<String>,
    /// Whether no worker failed and the task may register again: another agent was lost or
    /// restarted.
    pub retry: bool,
}

impl WorkerOutcome {
    /// Returns whether the worker did its work.
    pub fn is_success(&self) -> bool {
        !self.aborted && self.exit_kind.as_ref().is_some_and(ExitKind::is_success)
    }

    pub(crate) fn outcome_without_worker(reason: String) -> Self {
        Self {
            rank: None,
            size: None,
            exit_kind: None,
            stderr_tail: Vec::new(),
            result: None,
            aborted: true,
            reason: Some(reason),
            retry: false,
        }
    }
}

/// The events that an agent waits for once its worker runs.
enum AgentSignal {
    Exited,
    Stop(GenerationVerdict),
    Cancelled(StopSignal, String),
}

enum AgentPhase {
    /// Nothing was started yet: cancelling breaks the connection.
    Starting(CancellationToken),
    /// The worker runs, or its end is being reported.
    Running(TaskClient),
    Cancelled(String),
    Ended,
}

/// A running agent. Dropping it cancels it.
pub struct Agent {
    task: TaskId,
    peer_timeout: Duration,
    phase: Arc<Mutex<AgentPhase>>,
    signals: mpsc::Sender<AgentSignal>,
    outcome: Mutex<mpsc::Receiver<Result<WorkerOutcome>>>,
}

impl Agent {
    /// Starts the agent in a new thread.
    ///
    /// # Errors
    /// `Usage` for an empty command, `System` when no thread can be started.
    pub fn spawn_thread(mut task: AgentTask) -> Result<Self> {
        if task.command.first().is_none_or(String::is_empty) {
            return Err(Error::Usage { reason: "the command is empty".to_owned() });
        }
        task.start_timeout = task.start_timeout.min(MAX_AGENT_TIMEOUT);
        task.peer_timeout = task.peer_timeout.clamp(MIN_PEER_TIMEOUT, MAX_AGENT_TIMEOUT);
        task.outage = task.outage.min(MAX_AGENT_TIMEOUT);
        let (number, peer_timeout) = (task.task, task.peer_timeout);
        let cancel = CancellationToken::new();
        let phase = Arc::new(Mutex::new(AgentPhase::Starting(cancel.clone())));
        let (signals, received) = mpsc::channel();
        let (sender, outcome) = mpsc::channel();
        let last_phase = Arc::clone(&phase);
        let run = AgentRun {
            task,
            phase: Arc::clone(&phase),
            signals: signals.clone(),
            received_signals: received,
        };
        thread::Builder::new()
            .name(format!("farandole-agent-{number}"))
            .spawn(move || {
                let outcome = run.run_task(cancel);
                // Before the outcome is sent: a caller that has the outcome may cancel, and must
                // find the end.
                *last_phase.lock() = AgentPhase::Ended;
                // A caller that no longer waits has cancelled the agent.
                drop(sender.send(outcome));
            })
            .map_err(|source| Error::System { what: "starting a thread", source })?;
        Ok(Self { task: number, peer_timeout, phase, signals, outcome: Mutex::new(outcome) })
    }

    /// Waits until the worker has ended and this was reported; `None` when `timeout` passes first.
    /// Returns the outcome only once.
    pub fn wait_for_outcome(&self, timeout: Duration) -> Option<Result<WorkerOutcome>> {
        match self.outcome.lock().recv_timeout(timeout) {
            Ok(outcome) => Some(outcome),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Some(Err(Error::ThreadEnded { task: self.task }))
            }
        }
    }

    /// Ends the worker, or the wait for ranks. [`Agent::wait_for_outcome`] still returns an
    /// outcome.
    pub fn cancel_worker(&self, reason: &str) {
        self.request_worker_end(StopSignal::Terminate, reason);
    }

    /// Like [`Agent::cancel_worker`], with SIGINT and time for a last checkpoint.
    pub fn interrupt_worker(&self, reason: &str) {
        self.request_worker_end(StopSignal::Interrupt, reason);
    }

    /// Like [`Agent::cancel_worker`], with SIGKILL.
    pub fn kill_worker(&self, reason: &str) {
        self.request_worker_end(StopSignal::Kill, reason);
    }

    /// Ends the worker, and reports of its end, unless the registrar still answers: the launcher,
    /// which runs the registrar, sends nothing more on its own connection. The answer may take
    /// `peer_timeout`, so a thread waits for it.
    pub fn end_worker_if_registrar_silent(&self) {
        let client = match &*self.phase.lock() {
            AgentPhase::Starting(_) => None,
            AgentPhase::Running(client) => Some(client.clone()),
            AgentPhase::Cancelled(_) | AgentPhase::Ended => return,
        };
        // No worker runs yet, so nothing is lost if the launcher is only cut off.
        let Some(client) = client else { return self.cancel_worker(LAUNCHER_GONE) };
        let (task, signals) = (self.task, self.signals.clone());
        let deadline = Instant::now() + self.peer_timeout;
        let check = move || {
            if client.is_registrar_answering(deadline).unwrap_or(false) {
                tracing::warn!(%task, "the launcher's connection to this host has ended, and the \
                                       registrar answers: the worker continues");
            } else {
                // Reports of the worker's end would otherwise be repeated until their deadlines.
                client.give_up_registrar();
                let reason = LAUNCHER_GONE.to_owned();
                // An agent that has ended receives no signals.
                drop(signals.send(AgentSignal::Cancelled(StopSignal::Terminate, reason)));
            }
        };
        let thread = thread::Builder::new().name(format!("farandole-check-{task}"));
        if let Err(error) = thread.spawn(check) {
            self.cancel_worker(&format!("{LAUNCHER_GONE}, and no thread can be started: {error}"));
        }
    }

    fn request_worker_end(&self, manner: StopSignal, reason: &str) {
        let mut phase = self.phase.lock();
        if let AgentPhase::Starting(cancel) = &*phase {
            // The agent's thread waits inside a call, not for a signal, until its worker runs.
            cancel.cancel_calls();
            *phase = AgentPhase::Cancelled(reason.to_owned());
        }
        // An agent that has ended receives no signals.
        drop(self.signals.send(AgentSignal::Cancelled(manner, reason.to_owned())));
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.cancel_worker("the agent is no longer needed");
    }
}

/// Rank and variables of a worker at its start.
struct WorkerPlacement {
    /// `None` in an elastic job, where the worker requests a rank.
    rank: Option<Rank>,
    size: Option<usize>,
    variables: BTreeMap<String, Option<String>>,
}

impl WorkerPlacement {
    fn placement_with_rank(ticket: &Ticket, world: &World, master: &MasterAddress) -> Self {
        let set = worker_variables(ticket, world, master)
            .into_iter()
            .map(|(name, value)| (name, Some(value)));
        let variables = unset_elastic_variables().chain(set).collect();
        Self { rank: Some(world.rank), size: Some(world.size()), variables }
    }
}

struct AgentRun {
    task: AgentTask,
    phase: Arc<Mutex<AgentPhase>>,
    signals: mpsc::Sender<AgentSignal>,
    received_signals: mpsc::Receiver<AgentSignal>,
}

impl AgentRun {
    fn run_task(self, cancel: CancellationToken) -> Result<WorkerOutcome> {
        let deadline = Instant::now() + self.task.start_timeout;
        let client = match self.register_task(cancel, deadline) {
            Ok(client) => client,
            Err(error) => return self.outcome_before_start(None, error),
        };
        if self.task.elastic {
            let variables =
                elastic_worker_variables(&self.task.ticket, self.task.task, self.task.outage);
            return self
                .supervise_worker(&client, &WorkerPlacement { rank: None, size: None, variables });
        }
        let world = match client.await_assignment(deadline) {
            Ok(world) => world,
            Err(error) => return self.outcome_before_start(None, error),
        };
        match share_master_address(&client, &world, deadline) {
            Ok(master) => {
                let place =
                    WorkerPlacement::placement_with_rank(&self.task.ticket, &world, &master);
                self.supervise_worker(&client, &place)
            }
            Err(error) => self.outcome_before_start(Some(world.rank), error),
        }
    }

    /// Returns the outcome for an error that occurred before the worker started.
    fn outcome_before_start(
        &self,
        rank: Option<Rank>,
        error: farandole_registrar::Error,
    ) -> Result<WorkerOutcome> {
        let task = self.task.task;
        let mut again = false;
        let reason = match error {
            farandole_registrar::Error::Aborted { reason, retry, .. } => {
                again = retry;
                reason
            }
            farandole_registrar::Error::Closed { .. } => match &*self.phase.lock() {
                AgentPhase::Cancelled(reason) => reason.clone(),
                _ => return Err(Error::ThreadEnded { task }),
            },
            source => return Err(Error::Registrar { task, source: Box::new(source) }),
        };
        Ok(WorkerOutcome { rank, retry: again, ..WorkerOutcome::outcome_without_worker(reason) })
    }

    /// Connects to the registrar and registers the task.
    fn register_task(
        &self,
        cancel: CancellationToken,
        deadline: Instant,
    ) -> farandole_registrar::Result<TaskClient> {
        let task = &self.task;
        // The registrar starts before all tasks. So an agent that cannot connect soon never will,
        // and its error must come while the caller still waits for it.
        let dialed = Instant::now() + REGISTRAR_CONNECT_TIMEOUT.min(task.start_timeout / 2);
        let client =
            TaskClient::connect_cancellable(&task.ticket, task.task, None, dialed, cancel)?;
        let mut facts = local_host_facts::host_facts();
        if let Some(name) = &task.host {
            facts.hostname.clone_from(name);
        }
        // Before the registration: the launcher may be killed at any time from then on.
        client.tolerate_outage(task.outage);
        client.register_task(task.attempt, &facts, deadline)?;
        let stop = self.signals.clone();
        client.start_heartbeats(task.outage.max(2 * task.peer_timeout), move |order| {
            let signal = match order {
                RegistrarOrder::Interrupt => {
                    AgentSignal::Cancelled(StopSignal::Interrupt, "interrupted".to_owned())
                }
                RegistrarOrder::Stop(verdict) => AgentSignal::Stop(verdict),
            };
            // An agent that has ended receives no signals.
            drop(stop.send(signal));
        });
        Ok(client)
    }

    fn supervise_worker(
        self,
        client: &TaskClient,
        place: &WorkerPlacement,
    ) -> Result<WorkerOutcome> {
        {
            let mut phase = self.phase.lock();
            if let AgentPhase::Cancelled(reason) = &*phase {
                return Ok(WorkerOutcome {
                    rank: place.rank,
                    ..WorkerOutcome::outcome_without_worker(reason.clone())
                });
            }
            // Under one lock with the check above: a cancellation in between would find no worker
            // to end.
            *phase = AgentPhase::Running(client.clone());
        }
        let exited = self.signals.clone();
        let (start, gathered) = self.worker_start_options(client, place);
        let started = WorkerProcess::spawn_process(start, move || {
            // An agent that has ended receives no signals.
            drop(exited.send(AgentSignal::Exited));
        });
        let worker = match started {
            Ok(worker) => worker,
            Err(error) => {
                let kind = ExitKind::NotStarted(error.message_with_causes());
                let exit =
                    ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() };
                // The error below is returned whether or not this report reaches the registrar.
                // Without this report, the other ranks would wait for this one until their timeout.
                drop(client.report_exit(&exit, Instant::now() + EXIT_REPORT_TIMEOUT));
                return Err(error);
            }
        };
        let mut ended_by = match self.received_signals.recv() {
            Ok(AgentSignal::Exited) => None,
            Ok(other) => {
                let manner = match &other {
                    AgentSignal::Cancelled(manner, _) => *manner,
                    _ => StopSignal::Terminate,
                };
                worker.stop_group(manner, |manner, deadline| self.wait_for_exit(manner, deadline));
                Some(other)
            }
            Err(_) => return Err(Error::ThreadEnded { task: self.task.task }),
        };
        let mut cancelled = matches!(ended_by, Some(AgentSignal::Cancelled(..)));
        let worker_exit = worker.reap_and_collect_output(|| {
            while let Ok(signal) = self.received_signals.try_recv() {
                // A user who cancels does not wait for the rest of the output.
                cancelled |= matches!(signal, AgentSignal::Cancelled(..));
                if ended_by.is_none() && !matches!(signal, AgentSignal::Exited) {
                    ended_by = Some(signal);
                }
            }
            cancelled
        })?;
        // Report a failure before sending the timeline: a peer's report of the consequence must not
        // arrive before the report of the cause.
        let (first, last) =
            if worker_exit.exit_kind.is_success() { (gathered, None) } else { (None, gathered) };
        if let Some(gathered) = first {
            gathered.send_to_driver(client, self.exit_report_timeout(ended_by.as_ref()));
        }
        let outcome = self.report_exit(client, place, worker_exit, ended_by);
        if let Some(gathered) = last {
            gathered.send_to_driver(client, LATE_REPORT_TIMEOUT);
        }
        Ok(outcome)
    }

    fn worker_start_options(
        &self,
        client: &TaskClient,
        place: &WorkerPlacement,
    ) -> (WorkerStartOptions, Option<WorkerTimelineFolder>) {
        let mut environment = self.task.environment.clone();
        let gathered = WorkerTimelineFolder::create_folder_if_requested(&mut environment);
        if farandole_config::environment_variable(PYTHON_UNBUFFERED_VARIABLE).is_none() {
            // Unbuffered, so that lines appear when they are printed, and are not lost with a
            // killed worker.
            environment
                .entry(PYTHON_UNBUFFERED_VARIABLE.to_owned())
                .or_insert_with(|| Some("1".to_owned()));
        }
        // Last: a stale `RANK` of the user's environment must not win (LN-3).
        environment.extend(place.variables.clone());
        let take_line: LineReceiver = match &self.task.output {
            OutputTarget::Registrar => {
                let client = client.clone();
                Arc::new(move |stream, text| {
                    // `send_log_line` fails only in a fork, and a fork has no reader threads.
                    drop(client.send_log_line(stream, &text));
                })
            }
            OutputTarget::Sink(sink) => {
                let (sink, task, rank) =
                    (Arc::clone(sink), self.task.task.0, place.rank.map(|rank| rank.0));
                Arc::new(move |stream, text| {
                    sink.accept_record(WorkerRecord::Log(LogLine { task, rank, stream, text }))
                })
            }
        };
        let start = WorkerStartOptions {
            command: self.task.command.clone(),
            environment,
            payload: self.task.payload.clone(),
            collect_result: self.task.collect_result,
            take_line,
        };
        (start, gathered)
    }

    /// Reports a success and waits until the other workers have ended, or until the agent is
    /// cancelled.
    fn report_success_and_await_others(
        &self,
        client: &TaskClient,
        exit: &ExitReport,
    ) -> farandole_registrar::Result<Option<GenerationVerdict>> {
        loop {
            if let Poll::Ready(verdict) =
                client.report_exit_awaiting_peers(exit, Instant::now() + EXIT_REPORT_TIMEOUT)?
            {
                return Ok(verdict);
            }
            while let Ok(signal) = self.received_signals.try_recv() {
                if let AgentSignal::Cancelled(_, reason) = signal {
                    return Ok(Some(GenerationVerdict { reason, cause: None, retry: false }));
                }
            }
        }
    }

    fn wait_for_exit(&self, manner: StopSignal, deadline: Instant) -> ExitWait {
        loop {
            match self
                .received_signals
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(AgentSignal::Exited) => return ExitWait::Exited,
                Ok(AgentSignal::Cancelled(harsher, _)) if harsher > manner => {
                    return ExitWait::Escalated(harsher);
                }
                Ok(_) => {}
                Err(_) => return ExitWait::TimedOut,
            }
        }
    }

    /// Returns the longest time for the report of a worker's end.
    fn exit_report_timeout(&self, ended_by: Option<&AgentSignal>) -> Duration {
        match ended_by {
            Some(AgentSignal::Stop(_)) => LATE_REPORT_TIMEOUT,
            Some(AgentSignal::Cancelled(..)) => CANCELLED_REPORT_TIMEOUT,
            _ => EXIT_REPORT_TIMEOUT.max(self.task.outage),
        }
    }

    /// Reports the worker's end to the registrar, and learns which task failed first.
    fn report_exit(
        &self,
        client: &TaskClient,
        place: &WorkerPlacement,
        worker_exit: WorkerExit,
        ended_by: Option<AgentSignal>,
    ) -> WorkerOutcome {
        let WorkerExit { exit_kind: kind, stderr_tail, result } = worker_exit;
        let stopped = matches!(ended_by, Some(AgentSignal::Stop(_)));
        let deadline = Instant::now() + self.exit_report_timeout(ended_by.as_ref());
        // The exit code of Python is 1 for every exception, so only its last lines show the kind.
        let peer_error =
            !kind.is_success() && stderr_tail.iter().any(|line| is_peer_error_line(line));
        let exit = ExitReport {
            kind: kind.clone(),
            peer_error,
            stopped,
            stderr_tail: stderr_tail.clone(),
        };
        // Output and result come before the exit: the driver may end once it has all exits.
        let delivered = client.flush_records(deadline).and_then(|()| {
            if let Some(result) =
                result.as_deref().filter(|result| result.len() <= MAX_RESULT_BYTES)
                && !stopped
            {
                client.send_result(result, deadline)?;
            }
            Ok(())
        });
        if let Err(error) = &delivered {
            tracing::warn!(%error, task = self.task.task.0, "output or result did not reach the \
                                                             driver");
        }
        let verdict = if self.task.wait_for_peers && kind.is_success() && ended_by.is_none() {
            self.report_success_and_await_others(client, &exit)
        } else {
            client.report_exit(&exit, deadline)
        };
        let outcome = WorkerOutcome {
            rank: place.rank,
            size: place.size,
            exit_kind: Some(kind.clone()),
            stderr_tail,
            result,
            aborted: false,
            reason: None,
            retry: false,
        };
        match (ended_by, verdict) {
            (Some(AgentSignal::Stop(verdict)), _) => WorkerOutcome {
                aborted: true,
                reason: Some(verdict.reason),
                retry: verdict.retry,
                ..outcome
            },
            (Some(AgentSignal::Cancelled(_, reason)), _) => {
                WorkerOutcome { aborted: true, reason: Some(reason), ..outcome }
            }
            (_, Ok(None)) => outcome,
            (_, Ok(Some(verdict))) => {
                let aborted = verdict.cause != Some(self.task.task);
                WorkerOutcome {
                    aborted,
                    reason: Some(verdict.reason),
                    retry: aborted && verdict.retry,
                    ..outcome
                }
            }
            // A success that could not be reported is still a success: the outcome also carries the
            // result.
            (_, Err(_)) if kind.is_success() => outcome,
            (_, Err(error)) => {
                let who = match place.rank {
                    Some(rank) => format!("rank {rank}"),
                    None => format!("task {}", self.task.task),
                };
                let reason = format!("{who} {kind} ({error})");
                WorkerOutcome { reason: Some(reason), ..outcome }
            }
        }
    }
}

/// Returns whether a line ends a traceback with an error of a peer.
fn is_peer_error_line(line: &str) -> bool {
    let class = line.split(':').next().unwrap_or_default();
    let name = class.rsplit('.').next().unwrap_or_default().trim_end();
    // Python begins the last line of a traceback at the first column; an indented line is only
    // source code.
    PEER_ERROR_CLASSES.contains(&name) && !class.starts_with(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_error_is_known_by_the_last_line_of_its_traceback() {
        assert!(is_peer_error_line(
            "farandole.common.exceptions.FarandoleInternalError: lost rank 1"
        ));
        assert!(is_peer_error_line("HorovodInternalError"));
        assert!(!is_peer_error_line("    raise FarandoleInternalError(message)"));
        assert!(!is_peer_error_line("ValueError: not a FarandoleInternalError"));
    }
}
