// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Membership of an elastic job: a pure state machine like
//! [`FixedMembership`](crate::FixedMembership), for workers that come and go.
//!
//! ```text
//! hosts --> Start --> starting --> importing --> ready --> working --> done
//!        register_worker()  request_world() ^ Assigned |      |
//!                                          '-----------'      '--> lost, failed: the world is broken; the others
//!                                     request_world() again        become ready again and form the next one
//! ```
//!
//! Each worker has a unique task number, which is never used again. A worker is *ready* once it has
//! called `init()`; until then no member waits for it. A world is *broken* as soon as a member is
//! lost, fails, or asks for the next world.
//!
//! - `EL-1`: a world has `min_workers` to `max_workers` members, each ready, each once. Only after
//!   the function has returned on some rank may a world have fewer members.
//! - `EL-2`: the next world is formed when every member of the broken one is ready again, done, or
//!   gone.
//! - `EL-3`: rank 0 is a member of the previous world, if one of them is left; members keep their
//!   ranks if they can.
//! - `EL-4`: the job finishes when the function has returned on every rank of the present world,
//!   and only then.
//! - `EL-5`: a worker that was dismissed or leaves is no failure. A host whose worker failed gets
//!   no new worker until it has cooled down. A host whose worker has announced that it leaves gets
//!   none for the shortest cooldown.
//! - `EL-6`: a job that cannot continue ends within `timeout`, and the reason says which workers or
//!   hosts were missing.
//! - `EL-7`: replaying the steps that changed something gives the same machine. A registrar that
//!   restarts continues where it was, and loses no worker that shows a sign of life within the
//!   usual time.

#[cfg(test)]
mod costs;
mod formation_decisions;
mod hosts;
mod journal_steps;
mod rank_order;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod worker_losses;
mod worker_scaling;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId, World, assign_ranks_as_listed};
use serde::{Deserialize, Serialize};

use crate::exit::GenerationVerdict;
use crate::inputs_and_decisions::{
    AgentPresence, LivenessLimits, MembershipDecision, MembershipInput, RegistrationRefusal,
};
use hosts::ElasticHosts;
pub use journal_steps::{ElasticStepInput, JournalStep};
use world::{CurrentWorld, LossCause};

/// The rules of [`ElasticMembership`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElasticRules {
    /// Number of workers that the first world waits for.
    pub first: u32,
    /// Fewest workers of a world.
    #[serde(rename = "least")]
    pub min_workers: u32,
    /// Most workers of a world.
    #[serde(rename = "most")]
    pub max_workers: u32,
    /// Workers beyond `max_workers` that wait, ready to replace a member.
    pub spares: u32,
    /// Longest wait of a job for workers.
    pub timeout: Duration,
    /// Number of worlds after the first that may be formed.
    pub reset_limit: Option<u32>,
    /// Shortest and longest time without a new worker on a host where one has failed.
    pub cooldown: (Duration, Duration),
    /// Longest time between the start of a worker and the registration of its agent.
    pub start_timeout: Duration,
    /// Limits after which an agent counts as gone.
    pub liveness: LivenessLimits,
}

/// Longest time for a member that others have lost to show that it lives, by asking for the next
/// world.
// A member that lives asks for the next world as soon as its own operation fails, usually within
// milliseconds. So this time decides only about members that are stopped or cut off.
const SUSPECT_GRACE_PERIOD: Duration = Duration::from_millis(500);
/// Longest time in which a dismissed worker must leave.
// A worker at work leaves at the end of a step or commit, which may take this long.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which the first world waits for workers beyond the required ones.
// Workers of one start become ready within seconds of each other. Without this wait, the first
// world would be formed again at once for the late ones.
const FIRST_WORLD_SETTLE_TIME: Duration = Duration::from_secs(3);
/// Reason in the orders that end the last workers.
const JOB_DONE_REASON: &str = "the job is done";
/// Number of consecutive worlds in which two members lose each other, and no other fails, after
/// which one of the two is dismissed.
// One loss may be an accident of the network. Without a limit, such a pair would break every world.
const MAX_MUTUAL_LOSSES: u32 = 2;

/// A worker that was started and has not ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ElasticWorker {
    /// The host on which it was started; empty if it came by itself.
    host: String,
    /// The host of its agent, once the agent has registered.
    #[serde(rename = "place")]
    host_hash: Option<HostHash>,
    session: Option<u64>,
    presence: AgentPresence,
    stage: WorkerStage,
    /// The time of its dismissal, and the reason.
    dismissed: Option<(Duration, String)>,
    /// Whether it was dismissed because its host has no slot for it.
    #[serde(default)]
    lacks_slot: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum WorkerStage {
    /// Its agent has not registered.
    Starting,
    /// It runs and has not called `init`.
    Importing,
    /// It waits for a world after `after`.
    Ready { after: Generation, since: Duration, suspects: BTreeSet<TaskId> },
    /// It is in the present world.
    Working,
    /// It ended successfully in the present world.
    Done,
    /// It was dismissed, and is ending.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum ElasticPhase {
    Open,
    Aborted { reason: String },
    Finished { generation: Generation },
}

/// The state of an elastic job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElasticMembership {
    rules: ElasticRules,
    phase: ElasticPhase,
    generation: Generation,
    hosts: ElasticHosts,
    workers: BTreeMap<TaskId, ElasticWorker>,
    /// Number of the next worker that is started.
    #[serde(rename = "next")]
    next_task: u32,
    /// Workers that registered without being started by this job, including workers that are gone.
    #[serde(rename = "came")]
    self_started: BTreeSet<TaskId>,
    present: Option<CurrentWorld>,
    /// The time at which the job began.
    began: Duration,
    /// The time since which enough workers have been ready for the first world.
    enough_since: Option<Duration>,
    /// The reason why the last worker was lost. A job that ends for lack of workers reports it.
    last_loss: Option<String>,
    /// After a restart: the time until which workers that others have lost may connect again.
    returning_until: Duration,
    #[serde(with = "journal_steps::pair_map_as_list")]
    quarrels: BTreeMap<(TaskId, TaskId), u32>,
    /// Once the job is over: workers whose ends are not reported yet, and their hosts. They may not
    /// know that the job is over.
    unheard: BTreeMap<TaskId, String>,
    /// Whether the present step has changed something that its decisions do not show.
    #[serde(skip)]
    changed: bool,
    /// Tasks that the last step gave up because of their silence. Heartbeats are not in the
    /// journal, so the step records these tasks.
    #[serde(skip)]
    losses: Vec<(TaskId, String)>,
    /// During a replay: the tasks that the original step gave up.
    #[serde(skip)]
    repeated: Option<Vec<(TaskId, String)>>,
}

impl ElasticMembership {
    /// Returns a job without workers.
    pub fn new(rules: ElasticRules) -> Self {
        Self {
            hosts: ElasticHosts::new(rules.cooldown),
            rules,
            phase: ElasticPhase::Open,
            generation: Generation(0),
            workers: BTreeMap::new(),
            next_task: 0,
            self_started: BTreeSet::new(),
            present: None,
            began: Duration::ZERO,
            enough_since: None,
            last_loss: None,
            returning_until: Duration::ZERO,
            quarrels: BTreeMap::new(),
            unheard: BTreeMap::new(),
            changed: false,
            losses: Vec::new(),
            repeated: None,
        }
    }

    /// Returns the number of the latest world; 0 before the first.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the present world, seen from rank 0.
    pub fn current_world(&self) -> Option<World> {
        assign_ranks_as_listed(self.generation, &self.present.as_ref()?.placements).ok()
    }

    /// Returns the workers that have not called `init` yet, ascending.
    pub fn missing_workers(&self) -> impl Iterator<Item = TaskId> + '_ {
        let missing = |worker: &ElasticWorker| {
            matches!(worker.stage, WorkerStage::Starting | WorkerStage::Importing)
        };
        self.workers.iter().filter(move |(_, worker)| missing(worker)).map(|(task, _)| *task)
    }

    /// Registers an agent. Repeating the call changes nothing.
    pub fn register_worker(
        &mut self,
        now: Duration,
        task: TaskId,
        session: u64,
        host_hash: HostHash,
    ) -> Result<Vec<MembershipDecision>, RegistrationRefusal> {
        self.check_job_open()?;
        if !self.workers.contains_key(&task) {
            // A number that was used before belongs to a worker that is gone, and must not come
            // back.
            if self.hosts.are_hosts_known() || !self.self_started.insert(task) {
                return Err(RegistrationRefusal::NotWanted { task });
            }
            self.workers.insert(task, ElasticWorker::new_starting(String::new(), now));
        }
        let Some(worker) = self.workers.get_mut(&task) else {
            return Err(RegistrationRefusal::NotWanted { task });
        };
        // Two agents with one task would both start a worker for one rank.
        if worker.session.is_some_and(|known| known != session) {
            return Err(RegistrationRefusal::Duplicate { task, attempt: 0 });
        }
        worker.presence = AgentPresence::seen_at(now);
        if worker.stage != WorkerStage::Starting {
            return Ok(Vec::new());
        }
        worker.session = Some(session);
        worker.host_hash = Some(host_hash);
        worker.stage = WorkerStage::Importing;
        Ok(vec![MembershipDecision::Registered { task, session, replaces: false }])
    }

    /// Records a worker's request for a world after `after`; `suspects` are the members that it
    /// lost in that world.
    pub fn request_world(
        &mut self,
        now: Duration,
        task: TaskId,
        after: Generation,
        suspects: BTreeSet<TaskId>,
    ) -> Result<Vec<MembershipDecision>, RegistrationRefusal> {
        self.check_job_open()?;
        let generation = self.generation;
        let Some(worker) = self.workers.get_mut(&task) else {
            return Err(RegistrationRefusal::Dismissed { task });
        };
        match &mut worker.stage {
            WorkerStage::Done | WorkerStage::Starting => {
                return Err(RegistrationRefusal::NotWanted { task });
            }
            WorkerStage::Leaving => return Err(RegistrationRefusal::Dismissed { task }),
            // The worker asks again for the world that it was given.
            WorkerStage::Working if after < generation => return Ok(Vec::new()),
            WorkerStage::Ready { suspects: known, .. } => {
                self.changed |= !suspects.is_subset(known);
                // A repeated request may know of more losses, and withdraws none.
                known.extend(suspects);
            }
            WorkerStage::Importing | WorkerStage::Working => {
                self.changed = true;
                worker.stage = WorkerStage::Ready { after, since: now, suspects };
                if let Some(present) = &mut self.present
                    && let Some(rank) = present.task_rank(task)
                {
                    present.mark_world_broken(now, format!("rank {rank} asked for the next world"));
                }
            }
        }
        // If thousands of workers ask, most requests cause no decision; the next tick handles the
        // rest.
        let decisions =
            if self.may_cause_decision(task) { self.make_due_decisions(now) } else { Vec::new() };
        let leaving =
            self.workers.get(&task).is_none_or(|worker| worker.stage == WorkerStage::Leaving);
        if leaving && decisions.is_empty() {
            Err(RegistrationRefusal::Dismissed { task })
        } else {
            Ok(decisions)
        }
    }

    /// Takes an event and returns the actions that follow.
    pub fn apply_membership_input(
        &mut self,
        now: Duration,
        input: MembershipInput,
    ) -> Vec<MembershipDecision> {
        let mut decisions = Vec::new();
        match input {
            MembershipInput::Heartbeat { task, session } => {
                self.update_presence(task, session, |presence| {
                    *presence = AgentPresence::seen_at(now)
                });
                return decisions;
            }
            MembershipInput::Disconnected { task, session } => {
                self.update_presence(task, session, |presence| presence.disconnected = Some(now));
                // The agent may reconnect for a while.
                return decisions;
            }
            MembershipInput::Exited { task, exit, .. } => {
                self.record_exit(now, task, &exit, &mut decisions)
            }
            MembershipInput::Hosts(hosts) => self.hosts.update_discovered_hosts(hosts),
            MembershipInput::NotStarted { task, reason } => {
                // The connection that started the worker may have broken while the worker lives.
                decisions.push(MembershipDecision::End { task, reason: reason.clone() });
                self.remove_lost_worker(now, task, LossCause::Lost(reason), &mut decisions);
            }
            MembershipInput::Leaves { task, reason } => {
                if let Some(worker) = self.workers.get(&task) {
                    self.hosts.block_new_workers(now, &worker.host);
                }
                self.dismiss_worker(now, task, reason);
                if let Some(worker) = self.workers.get_mut(&task) {
                    // It leaves also if it was dismissed for its slot and the slot comes back.
                    worker.lacks_slot = false;
                }
            }
            MembershipInput::Abort { reason } => {
                self.abort_job(reason, None, &mut decisions);
                return decisions;
            }
            MembershipInput::Tick => {}
        }
        decisions.extend(self.make_due_decisions(now));
        decisions
    }

    fn check_job_open(&self) -> Result<(), RegistrationRefusal> {
        match &self.phase {
            ElasticPhase::Open => Ok(()),
            ElasticPhase::Aborted { reason } => {
                Err(RegistrationRefusal::Aborted { reason: reason.clone() })
            }
            ElasticPhase::Finished { generation } => {
                Err(RegistrationRefusal::Finished { generation: *generation })
            }
        }
    }

    fn update_presence(&mut self, task: TaskId, session: u64, change: impl Fn(&mut AgentPresence)) {
        if let Some(worker) =
            self.workers.get_mut(&task).filter(|worker| worker.session == Some(session))
        {
            change(&mut worker.presence);
        }
    }

    fn abort_job(
        &mut self,
        reason: String,
        cause: Option<TaskId>,
        decisions: &mut Vec<MembershipDecision>,
    ) {
        if !matches!(self.phase, ElasticPhase::Open) {
            return;
        }
        self.phase = ElasticPhase::Aborted { reason: reason.clone() };
        self.disband_workers();
        // Without a world, no worker waits for a verdict on its generation.
        if self.generation.0 > 0 {
            let verdict = GenerationVerdict { reason: reason.clone(), cause, retry: false };
            decisions.push(MembershipDecision::Stop { generation: self.generation, verdict });
        }
        decisions.push(MembershipDecision::Aborted { reason });
    }

    /// Disbands the workers, because the job is over. Workers whose agents have registered must
    /// learn this, except workers that ended successfully.
    fn disband_workers(&mut self) {
        for (task, worker) in std::mem::take(&mut self.workers) {
            if !matches!(worker.stage, WorkerStage::Starting | WorkerStage::Done) {
                self.unheard.insert(task, worker.host);
            }
        }
    }

    fn make_due_decisions(&mut self, now: Duration) -> Vec<MembershipDecision> {
        let mut decisions = Vec::new();
        if !matches!(self.phase, ElasticPhase::Open) {
            return decisions;
        }
        // Losses come before plans: a lost worker frees its slot, and the next world must not
        // contain it.
        self.drop_silent_workers(now, &mut decisions);
        self.expel_suspected_members(now, &mut decisions);
        self.start_and_dismiss_workers(now, &mut decisions);
        self.release_dismissed_workers(now, &mut decisions);
        if !matches!(self.phase, ElasticPhase::Open) {
            return decisions;
        }
        self.decide_next_world(now, &mut decisions);
        if matches!(self.phase, ElasticPhase::Open) {
            self.announce_world_change(&mut decisions);
        }
        decisions
    }

    fn worker_stage(&self, task: TaskId) -> Option<&WorkerStage> {
        self.workers.get(&task).map(|worker| &worker.stage)
    }
}

impl ElasticWorker {
    fn new_starting(host: String, now: Duration) -> Self {
        Self {
            host,
            host_hash: None,
            session: None,
            presence: AgentPresence::seen_at(now),
            stage: WorkerStage::Starting,
            dismissed: None,
            lacks_slot: false,
        }
    }

    fn host_for_messages(&self) -> &str {
        match &self.host_hash {
            _ if !self.host.is_empty() => &self.host,
            Some(host_hash) => &host_hash.0,
            None => "an unknown host",
        }
    }
}
