// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::exit::{ExitKind, ExitReport};

const OPTIONS: MembershipOptions = MembershipOptions {
    tasks: 3,
    liveness: LivenessLimits {
        heartbeat_timeout: Duration::from_secs(5),
        disconnect_grace: Duration::from_secs(1),
    },
    failure_grace: Duration::from_millis(500),
    in_order: false,
};

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn host(name: &str) -> HostHash {
    HostHash(name.into())
}

fn exit(kind: ExitKind) -> ExitReport {
    ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() }
}

/// A job whose three tasks run generation 1, registered at time 0 with sessions 0, 1, 2.
fn running() -> FixedMembership {
    let mut job = FixedMembership::new(OPTIONS);
    for task in 0..3 {
        job.register_task(at(0), TaskId(task), 0, u64::from(task), host("a")).unwrap();
    }
    job
}

fn exited(
    job: &mut FixedMembership,
    ms: u64,
    task: u32,
    exit: ExitReport,
) -> Vec<MembershipDecision> {
    job.apply_membership_input(
        at(ms),
        MembershipInput::Exited { task: TaskId(task), generation: Generation(1), exit },
    )
}

fn verdicts(decisions: &[MembershipDecision]) -> Vec<&GenerationVerdict> {
    decisions
        .iter()
        .filter_map(|decision| match decision {
            MembershipDecision::Stop { verdict, .. } => Some(verdict),
            _ => None,
        })
        .collect()
}

#[test]
fn tasks_that_have_ranks_keep_them_on_whichever_hosts_they_are() {
    // MB-1, W-4.
    let seats = |in_order| -> Vec<u32> {
        let mut job = FixedMembership::new(MembershipOptions { in_order, ..OPTIONS });
        let mut last = Vec::new();
        for (task, name) in [(2, "a"), (0, "a"), (1, "b")] {
            last =
                job.register_task(at(0), TaskId(task), 0, u64::from(task), host(name)).unwrap().1;
        }
        let Some(MembershipDecision::Assigned { world }) = last.pop() else { panic!("{last:?}") };
        world.seats.iter().map(|seat| seat.task.0).collect()
    };
    assert_eq!(seats(true), [0, 1, 2]);
    assert_eq!(seats(false), [0, 2, 1]);
}

#[test]
fn the_last_registration_assigns_every_task() {
    // MB-1.
    let mut job = FixedMembership::new(OPTIONS);
    job.register_task(at(0), TaskId(2), 0, 1, host("b")).unwrap();
    job.register_task(at(0), TaskId(0), 0, 2, host("a")).unwrap();
    assert_eq!(job.missing_tasks().collect::<Vec<_>>(), [TaskId(1)]);
    let (generation, decisions) = job.register_task(at(1), TaskId(1), 0, 3, host("b")).unwrap();
    assert_eq!(generation, Generation(1));
    let Some(MembershipDecision::Assigned { world }) = decisions.last() else {
        panic!("no world: {decisions:?}")
    };
    let tasks: Vec<u32> = world.seats.iter().map(|seat| seat.task.0).collect();
    assert_eq!(tasks, [0, 1, 2]);
}

#[test]
fn unknown_duplicate_and_stale_registrations_are_refused() {
    // MB-3.
    let mut job = FixedMembership::new(OPTIONS);
    assert!(matches!(
        job.register_task(at(0), TaskId(3), 0, 1, host("a")),
        Err(RegistrationRefusal::UnknownTask { last: 2, .. })
    ));
    job.register_task(at(0), TaskId(0), 4, 1, host("a")).unwrap();
    assert_eq!(
        job.register_task(at(0), TaskId(0), 4, 1, host("a")).unwrap(),
        (Generation(1), vec![])
    );
    assert!(matches!(
        job.register_task(at(0), TaskId(0), 4, 2, host("a")),
        Err(RegistrationRefusal::Duplicate { .. })
    ));
    assert!(matches!(
        job.register_task(at(0), TaskId(0), 3, 3, host("a")),
        Err(RegistrationRefusal::Stale { current: 4, .. })
    ));
    assert!(job.register_task(at(0), TaskId(0), 5, 4, host("a")).is_ok());
}

#[test]
fn a_newer_attempt_ends_the_generation_and_all_newer_attempts_make_the_next() {
    let mut job = running();
    let (generation, decisions) = job.register_task(at(10), TaskId(1), 1, 11, host("a")).unwrap();
    assert_eq!(generation, Generation(2));
    assert_eq!(verdicts(&decisions)[0].reason, "task 1 was started again, as attempt 1");
    job.register_task(at(11), TaskId(0), 1, 12, host("a")).unwrap();
    let (_, decisions) = job.register_task(at(12), TaskId(2), 1, 13, host("a")).unwrap();
    assert!(
        matches!(decisions.last(), Some(MembershipDecision::Assigned { world }) if world.generation == Generation(2))
    );
    // What the old generation still says changes nothing.
    assert_eq!(exited(&mut job, 13, 0, exit(ExitKind::Signal(9))), []);
}

#[test]
fn a_signal_outweighs_an_earlier_peer_error() {
    // MB-4.
    let mut job = running();
    assert_eq!(
        exited(&mut job, 100, 0, ExitReport { peer_error: true, ..exit(ExitKind::Code(1)) }),
        []
    );
    assert_eq!(exited(&mut job, 150, 2, exit(ExitKind::Signal(9))), []);
    assert_eq!(job.apply_membership_input(at(599), MembershipInput::Tick), []);
    let decisions = job.apply_membership_input(at(600), MembershipInput::Tick);
    let verdict = verdicts(&decisions)[0];
    assert_eq!(verdict.cause, Some(TaskId(2)));
    assert_eq!(verdict.reason, "rank 2 on a was ended by SIGKILL");
}

#[test]
fn a_lone_peer_error_waits_for_the_loss_that_caused_it() {
    let mut job = running();
    exited(&mut job, 100, 0, ExitReport { peer_error: true, ..exit(ExitKind::Code(1)) });
    assert_eq!(job.apply_membership_input(at(2_000), MembershipInput::Tick), []);
    job.apply_membership_input(
        at(2_000),
        MembershipInput::Disconnected { task: TaskId(1), session: 1 },
    );
    job.apply_membership_input(
        at(2_900),
        MembershipInput::Heartbeat { task: TaskId(2), session: 2 },
    );
    let lost = job.apply_membership_input(at(3_000), MembershipInput::Tick);
    assert!(matches!(&lost[0], MembershipDecision::Lost { task: TaskId(1), .. }), "{lost:?}");
    let decisions = job.apply_membership_input(at(3_500), MembershipInput::Tick);
    let reasons = verdicts(&lost).into_iter().chain(verdicts(&decisions)).collect::<Vec<_>>();
    assert_eq!(reasons[0].reason, "rank 1 on a was lost: its agent's connection closed");
}

#[test]
fn an_agent_that_comes_back_in_time_is_not_lost() {
    let mut job = running();
    job.apply_membership_input(
        at(100),
        MembershipInput::Disconnected { task: TaskId(1), session: 1 },
    );
    job.apply_membership_input(at(900), MembershipInput::Heartbeat { task: TaskId(1), session: 1 });
    assert_eq!(job.apply_membership_input(at(2_000), MembershipInput::Tick), []);
}

#[test]
fn a_waiting_task_whose_connection_closes_may_register_again() {
    let mut job = FixedMembership::new(OPTIONS);
    job.register_task(at(0), TaskId(0), 0, 1, host("a")).unwrap();
    let decisions = job.apply_membership_input(
        at(1),
        MembershipInput::Disconnected { task: TaskId(0), session: 1 },
    );
    assert!(matches!(decisions[..], [MembershipDecision::Withdrawn { task: TaskId(0), .. }]));
    assert!(job.register_task(at(2), TaskId(0), 0, 2, host("a")).is_ok());
}

#[test]
fn an_earlier_start_of_a_task_is_not_let_in_when_the_later_one_was_lost_while_it_waited() {
    // MB-3: the rest of the earlier start would run beside the newer starts of the others.
    let mut job = FixedMembership::new(OPTIONS);
    job.register_task(at(0), TaskId(0), 1, 1, host("a")).unwrap();
    job.register_task(at(1), TaskId(0), 4, 2, host("a")).unwrap();
    job.apply_membership_input(
        at(2),
        MembershipInput::Disconnected { task: TaskId(0), session: 2 },
    );
    assert_eq!(
        job.register_task(at(3), TaskId(0), 1, 1, host("a")),
        Err(RegistrationRefusal::Stale { task: TaskId(0), attempt: 1, current: 4 })
    );
    assert!(job.register_task(at(4), TaskId(0), 4, 2, host("a")).is_ok());
}

#[test]
fn a_start_that_takes_the_place_of_a_waiting_one_is_distinguished() {
    let mut job = FixedMembership::new(OPTIONS);
    let registered = |job: &mut FixedMembership, attempt, session| {
        job.register_task(at(0), TaskId(0), attempt, session, host("a")).unwrap().1
    };
    let first = MembershipDecision::Registered { task: TaskId(0), session: 7, replaces: false };
    assert_eq!(registered(&mut job, 1, 7), [first]);
    let second = MembershipDecision::Registered { task: TaskId(0), session: 8, replaces: true };
    assert_eq!(registered(&mut job, 2, 8), [second]);
}

#[test]
fn all_exits_good_finish_the_job_and_nothing_follows() {
    // MB-5.
    let mut job = running();
    exited(&mut job, 1, 0, exit(ExitKind::Code(0)));
    exited(&mut job, 1, 1, exit(ExitKind::Code(0)));
    assert_eq!(
        exited(&mut job, 1, 2, exit(ExitKind::Code(0))),
        [MembershipDecision::Finished { generation: Generation(1) }]
    );
    assert!(matches!(
        job.register_task(at(2), TaskId(0), 9, 9, host("a")),
        Err(RegistrationRefusal::Finished { .. })
    ));
    assert_eq!(
        job.apply_membership_input(at(60_000), MembershipInput::Abort { reason: "late".into() }),
        []
    );
}

#[test]
fn when_all_tasks_have_ended_the_verdict_does_not_wait() {
    let mut job = running();
    exited(&mut job, 1, 0, exit(ExitKind::Code(0)));
    exited(&mut job, 1, 1, ExitReport { peer_error: true, ..exit(ExitKind::Code(1)) });
    let decisions = exited(&mut job, 2, 2, exit(ExitKind::Code(3)));
    assert_eq!(verdicts(&decisions)[0].reason, "rank 2 on a exited with code 3");
}

#[derive(Clone, Debug)]
enum Step {
    Register { task: u32, attempt: u64, session: u64, host: u8 },
    Beat { task: u32, session: u64 },
    Disconnected { task: u32, session: u64 },
    Exited { task: u32, generation: u64, code: i32, peer_error: bool },
    Abort,
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let (task, session) = (0u32..4, 0u64..12);
    prop_oneof![
        8 => (task.clone(), 0u64..4, session.clone(), 0u8..3)
            .prop_map(|(task, attempt, session, host)| Step::Register { task, attempt, session, host }),
        2 => (task.clone(), session.clone()).prop_map(|(task, session)| Step::Beat { task, session }),
        1 => (task.clone(), session).prop_map(|(task, session)| Step::Disconnected { task, session }),
        4 => (task, 1u64..4, 0i32..2, any::<bool>()).prop_map(|(task, generation, code, peer_error)| {
            Step::Exited { task, generation, code, peer_error }
        }),
        1 => Just(Step::Abort),
        2 => (0u64..6_000).prop_map(|ms| Step::Wait { ms }),
    ]
}

proptest! {
    #[test]
    fn any_history_keeps_the_invariants(steps in prop::collection::vec(step(), 1..80)) {
        let mut job = FixedMembership::new(OPTIONS);
        let mut now = Duration::ZERO;
        let mut last = 0;
        let mut stopped = BTreeSet::new();
        let mut ended = false;
        let mut attempts: BTreeMap<u32, u64> = BTreeMap::new();
        for step in steps {
            let decisions = match step {
                Step::Register { task, attempt, session, host: name } => {
                    match job.register_task(now, TaskId(task), attempt, session, host(&name.to_string())) {
                        Ok((generation, decisions)) => {
                            prop_assert!(task < 3 && !ended);
                            prop_assert!(generation.0 == job.generation().0 || generation.0 == job.generation().0 + 1);
                            if decisions.iter().any(|decision| matches!(decision, MembershipDecision::Registered { .. })) {
                                // MB-3; a withdrawn attempt is forgotten.
                                prop_assert!(attempts.get(&task).is_none_or(|old| attempt > *old));
                                attempts.insert(task, attempt);
                            }
                            decisions
                        }
                        Err(_) => Vec::new(),
                    }
                }
                Step::Beat { task, session } => job.apply_membership_input(now, MembershipInput::Heartbeat { task: TaskId(task), session }),
                Step::Disconnected { task, session } => {
                    job.apply_membership_input(now, MembershipInput::Disconnected { task: TaskId(task), session })
                }
                Step::Exited { task, generation, code, peer_error } => {
                    let exit = ExitReport { peer_error, ..exit(ExitKind::Code(code)) };
                    job.apply_membership_input(now, MembershipInput::Exited { task: TaskId(task), generation: Generation(generation), exit })
                }
                Step::Abort => job.apply_membership_input(now, MembershipInput::Abort { reason: "enough".into() }),
                Step::Wait { ms } => {
                    now += Duration::from_millis(ms);
                    job.apply_membership_input(now, MembershipInput::Tick)
                }
            };
            for decision in decisions {
                match decision {
                    MembershipDecision::Assigned { world } => {
                        prop_assert!(!ended, "MB-5");
                        prop_assert_eq!(world.generation.0, last + 1, "MB-2");
                        last = world.generation.0;
                        let tasks: BTreeSet<u32> = world.seats.iter().map(|seat| seat.task.0).collect();
                        prop_assert_eq!(tasks, BTreeSet::from([0, 1, 2]), "MB-1");
                        prop_assert_eq!(world.size(), 3, "MB-1");
                    }
                    MembershipDecision::Stop { generation, .. } => prop_assert!(stopped.insert(generation), "MB-4"),
                    MembershipDecision::Withdrawn { task, .. } => {
                        // The attempt that runs, if one does, is the one that fences again.
                        match job.running.as_mut().and_then(|running| running.member_mut(task)) {
                            Some(member) => attempts.insert(task.0, member.attempt),
                            None => attempts.remove(&task.0),
                        };
                    }
                    MembershipDecision::Finished { generation } => {
                        prop_assert!(!stopped.contains(&generation), "a stopped generation is not \
                                                                      done");
                        ended = true;
                    }
                    MembershipDecision::Aborted { .. } => ended = true,
                    MembershipDecision::Registered { .. } | MembershipDecision::Lost { .. } => {}
                    other => panic!("only elastic jobs decide that: {other:?}"),
                }
            }
        }
    }
}
