// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Simulated jobs: each seed is one history of workers that end or fail, hosts that die, and
//! connections that break, fall silent or never answer. The registrar of the model hears each agent
//! whose host lives, loses the others after [`HEARTBEAT_TIMEOUT`], and blames the first failure.

use std::collections::BTreeMap;

use farandole_world::Generation;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::tests::{conductor, world_of};
use super::*;
use crate::report::JobReport;

const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
const NUM_HISTORIES: u64 = 4_000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum ConnectionFate {
    Works,
    /// Nothing comes any more, and the connection stays open.
    FallsSilent(Duration),
    Breaks(Duration),
    /// It ends before the agent has its order.
    NeverAnswers,
}

#[derive(Debug)]
enum SimulatedEvent {
    /// A worker ends with this code by itself.
    WorkerEnds(u32, i32),
    /// A worker was told to end.
    WorkerStops(u32),
    HostDies(usize),
    /// The registrar has waited long enough for other failures.
    VerdictIsDue(GenerationVerdict),
    Input(ConductorInput),
    /// A worker's agent reports by its connection, if that still works.
    Report(u32),
}

#[derive(Debug)]
struct SimulatedWorker {
    channel: WorkerExitChannel,
    end: Option<(ExitKind, bool)>,
    is_dead: bool,
}

struct SimulatedJob {
    rng: StdRng,
    elastic: bool,
    now: Duration,
    queue: BTreeMap<(Duration, usize), SimulatedEvent>,
    num_events: usize,
    workers: BTreeMap<u32, SimulatedWorker>,
    fates: Vec<ConnectionFate>,
    dead_hosts: Vec<usize>,
    verdict: Option<GenerationVerdict>,
    is_finished: bool,
    interrupted: bool,
    conductor: Conductor,
}

fn milliseconds(rng: &mut StdRng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.random_range(range))
}

impl SimulatedJob {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let elastic = rng.random_bool(0.5);
        let mut job = Self {
            elastic,
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            num_events: 0,
            workers: BTreeMap::new(),
            fates: Vec::new(),
            dead_hosts: Vec::new(),
            verdict: None,
            is_finished: false,
            interrupted: false,
            conductor: conductor(elastic),
            rng,
        };
        job.place_workers();
        job
    }

    fn place_workers(&mut self) {
        let num_connections = self.rng.random_range(0..4_usize);
        let mut task = 0;
        for connection in 0..=num_connections {
            let tasks: Vec<u32> = (task..task + self.rng.random_range(1..3)).collect();
            task += u32::try_from(tasks.len()).unwrap();
            let is_here = connection == num_connections;
            let channel = if is_here {
                WorkerExitChannel::Thread
            } else {
                WorkerExitChannel::Connection(connection)
            };
            let worker = |task| (task, SimulatedWorker { channel, end: None, is_dead: false });
            self.workers.extend(tasks.iter().copied().map(worker));
            if is_here {
                tasks.iter().for_each(|task| self.conductor.expect_worker_end(*task, channel));
                continue;
            }
            let host = format!("host-{connection}");
            self.conductor.expect_ends_from_connection(self.now, host, tasks);
            let at = milliseconds(&mut self.rng, 2_000..20_000);
            let fate = match self.rng.random_range(0..12) {
                0 => ConnectionFate::FallsSilent(at),
                1 => ConnectionFate::Breaks(at),
                2 => ConnectionFate::NeverAnswers,
                _ => ConnectionFate::Works,
            };
            self.fates.push(fate);
            let error =
                Error::Host { host: format!("host-{connection}"), reason: "it ended".to_owned() };
            let lost = SimulatedEvent::Input(ConductorInput::ConnectionLost { connection, error });
            let soon = milliseconds(&mut self.rng, 0..1_000);
            let ready = SimulatedEvent::Input(ConductorInput::ConnectionReady { connection });
            match fate {
                ConnectionFate::NeverAnswers => self.schedule(soon, lost),
                ConnectionFate::Breaks(at) => {
                    self.schedule(soon, ready);
                    self.schedule(at, lost);
                }
                _ => self.schedule(soon, ready),
            }
            if self.rng.random_bool(0.1) {
                let at = milliseconds(&mut self.rng, 2_000..20_000);
                self.schedule(at, SimulatedEvent::HostDies(connection));
            }
        }
        // Without an answer of every host, no world forms and no worker starts.
        if self.fates.contains(&ConnectionFate::NeverAnswers) {
            return;
        }
        let tasks: Vec<u32> = self.workers.keys().copied().collect();
        for &task in &tasks {
            let registered = JobEvent::Registered { task: TaskId(task) };
            self.schedule_registrar(Duration::from_millis(1_000), registered);
            let at = milliseconds(&mut self.rng, 2_000..20_000);
            let code = if self.rng.random_bool(0.1) { self.rng.random_range(1..9) } else { 0 };
            self.schedule(at, SimulatedEvent::WorkerEnds(task, code));
        }
        let world = world_of(&tasks);
        self.schedule_registrar(Duration::from_millis(1_001), JobEvent::Assigned { world });
        if self.rng.random_bool(0.1) {
            let at = milliseconds(&mut self.rng, 0..20_000);
            let level = [StopLevel::Interrupt, StopLevel::Terminate][self.rng.random_range(0..2)];
            self.schedule(at, SimulatedEvent::Input(ConductorInput::StopWanted(level)));
        }
    }

    /// Schedules an event so long after the present.
    fn schedule(&mut self, after: Duration, event: SimulatedEvent) {
        self.num_events += 1;
        self.queue.insert((self.now + after, self.num_events), event);
    }

    fn schedule_registrar(&mut self, after: Duration, event: JobEvent) {
        self.schedule(after, SimulatedEvent::Input(ConductorInput::Registrar(event)));
    }

    /// Runs the history until the conductor is done.
    fn run(mut self, seed: u64) -> Self {
        let mut last_event = Duration::ZERO;
        while !self.conductor.is_done() {
            assert!(
                self.now < last_event + JOB_END_TIMEOUT * 2,
                "seed {seed}: CO-1: nothing is to happen since {last_event:?}: {:?}",
                self.conductor
            );
            self.now += Duration::from_millis(100);
            while let Some(entry) = self.queue.first_entry()
                && entry.key().0 <= self.now
            {
                let event = entry.remove();
                last_event = self.now;
                self.happen(event);
            }
            self.advance(None);
        }
        self
    }

    fn happen(&mut self, event: SimulatedEvent) {
        match event {
            SimulatedEvent::Input(input) => self.advance(Some(input)),
            SimulatedEvent::WorkerEnds(task, code) => {
                self.end_worker(task, ExitKind::Code(code), false);
            }
            SimulatedEvent::WorkerStops(task) => {
                self.end_worker(task, ExitKind::Signal(15), true);
            }
            SimulatedEvent::HostDies(connection) => self.lose_host(connection),
            SimulatedEvent::VerdictIsDue(verdict) => self.decide(verdict),
            SimulatedEvent::Report(task) => self.report(task),
        }
    }

    fn end_worker(&mut self, task: u32, kind: ExitKind, stopped: bool) {
        let worker = self.workers.get_mut(&task).unwrap();
        if worker.is_dead || worker.end.is_some() {
            return;
        }
        worker.end = Some((kind.clone(), stopped));
        let has_failed = !kind.is_success() && !stopped;
        let exit =
            ExitReport { kind: kind.clone(), peer_error: false, stopped, stderr_tail: Vec::new() };
        if kind.is_success() {
            let result = JobEvent::Result { task: TaskId(task), rank: Rank(task), data: vec![1] };
            self.advance(Some(ConductorInput::Registrar(result)));
        }
        let exited = JobEvent::Exited { task: TaskId(task), rank: Rank(task), exit };
        self.advance(Some(ConductorInput::Registrar(exited)));
        if has_failed && !self.interrupted && self.verdict.is_none() {
            self.blame(task, format!("rank {task} {kind}"));
        } else {
            let after = milliseconds(&mut self.rng, 0..3_000);
            self.schedule(after, SimulatedEvent::Report(task));
        }
        let well = |one: &SimulatedWorker| one.end == Some((ExitKind::Code(0), false));
        if self.elastic && self.verdict.is_none() && self.workers.values().all(well) {
            self.is_finished = true;
            let finished = JobEvent::Finished { generation: Generation(1) };
            self.advance(Some(ConductorInput::Registrar(finished)));
        }
    }

    fn lose_host(&mut self, connection: usize) {
        self.dead_hosts.push(connection);
        let channel = WorkerExitChannel::Connection(connection);
        let lost: Vec<u32> = self
            .workers
            .iter_mut()
            .filter(|(_, worker)| worker.channel == channel && worker.end.is_none())
            .map(|(task, worker)| {
                worker.is_dead = true;
                *task
            })
            .collect();
        for task in lost {
            let after = HEARTBEAT_TIMEOUT + milliseconds(&mut self.rng, 0..500);
            let reason = "was silent".to_owned();
            let event = JobEvent::Lost { task: TaskId(task), rank: Some(Rank(task)), reason };
            self.schedule_registrar(after, event);
            let reason = format!("rank {task} was lost");
            let verdict = GenerationVerdict { reason, cause: Some(TaskId(task)), retry: true };
            self.schedule(after, SimulatedEvent::VerdictIsDue(verdict));
        }
    }

    /// Makes the registrar decide after a grace period in which nobody fails earlier.
    fn blame(&mut self, task: u32, reason: String) {
        let verdict = GenerationVerdict { reason, cause: Some(TaskId(task)), retry: false };
        // The registrar waits longer if peers of a silent rank failed first.
        let after = if self.rng.random_bool(0.5) { 500 } else { 7_000 };
        self.schedule(Duration::from_millis(after), SimulatedEvent::VerdictIsDue(verdict));
    }

    fn decide(&mut self, verdict: GenerationVerdict) {
        if self.verdict.is_some() || self.is_finished {
            return;
        }
        self.verdict = Some(verdict.clone());
        let rank = verdict.cause.map(|task| Rank(task.0));
        self.advance(Some(ConductorInput::Registrar(JobEvent::Aborted { verdict, rank })));
        let tasks: Vec<u32> = self.workers.keys().copied().collect();
        for task in tasks {
            let after = milliseconds(&mut self.rng, 0..3_000);
            // An agent whose worker has failed waits for the verdict before it reports.
            let has_ended = self.workers[&task].end.is_some();
            let event = if has_ended {
                SimulatedEvent::Report(task)
            } else {
                SimulatedEvent::WorkerStops(task)
            };
            self.schedule(after, event);
        }
    }

    /// Passes on a worker's end by its agent's own channel.
    fn report(&mut self, task: u32) {
        let worker = &self.workers[&task];
        if let WorkerExitChannel::Connection(connection) = worker.channel {
            let is_open = match self.fates[connection] {
                ConnectionFate::Works => true,
                ConnectionFate::FallsSilent(at) | ConnectionFate::Breaks(at) => self.now < at,
                ConnectionFate::NeverAnswers => false,
            };
            if !is_open || self.dead_hosts.contains(&connection) {
                return;
            }
            let active = ConductorInput::ConnectionActive { connection, at: self.now };
            self.advance(Some(active));
        }
        let Some((kind, stopped)) = self.workers[&task].end.clone() else { return };
        let cause = self.verdict.as_ref().and_then(|verdict| verdict.cause);
        let has_failed = !kind.is_success();
        let outcome = WorkerOutcome {
            rank: Some(Rank(task)),
            aborted: has_failed && (stopped || cause != Some(TaskId(task))),
            reason: self
                .verdict
                .as_ref()
                .filter(|_| has_failed)
                .map(|verdict| verdict.reason.clone()),
            exit_kind: Some(kind),
            ..WorkerOutcome::outcome_without_worker(String::new())
        };
        let outcome = WorkerOutcome { result: Some(Vec::new()), ..outcome };
        self.advance(Some(ConductorInput::WorkerEnded { task, outcome }));
    }

    fn advance(&mut self, input: Option<ConductorInput>) {
        for action in self.conductor.step(self.now, input) {
            match action {
                ConductorAction::AbortJob { reason } => {
                    let verdict = GenerationVerdict { reason, cause: None, retry: false };
                    self.schedule(Duration::ZERO, SimulatedEvent::VerdictIsDue(verdict));
                }
                ConductorAction::ReportNotStarted { task, reason } => {
                    if self.workers[&task].end.is_none() {
                        // The registrar orders the end of a worker that it counts as lost.
                        self.blame(task, reason);
                        self.end_worker(task, ExitKind::Signal(15), true);
                    }
                }
                ConductorAction::CancelWorker { task, .. } => {
                    self.schedule(Duration::ZERO, SimulatedEvent::WorkerStops(task));
                }
                ConductorAction::ApplyStopLevel(_) => {
                    self.interrupted = true;
                    let tasks: Vec<u32> = self.workers.keys().copied().collect();
                    for task in tasks {
                        let after = milliseconds(&mut self.rng, 0..3_000);
                        self.schedule(after, SimulatedEvent::WorkerStops(task));
                    }
                }
                ConductorAction::StartWorkers { .. }
                | ConductorAction::CloseConnection(_)
                | ConductorAction::ShowWorld(_)
                | ConductorAction::ShowLoss(_) => {}
            }
        }
    }
}

/// Checks `CO-2` and `CO-3`.
fn check_report(seed: u64, job: SimulatedJob) {
    let SimulatedJob { conductor, workers, verdict, fates, dead_hosts, interrupted, .. } = job;
    let has_lost_hosts =
        !dead_hosts.is_empty() || fates.iter().any(|fate| !matches!(fate, ConnectionFate::Works));
    let have_all_succeeded =
        workers.values().all(|worker| worker.end == Some((ExitKind::Code(0), false)));
    let report: JobReport = match conductor.into_report() {
        Ok(report) => report,
        Err(error) => {
            assert!(has_lost_hosts && !have_all_succeeded, "seed {seed}: CO-2: {error}");
            return;
        }
    };
    assert_eq!(report.interrupted, interrupted, "seed {seed}");
    if interrupted {
        return;
    }
    assert_eq!(
        (report.exit_code() == 0, report.job_failure_reason().is_none()),
        (have_all_succeeded, have_all_succeeded),
        "seed {seed}: CO-2: {workers:?} {report:?}"
    );
    let Some(verdict) = verdict else { return };
    if have_all_succeeded {
        return;
    }
    assert_eq!(report.job_failure_reason(), Some(verdict.reason.as_str()), "seed {seed}: CO-3");
    let blamed = verdict.cause.map(|task| &workers[&task.0]);
    // A worker may succeed after its connection broke.
    if let Some(SimulatedWorker { end: Some((ExitKind::Code(code), false)), .. }) = blamed
        && *code != 0
    {
        assert_eq!(report.exit_code(), *code, "seed {seed}: CO-3: {verdict:?} {report:?}");
    }
}

#[test]
fn a_job_ends_by_its_deadlines_succeeds_with_its_workers_and_blames_the_first_failure() {
    let (mut successes, mut failures) = (0, 0);
    for seed in 0..NUM_HISTORIES {
        let job = SimulatedJob::new(seed).run(seed);
        if job.verdict.is_none() {
            successes += 1
        } else {
            failures += 1
        }
        check_report(seed, job);
    }
    assert!(successes > NUM_HISTORIES / 10 && failures > NUM_HISTORIES / 10);
}
