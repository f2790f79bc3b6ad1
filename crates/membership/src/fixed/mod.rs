// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Membership of a job with a fixed number of tasks.
//!
//! ```text
//! register --> waiting --(all tasks wait)--> running generation --(all exit well)--> finished
//!    ^            |  agent gone: dropped           | failure, loss, newer attempt
//!    |            v                                v
//!    +------- registered again <----------- verdict: all workers stop
//! ```

mod registration;
mod running_generation;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_world::{
    Generation, HostHash, TaskId, TaskPlacement, assign_in_task_order, assign_ranks,
};

use crate::exit::GenerationVerdict;
use crate::inputs_and_decisions::{
    AgentPresence, LivenessLimits, MembershipDecision, MembershipInput, RegistrationRefusal,
};
use registration::TaskRegistration;
use running_generation::RunningGeneration;

pub use registration::MembershipOptions;

#[derive(Clone, Debug)]
enum MembershipPhase {
    Open,
    Aborted { reason: String },
    Finished { generation: Generation },
}

/// The state of a job with a fixed number of tasks.
#[derive(Clone, Debug)]
pub struct FixedMembership {
    options: MembershipOptions,
    phase: MembershipPhase,
    generation: Generation,
    waiting: BTreeMap<TaskId, TaskRegistration>,
    running: Option<RunningGeneration>,
    /// The highest attempt of each task so far. Messages of earlier attempts are ignored.
    fences: BTreeMap<TaskId, u64>,
}

impl FixedMembership {
    /// Returns a job without registered agents.
    pub fn new(options: MembershipOptions) -> Self {
        Self {
            options,
            phase: MembershipPhase::Open,
            generation: Generation(0),
            waiting: BTreeMap::new(),
            running: None,
            fences: BTreeMap::new(),
        }
    }

    /// Returns the latest assigned generation; 0 before the first.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the tasks that the next generation still needs, ascending.
    pub fn missing_tasks(&self) -> impl Iterator<Item = TaskId> + '_ {
        (0..self.options.tasks).map(TaskId).filter(|task| !self.waiting.contains_key(task))
    }

    /// Returns whether this session of a task waits or runs. Returns true for every session if the
    /// job is over.
    pub fn knows_session(&self, task: TaskId, session: u64) -> bool {
        let waits = self.waiting.get(&task).is_some_and(|waiting| waiting.session == session);
        let runs = self.running.as_ref().is_some_and(|running| running.has_session(task, session));
        waits || runs || !matches!(self.phase, MembershipPhase::Open)
    }

    /// Registers a task, and returns the generation that it will be, or already is, part of.
    pub fn register_task(
        &mut self,
        now: Duration,
        task: TaskId,
        attempt: u64,
        session: u64,
        host: HostHash,
    ) -> Result<(Generation, Vec<MembershipDecision>), RegistrationRefusal> {
        self.check_job_open(task)?;
        if let Some(running) = &mut self.running
            && let Some(member) = running.member_mut(task)
        {
            if member.session == session {
                member.presence = AgentPresence::seen_at(now);
                return Ok((self.generation, Vec::new()));
            }
            // Spark may run an old attempt beside a new one; the old one must not get the rank
            // back.
            check_newer_attempt(task, attempt, member.attempt)?;
        }
        if let Some(waiting) = self.waiting.get_mut(&task) {
            if waiting.session == session {
                waiting.presence = AgentPresence::seen_at(now);
                return Ok((Generation(self.generation.0 + 1), Vec::new()));
            }
            check_newer_attempt(task, attempt, waiting.attempt)?;
        }
        // Kept after the task is gone: a late message of its old attempt must still be refused.
        let fence = self.fences.entry(task).or_insert(attempt);
        if attempt < *fence {
            return Err(RegistrationRefusal::Stale { task, attempt, current: *fence });
        }
        *fence = attempt;
        let replaces = self.waiting.contains_key(&task);
        let mut decisions = vec![MembershipDecision::Registered { task, session, replaces }];
        if let Some(running) = &mut self.running {
            let reason = format!("task {task} was started again, as attempt {attempt}");
            // The task's earlier process is gone, so the generation can never finish.
            decisions.extend(running.stop_generation(GenerationVerdict {
                reason,
                cause: None,
                retry: true,
            }));
        }
        self.waiting.insert(
            task,
            TaskRegistration { attempt, session, host, presence: AgentPresence::seen_at(now) },
        );
        decisions.extend(self.assign_generation(now));
        let part_of =
            if self.waiting.is_empty() { self.generation.0 } else { self.generation.0 + 1 };
        Ok((Generation(part_of), decisions))
    }

    /// Takes an event and returns the actions that follow.
    pub fn apply_membership_input(
        &mut self,
        now: Duration,
        input: MembershipInput,
    ) -> Vec<MembershipDecision> {
        match input {
            MembershipInput::Heartbeat { task, session } => {
                // A heartbeat causes no decision, so skip the check: ten thousand agents send one
                // each second.
                self.update_presence(task, session, |presence| {
                    *presence = AgentPresence::seen_at(now)
                });
                return Vec::new();
            }
            MembershipInput::Disconnected { task, session } => {
                self.update_presence(task, session, |presence| presence.disconnected = Some(now));
            }
            MembershipInput::Exited { task, generation, exit } => {
                if let Some(running) = &mut self.running
                    && running.generation() == generation
                {
                    running.record_exit(now, task, exit);
                }
            }
            MembershipInput::Abort { reason } => return self.abort_job(reason),
            // Inputs of elastic jobs do not occur here.
            MembershipInput::Hosts(_)
            | MembershipInput::NotStarted { .. }
            | MembershipInput::Leaves { .. }
            | MembershipInput::Tick => {}
        }
        self.make_due_decisions(now)
    }

    fn check_job_open(&self, task: TaskId) -> Result<(), RegistrationRefusal> {
        match &self.phase {
            MembershipPhase::Aborted { reason } => {
                return Err(RegistrationRefusal::Aborted { reason: reason.clone() });
            }
            MembershipPhase::Finished { generation } => {
                return Err(RegistrationRefusal::Finished { generation: *generation });
            }
            MembershipPhase::Open => {}
        }
        // After the phase: a job that is over gives its reason to any task.
        if task.0 >= self.options.tasks {
            return Err(RegistrationRefusal::UnknownTask {
                task,
                last: self.options.tasks.saturating_sub(1),
            });
        }
        Ok(())
    }

    fn update_presence(&mut self, task: TaskId, session: u64, change: impl Fn(&mut AgentPresence)) {
        if let Some(waiting) =
            self.waiting.get_mut(&task).filter(|waiting| waiting.session == session)
        {
            change(&mut waiting.presence);
        }
        if let Some(member) = self.running.as_mut().and_then(|running| running.member_mut(task))
            && member.session == session
        {
            change(&mut member.presence);
        }
    }

    fn assign_generation(&mut self, now: Duration) -> Option<MembershipDecision> {
        if self.waiting.len() < self.options.tasks as usize {
            return None;
        }
        let places: Vec<TaskPlacement> = self
            .waiting
            .iter()
            .map(|(task, waiting)| TaskPlacement { task: *task, host: waiting.host.clone() })
            .collect();
        let next = Generation(self.generation.0 + 1);
        let rule = if self.options.in_order { assign_in_task_order } else { assign_ranks };
        let world = rule(next, &places).ok()?;
        let members = std::mem::take(&mut self.waiting);
        self.generation = next;
        self.running = Some(RunningGeneration::new(now, world.clone(), members));
        Some(MembershipDecision::Assigned { world })
    }

    fn abort_job(&mut self, reason: String) -> Vec<MembershipDecision> {
        if !matches!(self.phase, MembershipPhase::Open) {
            return Vec::new();
        }
        self.phase = MembershipPhase::Aborted { reason: reason.clone() };
        self.waiting.clear();
        let verdict = GenerationVerdict { reason: reason.clone(), cause: None, retry: false };
        let stop = self.running.as_mut().and_then(|running| running.stop_generation(verdict));
        stop.into_iter().chain([MembershipDecision::Aborted { reason }]).collect()
    }

    fn make_due_decisions(&mut self, now: Duration) -> Vec<MembershipDecision> {
        let mut decisions = Vec::new();
        if !matches!(self.phase, MembershipPhase::Open) {
            return decisions;
        }
        let options = &self.options;
        self.waiting.retain(|task, waiting| {
            match waiting.presence.gone_reason_while_waiting(now, &options.liveness) {
                Some(reason) => {
                    decisions.push(MembershipDecision::Withdrawn { task: *task, reason });
                    false
                }
                None => true,
            }
        });
        if let Some(running) = &mut self.running {
            decisions.extend(running.settle_losses(now, options));
            if running.is_finished() {
                let generation = running.generation();
                self.phase = MembershipPhase::Finished { generation };
                decisions.push(MembershipDecision::Finished { generation });
            }
        }
        decisions
    }
}

impl AgentPresence {
    /// Returns the reason why a waiting agent counts as gone. No worker runs yet, so a closed
    /// connection is enough: the task may simply register again.
    fn gone_reason_while_waiting(
        &self,
        now: Duration,
        liveness: &LivenessLimits,
    ) -> Option<String> {
        match self.disconnected {
            Some(_) => Some("its agent's connection closed".to_owned()),
            None => self.gone_reason(now, liveness),
        }
    }
}

fn check_newer_attempt(
    task: TaskId,
    attempt: u64,
    current: u64,
) -> Result<(), RegistrationRefusal> {
    match attempt.cmp(&current) {
        std::cmp::Ordering::Less => Err(RegistrationRefusal::Stale { task, attempt, current }),
        std::cmp::Ordering::Equal => Err(RegistrationRefusal::Duplicate { task, attempt }),
        std::cmp::Ordering::Greater => Ok(()),
    }
}
