// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A task's side of a job.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use farandole_registrar::{Cancel, Client, Exit, How, MAX_RESULT, Ticket, Verdict, host};
use farandole_telemetry::{LogLine, Record, Sink};
use farandole_world::{Rank, TaskId, World};
use parking_lot::Mutex;

use crate::environment::{Master, only_elastic, unranked, variables};
use crate::error::{Error, Result};
use crate::gather::Gathered;
use crate::master::master;
use crate::worker::{Manner, Remains, Start, TakeLine, Waited, Worker};

/// Longest time to connect to the registrar.
const DIAL: Duration = Duration::from_secs(20);
/// Longest time to report the end of a worker.
const REPORT: Duration = Duration::from_secs(30);
/// The same, when the job is over and the driver may be gone.
const LATE_REPORT: Duration = Duration::from_secs(1);
/// The same for a cancelled agent: its verdict is known already.
const CANCELLED_REPORT: Duration = Duration::from_secs(3);
/// Times beyond these are taken for these: outside of them, timers always fire, or overflow.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(365 * 86_400);
/// Python's switch for unbuffered output.
const UNBUFFERED: &str = "PYTHONUNBUFFERED";
/// Errors by which a worker says that another one failed first.
const PEER_ERRORS: [&str; 2] = ["FarandoleInternalError", "HorovodInternalError"];

/// The target of a worker's lines.
#[derive(Clone)]
pub enum Output {
    /// To the driver, through the registrar.
    Registrar,
    /// Somewhere in this process.
    Sink(Arc<dyn Sink>),
}

/// The task of an agent.
#[derive(Clone)]
pub struct Task {
    /// Address and secrets of the registrar.
    pub ticket: Ticket,
    /// The task to register as.
    pub task: TaskId,
    /// Name of the host to register under; this host's own by default. Tasks under different names
    /// count as tasks of different hosts.
    pub host: Option<String>,
    /// Fencing token: a higher one replaces earlier starts of the task.
    pub attempt: u64,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes.
    pub environment: BTreeMap<String, Option<String>>,
    /// Bytes the worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Vec<u8>>,
    /// Whether the worker may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// Whether the worker starts at once, without a rank, and asks for one itself: a worker of an
    /// elastic job.
    pub elastic: bool,
    /// Whether an agent whose worker has ended well waits for the others: one that is lost makes
    /// all begin again.
    pub together: bool,
    /// Target of its lines.
    pub output: Output,
    /// Longest time for registration and assignment.
    pub start_timeout: Duration,
    /// Longest time for which the registrar may be silent before the worker is ended.
    pub peer_timeout: Duration,
    /// The same for a registrar with a journal, which may come back; zero without one.
    pub outage: Duration,
}

/// The outcome of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Its rank; `None` when the job ended before there were ranks.
    pub rank: Option<Rank>,
    /// Number of ranks.
    pub size: Option<usize>,
    /// The way it ended; `None` when none was started.
    pub how: Option<How>,
    /// The last lines of its stderr.
    pub stderr_tail: Vec<String>,
    /// The bytes that it wrote to its result pipe.
    pub result: Option<Vec<u8>>,
    /// Whether something else ended it: the job's abort, or another rank's failure.
    pub aborted: bool,
    /// The reason why the job ended, unless all was well.
    pub reason: Option<String>,
    /// No worker failed: another agent was lost or started again, and the task may register again.
    pub retry: bool,
}

impl Outcome {
    /// Returns whether the worker did its work.
    pub fn is_success(&self) -> bool {
        !self.aborted && self.how.as_ref().is_some_and(How::is_success)
    }

    pub(crate) fn without_worker(reason: String) -> Self {
        Self {
            rank: None,
            size: None,
            how: None,
            stderr_tail: Vec::new(),
            result: None,
            aborted: true,
            reason: Some(reason),
            retry: false,
        }
    }
}

/// The events that an agent waits for once its worker runs.
enum Signal {
    Exited,
    Stop(Verdict),
    Cancelled(Manner, String),
}

enum Phase {
    /// Nothing was started: cancelling breaks the connection.
    Starting(Cancel),
    Running,
    Cancelled(String),
}

/// A running agent. Dropping it cancels it.
pub struct Agent {
    task: TaskId,
    phase: Arc<Mutex<Phase>>,
    signals: mpsc::Sender<Signal>,
    outcome: Mutex<mpsc::Receiver<Result<Outcome>>>,
}

impl Agent {
    /// Starts it in a thread of its own.
    ///
    /// # Errors
    /// `Usage` for an empty command, `System` when there is no thread.
    pub fn start(mut task: Task) -> Result<Self> {
        if task.command.first().is_none_or(String::is_empty) {
            return Err(Error::Usage { reason: "the command is empty".to_owned() });
        }
        task.start_timeout = task.start_timeout.min(LONGEST);
        task.peer_timeout = task.peer_timeout.clamp(SHORTEST, LONGEST);
        task.outage = task.outage.min(LONGEST);
        let number = task.task;
        let cancel = Cancel::new();
        let phase = Arc::new(Mutex::new(Phase::Starting(cancel.clone())));
        let (signals, received) = mpsc::channel();
        let (sender, outcome) = mpsc::channel();
        let run = Run { task, phase: Arc::clone(&phase), signals: signals.clone(), received };
        thread::Builder::new()
            .name(format!("farandole-agent-{number}"))
            .spawn(move || {
                // A caller that no longer waits has cancelled.
                drop(sender.send(run.run(cancel)));
            })
            .map_err(|source| Error::System { what: "starting a thread", source })?;
        Ok(Self { task: number, phase, signals, outcome: Mutex::new(outcome) })
    }

    /// Waits for the end of the worker and of its report; `None` when `timeout` passes first. Holds
    /// one answer.
    pub fn wait(&self, timeout: Duration) -> Option<Result<Outcome>> {
        match self.outcome.lock().recv_timeout(timeout) {
            Ok(outcome) => Some(outcome),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Some(Err(Error::Vanished { task: self.task }))
            }
        }
    }

    /// Ends the worker, or the wait for ranks. The outcome still comes.
    pub fn cancel(&self, reason: &str) {
        self.end(Manner::Terminate, reason);
    }

    /// Like [`Agent::cancel`], by SIGINT, with time for a last checkpoint.
    pub fn interrupt(&self, reason: &str) {
        self.end(Manner::Ask, reason);
    }

    /// Like [`Agent::cancel`], by SIGKILL.
    pub fn kill(&self, reason: &str) {
        self.end(Manner::Kill, reason);
    }

    fn end(&self, manner: Manner, reason: &str) {
        let mut phase = self.phase.lock();
        if let Phase::Starting(cancel) = &*phase {
            cancel.cancel();
            *phase = Phase::Cancelled(reason.to_owned());
        }
        // An agent that has ended hears nothing.
        drop(self.signals.send(Signal::Cancelled(manner, reason.to_owned())));
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.cancel("the agent is no longer needed");
    }
}

/// The variables of a worker's place at its start.
struct Place {
    /// `None` in an elastic job, where it asks.
    rank: Option<Rank>,
    size: Option<usize>,
    variables: BTreeMap<String, Option<String>>,
}

impl Place {
    fn ranked(ticket: &Ticket, world: &World, master: &Master) -> Self {
        let set =
            variables(ticket, world, master).into_iter().map(|(name, value)| (name, Some(value)));
        let variables = only_elastic().chain(set).collect();
        Self { rank: Some(world.rank), size: Some(world.size()), variables }
    }
}

struct Run {
    task: Task,
    phase: Arc<Mutex<Phase>>,
    signals: mpsc::Sender<Signal>,
    received: mpsc::Receiver<Signal>,
}

impl Run {
    fn run(self, cancel: Cancel) -> Result<Outcome> {
        let deadline = Instant::now() + self.task.start_timeout;
        let client = match self.register(cancel, deadline) {
            Ok(client) => client,
            Err(error) => return self.not_started(None, error),
        };
        if self.task.elastic {
            let variables = unranked(&self.task.ticket, self.task.task, self.task.outage);
            return self.supervise(&client, &Place { rank: None, size: None, variables });
        }
        let world = match client.await_assignment(deadline) {
            Ok(world) => world,
            Err(error) => return self.not_started(None, error),
        };
        match master(&client, &world, deadline) {
            Ok(master) => {
                let place = Place::ranked(&self.task.ticket, &world, &master);
                self.supervise(&client, &place)
            }
            Err(error) => self.not_started(Some(world.rank), error),
        }
    }

    /// Returns the outcome of an error before there was a worker.
    fn not_started(
        &self,
        rank: Option<Rank>,
        error: farandole_registrar::Error,
    ) -> Result<Outcome> {
        let task = self.task.task;
        let mut again = false;
        let reason = match error {
            farandole_registrar::Error::Aborted { reason, retry, .. } => {
                again = retry;
                reason
            }
            farandole_registrar::Error::Closed { .. } => match &*self.phase.lock() {
                Phase::Cancelled(reason) => reason.clone(),
                _ => return Err(Error::Vanished { task }),
            },
            source => return Err(Error::Registrar { task, source: Box::new(source) }),
        };
        Ok(Outcome { rank, retry: again, ..Outcome::without_worker(reason) })
    }

    /// From nothing to a task that the registrar knows.
    fn register(&self, cancel: Cancel, deadline: Instant) -> farandole_registrar::Result<Client> {
        let task = &self.task;
        // The registrar is up before all tasks: an agent that cannot connect soon never will, and
        // its error must come while a caller still waits for it.
        let dialed = Instant::now() + DIAL.min(task.start_timeout / 2);
        let client = Client::connect_or_cancel(&task.ticket, task.task, None, dialed, cancel)?;
        let mut facts = host::facts();
        if let Some(name) = &task.host {
            facts.hostname.clone_from(name);
        }
        client.wait_out(task.outage);
        client.register(task.attempt, &facts, deadline)?;
        let stop = self.signals.clone();
        client.watch(task.outage.max(2 * task.peer_timeout), move |verdict| {
            // An agent that has ended hears nothing.
            drop(stop.send(Signal::Stop(verdict)));
        });
        Ok(client)
    }

    fn supervise(self, client: &Client, place: &Place) -> Result<Outcome> {
        {
            let mut phase = self.phase.lock();
            if let Phase::Cancelled(reason) = &*phase {
                return Ok(Outcome { rank: place.rank, ..Outcome::without_worker(reason.clone()) });
            }
            *phase = Phase::Running;
        }
        let exited = self.signals.clone();
        let (start, gathered) = self.start(client, place);
        let started = Worker::start(start, move || {
            // An agent that has ended hears nothing.
            drop(exited.send(Signal::Exited));
        });
        let worker = match started {
            Ok(worker) => worker,
            Err(error) => {
                let how = How::NotStarted(error.told());
                let exit = Exit { how, peer_error: false, stopped: false, stderr_tail: Vec::new() };
                // The error below says what happened, whether or not the registrar could be told.
                drop(client.exit(&exit, Instant::now() + REPORT));
                return Err(error);
            }
        };
        let mut ended_by = match self.received.recv() {
            Ok(Signal::Exited) => None,
            Ok(other) => {
                let manner = match &other {
                    Signal::Cancelled(manner, _) => *manner,
                    _ => Manner::Terminate,
                };
                worker.end(manner, |manner, deadline| self.exited_by(manner, deadline));
                Some(other)
            }
            Err(_) => return Err(Error::Vanished { task: self.task.task }),
        };
        let mut cancelled = matches!(ended_by, Some(Signal::Cancelled(..)));
        let remains = worker.finish(|| {
            while let Ok(signal) = self.received.try_recv() {
                cancelled |= matches!(signal, Signal::Cancelled(..));
                if ended_by.is_none() && !matches!(signal, Signal::Exited) {
                    ended_by = Some(signal);
                }
            }
            cancelled
        })?;
        // A failure is reported first: a peer's report of the consequence must not overtake that of
        // the cause.
        let (first, last) =
            if remains.how.is_success() { (gathered, None) } else { (None, gathered) };
        if let Some(gathered) = first {
            gathered.send(client, self.time_of(ended_by.as_ref()));
        }
        let outcome = self.report(client, place, remains, ended_by);
        if let Some(gathered) = last {
            gathered.send(client, LATE_REPORT);
        }
        Ok(outcome)
    }

    fn start(&self, client: &Client, place: &Place) -> (Start, Option<Gathered>) {
        let mut environment = self.task.environment.clone();
        let gathered = Gathered::asked(&mut environment);
        if farandole_config::environment(UNBUFFERED).is_none() {
            // A line is seen when it is printed, and not lost with a killed worker.
            environment.entry(UNBUFFERED.to_owned()).or_insert_with(|| Some("1".to_owned()));
        }
        environment.extend(place.variables.clone());
        let take_line: TakeLine = match &self.task.output {
            Output::Registrar => {
                let client = client.clone();
                Arc::new(move |stream, text| {
                    // A fork of this process has no reader threads, so this cannot be one.
                    drop(client.log(stream, &text));
                })
            }
            Output::Sink(sink) => {
                let (sink, task, rank) =
                    (Arc::clone(sink), self.task.task.0, place.rank.map(|rank| rank.0));
                Arc::new(move |stream, text| {
                    sink.accept(Record::Log(LogLine { task, rank, stream, text }))
                })
            }
        };
        let start = Start {
            command: self.task.command.clone(),
            environment,
            payload: self.task.payload.clone(),
            collect_result: self.task.collect_result,
            take_line,
        };
        (start, gathered)
    }

    /// Reports a success and waits until the others have ended, or until it is cancelled.
    fn exit_together(
        &self,
        client: &Client,
        exit: &Exit,
    ) -> farandole_registrar::Result<Option<Verdict>> {
        loop {
            if let Poll::Ready(verdict) = client.exit_together(exit, Instant::now() + REPORT)? {
                return Ok(verdict);
            }
            while let Ok(signal) = self.received.try_recv() {
                if let Signal::Cancelled(_, reason) = signal {
                    return Ok(Some(Verdict { reason, cause: None, retry: false }));
                }
            }
        }
    }

    fn exited_by(&self, manner: Manner, deadline: Instant) -> Waited {
        loop {
            match self.received.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Signal::Exited) => return Waited::Exited,
                Ok(Signal::Cancelled(harsher, _)) if harsher > manner => {
                    return Waited::Hurried(harsher);
                }
                Ok(_) => {}
                Err(_) => return Waited::Passed,
            }
        }
    }

    /// Returns the longest time for the report of a worker's end.
    fn time_of(&self, ended_by: Option<&Signal>) -> Duration {
        match ended_by {
            Some(Signal::Stop(_)) => LATE_REPORT,
            Some(Signal::Cancelled(..)) => CANCELLED_REPORT,
            _ => REPORT.max(self.task.outage),
        }
    }

    /// Reports to the registrar, and learns which task failed first.
    fn report(
        &self,
        client: &Client,
        place: &Place,
        remains: Remains,
        ended_by: Option<Signal>,
    ) -> Outcome {
        let Remains { how, stderr_tail, result } = remains;
        let stopped = matches!(ended_by, Some(Signal::Stop(_)));
        let deadline = Instant::now() + self.time_of(ended_by.as_ref());
        let peer_error = !how.is_success() && stderr_tail.iter().any(|line| is_peer_error(line));
        let exit = Exit { how: how.clone(), peer_error, stopped, stderr_tail: stderr_tail.clone() };
        let told = client.flush(deadline).and_then(|()| {
            if let Some(result) = result.as_deref().filter(|result| result.len() <= MAX_RESULT)
                && !stopped
            {
                client.result(result, deadline)?;
            }
            Ok(())
        });
        if let Err(error) = &told {
            tracing::warn!(%error, task = self.task.task.0, "output or result did not reach the \
                                                             driver");
        }
        let verdict = if self.task.together && how.is_success() && ended_by.is_none() {
            self.exit_together(client, &exit)
        } else {
            client.exit(&exit, deadline)
        };
        let outcome = Outcome {
            rank: place.rank,
            size: place.size,
            how: Some(how.clone()),
            stderr_tail,
            result,
            aborted: false,
            reason: None,
            retry: false,
        };
        match (ended_by, verdict) {
            (Some(Signal::Stop(verdict)), _) => Outcome {
                aborted: true,
                reason: Some(verdict.reason),
                retry: verdict.retry,
                ..outcome
            },
            (Some(Signal::Cancelled(_, reason)), _) => {
                Outcome { aborted: true, reason: Some(reason), ..outcome }
            }
            (_, Ok(None)) => outcome,
            (_, Ok(Some(verdict))) => {
                let aborted = verdict.cause != Some(self.task.task);
                Outcome {
                    aborted,
                    reason: Some(verdict.reason),
                    retry: aborted && verdict.retry,
                    ..outcome
                }
            }
            // A success that could not be reported is still one: its result travels by other ways,
            // too.
            (_, Err(_)) if how.is_success() => outcome,
            (_, Err(error)) => {
                let who = match place.rank {
                    Some(rank) => format!("rank {rank}"),
                    None => format!("task {}", self.task.task),
                };
                let reason = format!("{who} {how} ({error})");
                Outcome { reason: Some(reason), ..outcome }
            }
        }
    }
}

/// Returns whether a line of a traceback ends it with a peer's error.
fn is_peer_error(line: &str) -> bool {
    let class = line.split(':').next().unwrap_or_default();
    let name = class.rsplit('.').next().unwrap_or_default().trim_end();
    PEER_ERRORS.contains(&name) && !class.starts_with(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_error_is_known_by_the_last_line_of_its_traceback() {
        assert!(is_peer_error("farandole.common.exceptions.FarandoleInternalError: lost rank 1"));
        assert!(is_peer_error("HorovodInternalError"));
        assert!(!is_peer_error("    raise FarandoleInternalError(message)"));
        assert!(!is_peer_error("ValueError: not a FarandoleInternalError"));
    }
}
