// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The cost of a step with thousands of workers.

use super::tests::RULES;
use super::*;
use crate::exit::{ExitKind, ExitReport};

/// Forms a world of `size`, loses a member, and forms the next world. Returns the time it took, and
/// the number of journal steps.
fn form_and_reform_world(
    size: u32,
    mut take: impl FnMut(&mut ElasticMembership, Duration, ElasticStepInput) -> bool,
) -> (Duration, u32) {
    let rules = ElasticRules { first: size, min_workers: 1, max_workers: size, ..RULES };
    let (mut machine, now) = (ElasticMembership::new(rules), Duration::from_secs(1));
    let hosts = (0..size / 8).map(|host| (format!("host-{host}.example.org"), 8)).collect();
    let mut inputs = vec![ElasticStepInput::Input(MembershipInput::Hosts(hosts))];
    let host_hash = |task| HostHash(format!("host-{}.example.org-0123456789abcdef", task / 8));
    let register = |task| ElasticStepInput::AgentRegistration {
        task: TaskId(task),
        session: task.into(),
        host_hash: host_hash(task),
    };
    let ask = |task, after, suspects: &[u32]| ElasticStepInput::WorldRequest {
        task: TaskId(task),
        after: Generation(after),
        suspects: suspects.iter().copied().map(TaskId).collect(),
    };
    inputs.extend((0..size).map(register));
    inputs.extend((0..size).map(|task| ask(task, 0, &[])));
    let exit = ExitReport {
        kind: ExitKind::Signal(9),
        peer_error: false,
        stopped: false,
        stderr_tail: Vec::new(),
    };
    inputs.push(ElasticStepInput::Input(MembershipInput::Exited {
        task: TaskId(1),
        generation: Generation(1),
        exit,
    }));
    inputs.extend((0..size).filter(|task| *task != 1).map(|task| ask(task, 1, &[1])));
    inputs.extend((0..64).map(|_| ElasticStepInput::Input(MembershipInput::Tick)));
    let began = std::time::Instant::now();
    let steps = inputs.into_iter().map(|what| u32::from(take(&mut machine, now, what))).sum();
    assert_eq!(machine.generation(), Generation(2));
    (began.elapsed(), steps)
}

#[test]
fn a_journal_has_each_step_once_and_costs_less_than_the_decision() {
    for size in [512, 4096] {
        let (plain, _) =
            form_and_reform_world(size, |machine, now, what| machine.take_step(now, what).is_ok());
        let (noted, steps) = form_and_reform_world(size, |machine, now, what| {
            machine.take_journaled_step(now, what).0.is_some()
        });
        println!(
            "{size} members: {plain:.2?} without a journal, {noted:.2?} with one, {steps} steps"
        );
        // Each worker registers, and asks twice; one worker is lost. Ticks that change nothing are
        // not in the journal.
        assert!((3 * size..3 * size + 4).contains(&steps), "{steps}");
        assert!(noted < 2 * plain + Duration::from_millis(100), "{plain:?}, {noted:?}");
    }
}
