// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Single decisions of the conductor.

use farandole_world::{Generation, HostHash, TaskPlacement, assign_ranks_as_listed};

use super::*;
use crate::report::JobReport;

const NOW: Duration = Duration::from_secs(7);

/// Returns a world of these tasks, by rank.
pub(super) fn world_of(tasks: &[u32]) -> World {
    let place = |task: &u32| TaskPlacement { task: TaskId(*task), host: HostHash("a".to_owned()) };
    let places: Vec<TaskPlacement> = tasks.iter().map(place).collect();
    assign_ranks_as_listed(Generation(1), &places).unwrap()
}

pub(super) fn conductor(elastic: bool) -> Conductor {
    let exit_report_timeout = JOB_END_TIMEOUT;
    Conductor::new(ConductorRules { elastic, collect_result: true, exit_report_timeout })
}

fn outcome(code: i32) -> WorkerOutcome {
    WorkerOutcome {
        exit_kind: Some(ExitKind::Code(code)),
        aborted: false,
        reason: None,
        ..WorkerOutcome::outcome_without_worker(String::new())
    }
}

fn exited(task: u32, rank: u32, kind: ExitKind, stopped: bool) -> ConductorInput {
    let exit = ExitReport { kind, peer_error: false, stopped, stderr_tail: vec!["end".to_owned()] };
    ConductorInput::Registrar(JobEvent::Exited { task: TaskId(task), rank: Rank(rank), exit })
}

fn returned(task: u32, data: u8) -> ConductorInput {
    let event = JobEvent::Result { task: TaskId(task), rank: Rank(0), data: vec![data] };
    ConductorInput::Registrar(event)
}

fn aborted(cause: Option<u32>, rank: Option<u32>) -> ConductorInput {
    let cause = cause.map(TaskId);
    let verdict = GenerationVerdict { reason: "why".to_owned(), cause, retry: false };
    ConductorInput::Registrar(JobEvent::Aborted { verdict, rank: rank.map(Rank) })
}

fn ended(task: u32, outcome: WorkerOutcome) -> ConductorInput {
    ConductorInput::WorkerEnded { task, outcome }
}

/// Returns the report of an elastic job with workers in threads of this process.
fn elastic_report(ranks: &[u32], tasks: &[u32], inputs: Vec<ConductorInput>) -> JobReport {
    let mut conductor = conductor(true);
    tasks.iter().for_each(|task| conductor.expect_worker_end(*task, WorkerExitChannel::Thread));
    if !ranks.is_empty() {
        conductor.set_world(world_of(ranks));
    }
    conductor.step(NOW, inputs);
    conductor.into_report().unwrap()
}

/// Returns a job of a fixed size whose tasks are behind one connection, which ended while the
/// registrar heard the agents.
fn disconnected_job(tasks: &[u32]) -> Conductor {
    let mut conductor = conductor(false);
    conductor.expect_ends_from_connection(NOW, "far".to_owned(), tasks.to_vec());
    let mut inputs = vec![ConductorInput::ConnectionReady { connection: 0 }];
    inputs.extend(
        tasks
            .iter()
            .map(|task| ConductorInput::Registrar(JobEvent::Registered { task: TaskId(*task) })),
    );
    inputs.push(ConductorInput::Registrar(JobEvent::Assigned { world: world_of(tasks) }));
    let error = Error::Host { host: "far".to_owned(), reason: "the connection ended".to_owned() };
    inputs.push(ConductorInput::ConnectionLost { connection: 0, error });
    let actions = conductor.step(NOW, inputs);
    assert!(matches!(actions[..], [ConductorAction::ShowWorld(_)]), "{actions:?}");
    conductor
}

#[test]
fn a_success_is_believed_at_once_and_a_failure_once_its_cause_is_known() {
    let mut conductor = disconnected_job(&[0, 1]);
    let both = [
        exited(0, 0, ExitKind::Code(0), false),
        returned(0, 7),
        exited(1, 1, ExitKind::Code(3), false),
    ];
    conductor.step(NOW, both);
    assert!(conductor.tasks[&0].awaited.is_none() && conductor.tasks[&1].awaited.is_some());
    conductor.step(NOW, [aborted(Some(1), Some(1))]);
    assert!(conductor.is_done());
    let outcomes = conductor.into_report().unwrap().outcomes;
    let [first, second] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(first.is_success() && first.result == Some(vec![7]) && first.size == Some(2));
    assert!(!second.aborted && second.reason.as_deref() == Some("why"));
    assert_eq!(second.stderr_tail, ["end"]);
}

#[test]
fn a_worker_that_was_ended_is_not_the_cause() {
    for (stopped, interrupted, aborted) in
        [(true, false, true), (false, true, true), (false, false, false)]
    {
        let mut conductor = disconnected_job(&[0]);
        let level = if interrupted { StopLevel::Interrupt } else { StopLevel::Continue };
        let inputs = [ConductorInput::StopWanted(level), exited(0, 0, ExitKind::Code(1), stopped)];
        conductor.step(NOW, inputs);
        assert!(!conductor.is_done(), "the verdict may follow");
        conductor.step(NOW + EXIT_CONFIRMATION_TIMEOUT, []);
        let report = conductor.into_report().unwrap();
        assert_eq!(report.outcomes[0].aborted, aborted);
        assert_eq!(report.outcomes[0].reason.as_deref(), Some("rank 0 exited with code 1"));
    }
}

#[test]
fn a_result_that_came_by_neither_channel_is_an_error_that_names_the_host() {
    let mut conductor = disconnected_job(&[0]);
    conductor.step(NOW, [exited(0, 0, ExitKind::Code(0), false)]);
    let error = conductor.into_report().unwrap_err().to_string();
    assert!(error.starts_with("far: the result of task 0 has more than"), "{error}");
}

#[test]
fn the_end_of_a_connection_is_the_reason_once_the_registrar_has_lost_its_agents() {
    let mut conductor = disconnected_job(&[0, 1]);
    let lost =
        JobEvent::Lost { task: TaskId(1), rank: Some(Rank(1)), reason: "was silent".to_owned() };
    let actions = conductor.step(NOW, [ConductorInput::Registrar(lost)]);
    let abort = actions.iter().any(|one| {
        matches!(one, ConductorAction::AbortJob { reason } if reason == "far: the connection ended")
    });
    assert!(abort && conductor.is_done(), "{actions:?}");
    assert_eq!(conductor.into_report().unwrap_err().to_string(), "far: the connection ended");
}

#[test]
fn a_job_that_finished_has_the_ends_of_its_last_world_by_rank() {
    let finished = JobEvent::Finished { generation: Generation(1) };
    let report = elastic_report(
        &[7, 2],
        &[5, 7, 2],
        vec![
            ended(5, outcome(1)),
            // The agent of rank 0 was ended with the job, after its worker had succeeded.
            ended(7, WorkerOutcome { aborted: true, ..outcome(0) }),
            // The connection to rank 1 broke: its result came through the registrar.
            returned(2, 9),
            ConductorInput::Registrar(finished),
        ],
    );
    assert_eq!((report.exit_code(), report.job_failure_reason()), (0, None));
    let found: Vec<_> = report
        .outcomes
        .iter()
        .map(|one| (one.rank.unwrap().0, one.size, one.result.clone()))
        .collect();
    assert_eq!(found, [(0, Some(2), None), (1, Some(2), Some(vec![9]))]);
}

#[test]
fn a_failed_job_has_the_exit_code_of_its_cause_and_the_verdicts_words() {
    let report = elastic_report(
        &[7, 2],
        &[7, 2],
        vec![
            ended(7, outcome(0)),
            ended(2, outcome(3)),
            aborted(Some(2), Some(1)),
            aborted(None, None),
        ],
    );
    assert_eq!((report.exit_code(), report.job_failure_reason()), (3, Some("why")));
    assert_eq!(report.first_failure().unwrap().rank, Some(Rank(1)));
}

#[test]
fn a_worker_that_failed_before_there_was_a_world_is_the_cause() {
    let report = elastic_report(
        &[],
        &[0, 1],
        vec![
            exited(0, 0, ExitKind::Signal(9), false),
            exited(1, 1, ExitKind::Code(4), false),
            ended(1, outcome(4)),
            aborted(None, None),
        ],
    );
    assert_eq!(report.exit_code(), 4);
}

#[test]
fn a_job_without_a_failed_worker_is_still_a_failure() {
    let report = elastic_report(&[], &[], vec![aborted(None, None)]);
    assert_eq!((report.exit_code(), report.job_failure_reason()), (1, Some("why")));
    let report = elastic_report(&[], &[], vec![ConductorInput::StopWanted(StopLevel::Interrupt)]);
    assert_eq!((report.exit_code(), report.job_failure_reason()), (1, Some("interrupted")));
    assert!(report.interrupted);
}

#[test]
fn workers_of_one_host_are_started_together_and_none_after_the_end() {
    let start = |task, host: &str| {
        ConductorInput::Registrar(JobEvent::Start { task: TaskId(task), host: host.to_owned() })
    };
    let starts = || vec![start(0, "a"), start(1, "a"), start(2, "b")];
    let started: Vec<(String, Vec<u32>)> = conductor(true)
        .step(NOW, starts())
        .into_iter()
        .map(|action| match action {
            ConductorAction::StartWorkers { host, tasks } => (host, tasks),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(started, [("a".to_owned(), vec![0, 1]), ("b".to_owned(), vec![2])]);
    let mut over = conductor(true);
    let inputs = starts().into_iter().chain([aborted(None, None)]);
    assert!(over.step(NOW, inputs).is_empty() && over.is_done());
}

#[test]
fn an_interrupted_worker_keeps_its_time_for_a_checkpoint_when_another_has_ended() {
    let stop = |task| {
        ConductorInput::Registrar(JobEvent::Stop { task: TaskId(task), reason: "why".to_owned() })
    };
    let is_cancel =
        |action: &ConductorAction| matches!(action, ConductorAction::CancelWorker { .. });
    for level in [StopLevel::Continue, StopLevel::Interrupt] {
        let mut conductor = conductor(true);
        (0..2).for_each(|task| conductor.expect_worker_end(task, WorkerExitChannel::Thread));
        conductor.step(NOW, [ConductorInput::StopWanted(level)]);
        let faster = exited(0, 0, ExitKind::Code(3), false);
        let actions = conductor.step(NOW, [faster, ended(0, outcome(3)), stop(1)]);
        assert_eq!(actions.iter().any(is_cancel), level == StopLevel::Continue, "{actions:?}");
        let actions = conductor.step(NOW, [aborted(Some(0), Some(0))]);
        assert_eq!(actions.iter().any(is_cancel), level == StopLevel::Continue, "{actions:?}");
        assert!(!conductor.is_done(), "the end of the slower worker is awaited");
    }
}
