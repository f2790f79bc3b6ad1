// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use super::*;
use crate::exit::{ExitKind, ExitReport};

pub(super) const RULES: ElasticRules = ElasticRules {
    first: 2,
    min_workers: 1,
    max_workers: 4,
    spares: 0,
    timeout: Duration::from_secs(60),
    reset_limit: None,
    cooldown: (Duration::from_secs(1), Duration::from_secs(60)),
    start_timeout: Duration::from_secs(30),
    liveness: LivenessLimits {
        heartbeat_timeout: Duration::from_secs(5),
        disconnect_grace: Duration::from_secs(1),
    },
};

/// A job whose clock is turned by hand. Every worker beats whenever time passes, unless it is
/// silent.
struct Job {
    now: Duration,
    machine: ElasticMembership,
    decisions: Vec<MembershipDecision>,
    silent: BTreeSet<TaskId>,
}

impl Job {
    fn new(rules: ElasticRules, hosts: &[(&str, u32)]) -> Self {
        let mut job = Self {
            now: Duration::ZERO,
            machine: ElasticMembership::new(rules),
            decisions: Vec::new(),
            silent: BTreeSet::new(),
        };
        job.hosts(hosts);
        job
    }

    fn say(&mut self, input: MembershipInput) {
        let decisions = self.machine.apply_membership_input(self.now, input);
        self.decisions.extend(decisions);
    }

    fn hosts(&mut self, hosts: &[(&str, u32)]) {
        self.say(MembershipInput::Hosts(
            hosts.iter().map(|(name, slots)| ((*name).to_owned(), *slots)).collect(),
        ));
    }

    fn pass(&mut self, seconds: f64) {
        let until = self.now + Duration::from_secs_f64(seconds);
        while self.now < until {
            self.now = until.min(self.now + Duration::from_millis(100));
            let beating: Vec<(TaskId, u64)> = self
                .machine
                .workers
                .iter()
                .filter(|(task, _)| !self.silent.contains(task))
                .filter_map(|(task, worker)| Some((*task, worker.session?)))
                .collect();
            for (task, session) in beating {
                self.say(MembershipInput::Heartbeat { task, session });
            }
            self.say(MembershipInput::Tick);
        }
    }

    /// Workers that were to be started and have not registered.
    fn started(&self) -> Vec<(u32, String)> {
        let starting =
            |task: &TaskId| self.machine.worker_stage(*task) == Some(&WorkerStage::Starting);
        let start = |decision: &MembershipDecision| match decision {
            MembershipDecision::Start { task, host } if starting(task) => {
                Some((task.0, host.clone()))
            }
            _ => None,
        };
        self.decisions.iter().filter_map(start).collect()
    }

    /// Registers whatever was started, and has it call `init`.
    fn all_ready(&mut self) {
        for (task, host) in self.started() {
            self.register(task, &host);
            self.ready(task, 0, &[]);
        }
    }

    fn register(&mut self, task: u32, host: &str) {
        let host = HostHash(host.to_owned());
        let decisions =
            self.machine.register_worker(self.now, TaskId(task), u64::from(task), host).unwrap();
        self.decisions.extend(decisions);
    }

    fn ready(&mut self, task: u32, after: u64, suspects: &[u32]) {
        let suspects = suspects.iter().copied().map(TaskId).collect();
        let decisions = self
            .machine
            .request_world(self.now, TaskId(task), Generation(after), suspects)
            .unwrap();
        self.decisions.extend(decisions);
    }

    fn exit(&mut self, task: u32, kind: ExitKind) {
        let exit = ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() };
        self.say(MembershipInput::Exited { task: TaskId(task), generation: Generation(0), exit });
    }

    /// Tasks of the last world by rank.
    fn world(&self) -> Vec<u32> {
        let world = |decision: &MembershipDecision| match decision {
            MembershipDecision::Assigned { world } => {
                Some(world.seats.iter().map(|seat| seat.task.0).collect())
            }
            _ => None,
        };
        self.decisions.iter().rev().find_map(world).unwrap_or_default()
    }

    fn aborted(&self) -> Option<&str> {
        self.decisions.iter().find_map(|decision| match decision {
            MembershipDecision::Aborted { reason } => Some(reason.as_str()),
            _ => None,
        })
    }

    fn finished(&self) -> bool {
        self.decisions
            .iter()
            .any(|decision| matches!(decision, MembershipDecision::Finished { .. }))
    }

    fn changes(&self) -> Vec<(bool, bool)> {
        let change = |decision: &MembershipDecision| match decision {
            MembershipDecision::Changed { removed, added, .. } => Some((*removed, *added)),
            _ => None,
        };
        self.decisions.iter().filter_map(change).collect()
    }
}

#[test]
fn el_5_a_worker_that_leaves_is_no_failure_and_is_not_replaced_on_its_host_at_once() {
    let mut job = Job::new(RULES, &[("a", 1), ("b", 1)]);
    job.all_ready();
    job.pass(4.0);
    assert_eq!(job.world(), [0, 1]);
    job.say(MembershipInput::Leaves { task: TaskId(1), reason: "it got SIGTERM".to_owned() });
    // Its notice is over before it was ready to go.
    job.exit(1, ExitKind::Signal(9));
    assert!(
        !job.decisions.iter().any(|decision| matches!(decision, MembershipDecision::Lost { .. }))
    );
    assert_eq!(job.started(), []);
    job.pass(1.1);
    assert_eq!(job.started(), [(2, "b".to_owned())]);
}

#[test]
fn survivors_continue_without_the_dead_and_admit_its_successor_at_their_next_chance() {
    let mut job = Job::new(RULES, &[("a", 4)]);
    job.all_ready();
    assert_eq!(job.world(), [0, 1, 2, 3]);
    job.exit(1, ExitKind::Signal(9));
    for task in [0, 2, 3] {
        job.ready(task, 1, &[1]);
    }
    assert_eq!(job.world(), [0, 3, 2]);
    assert!(job.started().is_empty(), "the host cools down");
    job.pass(3.0);
    assert_eq!(job.started(), [(4, "a".to_owned())]);
    assert!(job.changes().is_empty(), "nobody stops for a worker that is not ready");
    job.all_ready();
    assert_eq!(job.changes(), [(false, true)]);
    for task in [3, 0, 2] {
        job.ready(task, 2, &[]);
    }
    assert_eq!(job.world(), [0, 3, 2, 4]);
}

#[test]
fn a_ready_spare_takes_the_place_of_the_dead_at_once() {
    let mut job = Job::new(ElasticRules { first: 4, spares: 1, ..RULES }, &[("a", 5)]);
    job.all_ready();
    assert_eq!(job.world(), [0, 1, 2, 3]);
    job.exit(0, ExitKind::Signal(9));
    for task in [1, 2, 3] {
        job.ready(task, 1, &[]);
    }
    assert_eq!(job.world(), [1, 4, 2, 3], "rank 0 is a survivor");
}

#[test]
fn a_stopped_member_is_out_once_its_peers_have_lost_it() {
    let mut job = Job::new(RULES, &[("a", 2), ("b", 1)]);
    job.all_ready();
    job.ready(0, 1, &[2]);
    job.ready(1, 1, &[2]);
    job.pass(0.4);
    assert_eq!(job.machine.generation(), Generation(1), "it may only be slow");
    job.pass(0.2);
    assert_eq!(job.world(), [0, 1]);
    let ended = |decision: &MembershipDecision| {
        matches!(decision, MembershipDecision::End { task: TaskId(2), .. })
    };
    assert!(job.decisions.iter().any(ended));
}

#[test]
fn a_member_that_only_works_long_is_waited_for() {
    let mut job = Job::new(RULES, &[("a", 3)]);
    job.all_ready();
    job.exit(1, ExitKind::Signal(9));
    job.ready(0, 1, &[1]);
    job.pass(20.0);
    assert_eq!(job.machine.generation(), Generation(1));
    job.ready(2, 1, &[1]);
    assert_eq!(job.machine.generation(), Generation(2));
}

#[test]
fn a_removed_host_is_no_failure_and_its_workers_leave_at_the_next_chance() {
    let mut job = Job::new(RULES, &[("a", 2), ("b", 2)]);
    job.all_ready();
    job.hosts(&[("a", 2)]);
    assert_eq!(job.changes(), [(true, false)]);
    for task in [0, 1, 2] {
        job.ready(task, 1, &[]);
    }
    assert_eq!(job.machine.generation(), Generation(1));
    job.ready(3, 1, &[]);
    assert_eq!(job.world(), [0, 1]);
    let refused = job.machine.request_world(job.now, TaskId(3), Generation(1), BTreeSet::new());
    assert_eq!(refused, Err(RegistrationRefusal::Dismissed { task: TaskId(3) }));
    job.exit(2, ExitKind::Code(0));
    job.exit(3, ExitKind::Code(0));
    assert!(job.aborted().is_none() && !job.finished());
    job.hosts(&[("a", 2), ("b", 2)]);
    assert_eq!(job.started().len(), 2, "it may come back at once");
}

#[test]
fn a_worker_at_work_stays_if_its_slot_is_back_before_it_leaves() {
    let mut job = Job::new(RULES, &[("a", 2), ("b", 2)]);
    job.all_ready();
    for fewer in [&[("a", 2)][..], &[("a", 2), ("b", 1)], &[("a", 1), ("b", 1)], &[]] {
        job.hosts(fewer);
        job.pass(1.0);
        job.hosts(&[("a", 2), ("b", 2)]);
    }
    assert!(job.started().is_empty(), "nobody has left");
    for task in 0..4 {
        job.ready(task, 1, &[]);
    }
    assert_eq!(job.world(), [0, 1, 2, 3]);
}

#[test]
fn a_worker_that_leaves_by_itself_does_not_stay_for_a_slot() {
    for steps_before_it_leaves in 0..3 {
        let mut job = Job::new(RULES, &[("a", 2), ("b", 2)]);
        job.all_ready();
        for (step, hosts) in
            [&[("a", 2)][..], &[("a", 2), ("b", 2)], &[("a", 2), ("b", 2)]].into_iter().enumerate()
        {
            if step == steps_before_it_leaves {
                let reason = "decommissioned".to_owned();
                job.say(MembershipInput::Leaves { task: TaskId(3), reason });
            }
            job.hosts(hosts);
        }
        for task in 0..4 {
            job.ready(task, 1, &[]);
        }
        assert_eq!(job.world(), [0, 1, 2], "after {steps_before_it_leaves} steps");
    }
}

#[test]
fn success_is_the_return_of_every_member_of_the_present_world() {
    let mut job = Job::new(RULES, &[("a", 3)]);
    job.all_ready();
    job.exit(0, ExitKind::Code(0));
    job.exit(1, ExitKind::Code(0));
    assert!(!job.finished());
    job.exit(2, ExitKind::Signal(9));
    assert!(
        job.aborted().unwrap().contains("rank 2 on a was ended by SIGKILL"),
        "{:?}",
        job.aborted()
    );
}

#[test]
fn those_that_are_left_of_a_world_that_partly_returned_finish_without_newcomers() {
    let mut job = Job::new(ElasticRules { min_workers: 3, first: 3, ..RULES }, &[("a", 4)]);
    job.all_ready();
    job.exit(0, ExitKind::Code(0));
    job.exit(1, ExitKind::Signal(9));
    job.ready(2, 1, &[1]);
    job.ready(3, 1, &[1]);
    assert_eq!(job.world(), [2, 3]);
    job.pass(10.0);
    assert!(job.started().is_empty());
    job.exit(2, ExitKind::Code(0));
    job.exit(3, ExitKind::Code(0));
    assert!(job.finished());
}

#[test]
fn a_script_that_fails_everywhere_ends_the_job_and_one_that_was_killed_everywhere_starts_again() {
    let mut job = Job::new(RULES, &[("a", 2)]);
    job.all_ready();
    job.exit(0, ExitKind::Code(3));
    job.exit(1, ExitKind::Code(3));
    assert!(job.aborted().unwrap().contains("rank 0 on a exited with code 3"));

    let mut job = Job::new(RULES, &[("a", 2)]);
    job.all_ready();
    job.exit(0, ExitKind::Signal(9));
    job.exit(1, ExitKind::Signal(9));
    assert!(job.aborted().is_none());
    job.pass(5.0);
    job.all_ready();
    assert_eq!(job.world(), [2, 3]);
}

#[test]
fn a_script_that_fails_before_the_first_world_ends_the_job() {
    let mut job = Job::new(RULES, &[("a", 2)]);
    job.register(0, "a");
    job.exit(0, ExitKind::Code(1));
    assert!(job.aborted().unwrap().contains("worker 0 on a exited with code 1"));
}

#[test]
fn a_program_that_never_calls_init_ends_the_job_and_is_not_started_again() {
    let mut job = Job::new(RULES, &[("a", 2)]);
    for (task, host) in job.started() {
        job.register(task, &host);
    }
    job.exit(0, ExitKind::Code(0));
    assert_eq!(job.aborted(), Some("worker 0 on a ended before it called init()"));
    // A newcomer that does so is a failure of its host: its next one waits.
    let mut job = Job::new(RULES, &[("a", 2)]);
    job.all_ready();
    job.pass(4.0);
    job.hosts(&[("a", 2), ("b", 1)]);
    let (task, host) = job.started().remove(0);
    job.register(task, &host);
    job.exit(task, ExitKind::Code(0));
    assert_eq!((job.aborted(), job.started()), (None, Vec::new()));
    job.pass(3.0);
    assert_eq!(job.started().len(), 1);
}

#[test]
fn too_few_workers_end_the_job_with_what_is_missing() {
    let mut job = Job::new(ElasticRules { min_workers: 2, ..RULES }, &[("a", 1)]);
    job.all_ready();
    job.pass(61.0);
    let reason = job.aborted().unwrap();
    assert!(reason.contains("at least 2 workers: 1 ready, slots now: a:1"), "{reason}");
}

#[test]
fn fewer_workers_than_wished_for_begin_once_waiting_is_over() {
    let mut job = Job::new(ElasticRules { first: 4, ..RULES }, &[("a", 2)]);
    job.all_ready();
    job.pass(59.0);
    assert!(job.world().is_empty());
    job.pass(2.0);
    assert_eq!(job.world(), [0, 1]);
}

#[test]
fn worlds_after_the_first_are_counted() {
    let mut job = Job::new(ElasticRules { reset_limit: Some(1), ..RULES }, &[("a", 4)]);
    job.all_ready();
    job.exit(3, ExitKind::Signal(9));
    for task in [0, 1, 2] {
        job.ready(task, 1, &[]);
    }
    assert_eq!(job.world(), [0, 1, 2]);
    job.exit(2, ExitKind::Signal(9));
    job.ready(0, 2, &[]);
    job.ready(1, 2, &[]);
    assert!(job.aborted().unwrap().contains("exceeded the limit: 1"));
}

#[test]
fn of_two_members_that_keep_losing_each_other_one_has_to_go() {
    let mut job = Job::new(RULES, &[("a", 3)]);
    job.all_ready();
    for generation in 1..4 {
        assert_eq!(job.machine.generation(), Generation(generation));
        job.ready(0, generation, &[]);
        job.ready(1, generation, &[2]);
        job.ready(2, generation, &[1]);
    }
    job.say(MembershipInput::Tick);
    assert_eq!(job.world(), [0, 1]);
}

#[test]
fn a_lost_agent_is_a_lost_worker() {
    let mut job = Job::new(RULES, &[("a", 2)]);
    job.all_ready();
    job.silent.insert(TaskId(1));
    job.pass(5.5);
    job.ready(0, 1, &[]);
    assert_eq!(job.world(), [0]);
}

#[test]
fn workers_that_come_by_themselves_need_no_hosts() {
    let mut job = Job {
        now: Duration::ZERO,
        machine: ElasticMembership::new(RULES),
        decisions: Vec::new(),
        silent: BTreeSet::new(),
    };
    for (task, host) in [(3, "b"), (0, "a")] {
        job.register(task, host);
        job.ready(task, 0, &[]);
    }
    assert_eq!(job.world(), [0, 3]);
    job.exit(3, ExitKind::Signal(9));
    let again = job.machine.register_worker(job.now, TaskId(3), 33, HostHash("b".to_owned()));
    assert_eq!(
        again,
        Err(RegistrationRefusal::NotWanted { task: TaskId(3) }),
        "a number is used once"
    );
}

#[test]
fn a_repeated_message_of_a_worker_changes_nothing() {
    let mut job = Job::new(RULES, &[("a", 2)]);
    job.all_ready();
    let before = job.decisions.len();
    job.ready(0, 0, &[]);
    assert_eq!((job.decisions.len(), job.world()), (before, vec![0, 1]));
    let other = job.machine.register_worker(job.now, TaskId(0), 77, HostHash("a".to_owned()));
    assert!(other.is_err());
    let stranger = job.machine.register_worker(job.now, TaskId(9), 9, HostHash("a".to_owned()));
    assert_eq!(stranger, Err(RegistrationRefusal::NotWanted { task: TaskId(9) }));
}

#[test]
fn after_an_outage_all_have_the_usual_time_and_silent_starts_are_repeated() {
    let at = Duration::from_secs;
    let mut machine = ElasticMembership::new(RULES);
    let decided = machine
        .take_step(
            at(0),
            ElasticStepInput::Input(MembershipInput::Hosts(vec![("a".to_owned(), 2)])),
        )
        .unwrap();
    assert_eq!(decided.len(), 2, "{decided:?}");
    let register = |task| ElasticStepInput::AgentRegistration {
        task: TaskId(task),
        session: 7,
        host_hash: HostHash("a".to_owned()),
    };
    machine.take_step(at(1), register(0)).unwrap();
    // No agent was heard for a while.
    assert_eq!(
        machine.take_step(at(50), ElasticStepInput::Restart).unwrap(),
        [],
        "the hosts may have changed"
    );
    assert_eq!(
        machine.take_step(at(50), ElasticStepInput::Input(MembershipInput::Tick)).unwrap(),
        []
    );
    let hosts = vec![("a".to_owned(), 1), ("b".to_owned(), 1)];
    let decided =
        machine.take_step(at(50), ElasticStepInput::Input(MembershipInput::Hosts(hosts))).unwrap();
    assert_eq!(decided, [MembershipDecision::Start { task: TaskId(2), host: "b".to_owned() }]);
    assert_eq!(machine.living_workers().collect::<Vec<_>>(), [(TaskId(0), "a")]);
    assert_eq!(machine.gone_workers().collect::<Vec<_>>(), [TaskId(1)]);
    assert_eq!(
        machine.take_step(at(51), register(1)),
        Err(RegistrationRefusal::NotWanted { task: TaskId(1) })
    );
    assert!(
        machine
            .take_step(at(54), ElasticStepInput::Input(MembershipInput::Tick))
            .unwrap()
            .is_empty()
    );
    let decided =
        machine.take_step(at(55), ElasticStepInput::Input(MembershipInput::Tick)).unwrap();
    assert!(
        matches!(
            decided[..],
            [MembershipDecision::End { task: TaskId(0), .. }, MembershipDecision::Lost { .. }]
        ),
        "{decided:?}"
    );
}

#[test]
fn a_job_that_was_over_is_over_after_an_outage() {
    let mut machine = ElasticMembership::new(RULES);
    let reason = "enough".to_owned();
    machine
        .take_step(
            Duration::ZERO,
            ElasticStepInput::Input(MembershipInput::Abort { reason: reason.clone() }),
        )
        .unwrap();
    assert_eq!(
        machine.take_step(Duration::ZERO, ElasticStepInput::Restart).unwrap(),
        [MembershipDecision::Aborted { reason }]
    );
}

#[test]
fn a_worker_whose_launching_connection_broke_is_ended() {
    let mut job = Job::new(RULES, &[("a", 1), ("b", 1)]);
    job.all_ready();
    job.pass(4.0);
    job.say(MembershipInput::NotStarted {
        task: TaskId(1),
        reason: "lost the connection to b".to_owned(),
    });
    let told = |decision: &MembershipDecision| {
        matches!(decision, MembershipDecision::End { task: TaskId(1), .. })
    };
    assert!(job.decisions.iter().any(told));
    assert!(job.machine.worker_stage(TaskId(1)).is_none());
}

#[test]
fn after_a_restart_workers_that_others_have_lost_have_time_to_connect_again() {
    let mut job = Job::new(RULES, &[("a", 1), ("b", 1)]);
    job.all_ready();
    job.pass(4.0);
    let decisions = job.machine.take_step(job.now, ElasticStepInput::Restart).unwrap();
    job.decisions.extend(decisions);
    job.hosts(&[("a", 1), ("b", 1)]);
    job.ready(0, 1, &[1]);
    job.pass(4.5);
    assert_eq!(job.machine.worker_stage(TaskId(1)), Some(&WorkerStage::Working));
    job.pass(1.5);
    assert!(job.machine.worker_stage(TaskId(1)).is_none());
}

#[test]
fn workers_that_may_not_know_the_end_of_the_job_get_it_after_an_outage() {
    let mut job = Job::new(RULES, &[("a", 4)]);
    let first = job.started();
    for (task, host) in &first[..3] {
        job.register(*task, host);
    }
    job.say(MembershipInput::Abort { reason: "enough".to_owned() });
    job.exit(1, ExitKind::Signal(15));
    let decided = job.machine.take_step(job.now, ElasticStepInput::Restart).unwrap();
    assert_eq!(decided, [MembershipDecision::Aborted { reason: "enough".to_owned() }]);
    assert_eq!(
        job.machine.living_workers().collect::<Vec<_>>(),
        [(TaskId(0), "a"), (TaskId(2), "a")]
    );
    assert_eq!(
        job.machine.gone_workers().collect::<Vec<_>>(),
        [TaskId(1), TaskId(3)],
        "the last never registered"
    );

    let mut job =
        Job::new(ElasticRules { first: 2, max_workers: 2, spares: 1, ..RULES }, &[("a", 3)]);
    job.all_ready();
    job.exit(0, ExitKind::Code(0));
    job.exit(1, ExitKind::Code(0));
    assert!(job.finished());
    let decided = job.machine.take_step(job.now, ElasticStepInput::Restart).unwrap();
    let end = MembershipDecision::End { task: TaskId(2), reason: JOB_DONE_REASON.to_owned() };
    assert_eq!(decided, [end, MembershipDecision::Finished { generation: Generation(1) }]);
    assert_eq!(job.machine.living_workers().collect::<Vec<_>>(), [(TaskId(2), "a")]);
}
