// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps of the state machine in the journal, and their replay when the registrar starts again.

use std::collections::BTreeSet;
use std::time::Duration;

use farandole_world::{Generation, HostHash, TaskId};
use serde::{Deserialize, Serialize};

use super::{DONE, Decision, Elastic, Input, Phase, Presence, Refusal, Rules, Stage};

/// The input of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum What {
    /// An agent registers.
    Registers { task: TaskId, session: u64, place: HostHash },
    /// A worker asks for a world.
    Asks { task: TaskId, after: Generation, suspects: BTreeSet<TaskId> },
    /// Anything else.
    Happens(Input),
    /// The registrar has started again.
    Resumes,
}

impl What {
    /// Returns whether a journal tells it in any case. Steps that come often, or may be repeated,
    /// are reported only if they changed something.
    fn always_counts(&self) -> bool {
        match self {
            Self::Registers { .. } | Self::Asks { .. } => false,
            Self::Happens(input) => !matches!(
                input,
                Input::Beat { .. } | Input::Disconnected { .. } | Input::Abort { .. } | Input::Tick
            ),
            Self::Resumes => true,
        }
    }
}

/// A step that has changed something.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    pub(crate) what: What,
    /// The tasks that it gave up because of their silence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) losses: Vec<(TaskId, String)>,
}

impl Elastic {
    /// Does a step; `None` beside its outcome when it changed nothing that a journal has to tell.
    /// Times of signs of life are not in a journal, and time alone changes only the report of a
    /// step.
    pub(crate) fn noted(
        &mut self,
        now: Duration,
        what: What,
    ) -> (Option<Step>, Result<Vec<Decision>, Refusal>) {
        if let What::Happens(Input::Beat { .. }) = what {
            return (None, self.take(now, what));
        }
        let outcome = self.take(now, what.clone());
        let losses = std::mem::take(&mut self.losses);
        let changed = std::mem::take(&mut self.changed) || what.always_counts();
        let decided = outcome.as_ref().is_ok_and(|decisions| !decisions.is_empty());
        let step = (decided || changed).then_some(Step { at: now, what, losses });
        (step, outcome)
    }

    /// Does a step.
    pub(crate) fn take(&mut self, now: Duration, what: What) -> Result<Vec<Decision>, Refusal> {
        match what {
            What::Registers { task, session, place } => self.register(now, task, session, place),
            What::Asks { task, after, suspects } => self.ready(now, task, after, suspects),
            What::Happens(input) => Ok(self.observe(now, input)),
            What::Resumes => Ok(self.resume(now)),
        }
    }

    /// Does a step of a journal again. What it decided had its effects in its time.
    pub(crate) fn repeat(&mut self, step: Step) {
        self.repeated = Some(step.losses);
        // Refused then, refused now.
        drop(self.take(step.at, step.what));
        self.repeated = None;
        self.losses.clear();
        self.changed = false;
    }

    /// Continues after an outage, in which no agent was heard: all have the usual time to show that
    /// they live. Whether the workers that were about to start have done so is not known. Others
    /// are started in their place when the hosts are known again, which may have changed.
    fn resume(&mut self, now: Duration) -> Vec<Decision> {
        self.hosts.outdate();
        self.returning_until = now + self.rules.liveness.heartbeat_timeout;
        self.workers.retain(|_, worker| worker.stage != Stage::Starting);
        for worker in self.workers.values_mut() {
            worker.presence = Presence::at(now);
        }
        match &self.phase {
            Phase::Open => {}
            Phase::Aborted { reason } => return vec![Decision::Aborted { reason: reason.clone() }],
            Phase::Finished { generation } => {
                let end = |task: &TaskId| Decision::End { task: *task, reason: DONE.to_owned() };
                let finished = Decision::Finished { generation: *generation };
                return self.unheard.keys().map(end).chain([finished]).collect();
            }
        }
        if let Some(present) = &mut self.present {
            present.forget_told();
        }
        self.settle(now)
    }

    /// Goes by other rules from now on.
    pub(crate) fn go_by(&mut self, rules: Rules) {
        self.hosts.cool_down(rules.cooldown);
        self.rules = rules;
    }

    /// Workers that have registered and are not known to have ended, and the hosts they were
    /// started on.
    pub(crate) fn living(&self) -> impl Iterator<Item = (TaskId, &str)> {
        let lives = |stage: &Stage| !matches!(stage, Stage::Starting | Stage::Done);
        self.workers
            .iter()
            .filter(move |(_, worker)| lives(&worker.stage))
            .map(|(task, worker)| (*task, worker.host.as_str()))
            .chain(self.unheard.iter().map(|(task, host)| (*task, host.as_str())))
    }

    /// Workers that were started once, or came, and are no more.
    pub(crate) fn gone(&self) -> impl Iterator<Item = TaskId> {
        let started = (0..self.next).map(TaskId);
        let known =
            |task: &TaskId| self.workers.contains_key(task) || self.unheard.contains_key(task);
        started.chain(self.came.iter().copied()).filter(move |task| !known(task))
    }
}

/// A map by pairs, as a list: keys of JSON are single.
pub(super) mod pairs {
    use std::collections::BTreeMap;

    use farandole_world::TaskId;
    use serde::{Deserialize as _, Deserializer, Serializer};

    type Pairs = BTreeMap<(TaskId, TaskId), u32>;

    pub(in super::super) fn serialize<S: Serializer>(
        pairs: &Pairs,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(pairs)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Pairs, D::Error> {
        Vec::<((TaskId, TaskId), u32)>::deserialize(from).map(|all| all.into_iter().collect())
    }
}
