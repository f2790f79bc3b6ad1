// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Inputs and outputs of both machines, and the liveness of an agent.

use std::time::Duration;

use farandole_world::{Generation, TaskId, World};
use serde::{Deserialize, Serialize};

use crate::exit::{ExitReport, GenerationVerdict};

/// Limits after which an agent counts as gone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LivenessLimits {
    /// Silence after which an agent is lost.
    pub heartbeat_timeout: Duration,
    /// Longest time for an agent whose connection broke to reconnect.
    pub disconnect_grace: Duration,
}

/// An event for a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum MembershipInput {
    /// An agent shows that it lives.
    #[serde(rename = "Beat")]
    Heartbeat {
        /// Its task.
        task: TaskId,
        /// The session of its process.
        session: u64,
    },
    /// An agent's connection broke.
    Disconnected {
        /// Its task.
        task: TaskId,
        /// The session of its process.
        session: u64,
    },
    /// A worker ended.
    Exited {
        /// Its task.
        task: TaskId,
        /// The generation in which it worked.
        generation: Generation,
        /// Its end, as its agent saw it.
        exit: ExitReport,
    },
    /// The driver aborts the job.
    Abort {
        /// The driver's reason.
        reason: String,
    },
    /// Elastic jobs: the available hosts and their slots.
    Hosts(Vec<(String, u32)>),
    /// Elastic jobs: a worker could not be started.
    NotStarted {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: a worker leaves at its next opportunity.
    Leaves {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Time has passed.
    Tick,
}

/// A decision of a machine.
#[derive(Clone, Debug, PartialEq)]
pub enum MembershipDecision {
    /// A task waits for its rank.
    Registered {
        /// The task.
        task: TaskId,
        /// The session of its process.
        session: u64,
        /// Whether an earlier start of the task was waiting until now.
        replaces: bool,
    },
    /// A waiting task is gone; it may register again.
    Withdrawn {
        /// The task.
        task: TaskId,
        /// The observed reason.
        reason: String,
    },
    /// A generation begins. Seen from rank 0.
    Assigned {
        /// The world.
        world: World,
    },
    /// A running task's agent is gone.
    Lost {
        /// The task.
        task: TaskId,
        /// The observed reason.
        reason: String,
    },
    /// A generation is over, and its workers must end.
    Stop {
        /// The generation.
        generation: Generation,
        /// The reason, which the workers get.
        verdict: GenerationVerdict,
    },
    /// The driver aborted the job: nothing will be assigned any more.
    Aborted {
        /// The driver's reason, or the reason why the job cannot continue.
        reason: String,
    },
    /// All workers of a generation ended successfully: the job is done.
    Finished {
        /// The generation.
        generation: Generation,
    },
    /// Elastic jobs: a worker must be started.
    Start {
        /// Its task, which no worker had before.
        task: TaskId,
        /// The host, as it was discovered.
        host: String,
    },
    /// Elastic jobs: a worker must be ended, or counts as ended and must not come back.
    End {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: a worker that waits for a world gets none, and may go.
    Dismissed {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: members of a world should ask for the next one at their next opportunity.
    Changed {
        /// The generation of the world.
        generation: Generation,
        /// Whether members are to leave.
        removed: bool,
        /// Whether workers wait to join.
        added: bool,
    },
    /// Elastic jobs: a world cannot continue; its members will ask for the next one.
    Broken {
        /// The generation of the world.
        generation: Generation,
        /// The reason, which its members get.
        verdict: GenerationVerdict,
    },
}

/// The reason why a registration was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationRefusal {
    /// The job has no such task.
    #[error("unknown task {task}: the job has tasks 0 to {last}")]
    UnknownTask {
        /// The task.
        task: TaskId,
        /// The last task of the job.
        last: u32,
    },
    /// Another process has registered for the task with the same attempt.
    #[error("task {task} has already registered with attempt {attempt} from another process")]
    Duplicate {
        /// The task.
        task: TaskId,
        /// The attempt.
        attempt: u64,
    },
    /// The task has registered with a higher attempt.
    #[error(
        "task {task} has already registered with attempt {current}, attempt {attempt} is stale"
    )]
    Stale {
        /// The task.
        task: TaskId,
        /// The refused attempt.
        attempt: u64,
        /// The highest attempt so far.
        current: u64,
    },
    /// The job was aborted.
    #[error("the job was aborted: {reason}")]
    Aborted {
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: no such worker is expected.
    #[error("task {task} is not expected: the driver has not started it, or counts it as gone")]
    NotWanted {
        /// The task.
        task: TaskId,
    },
    /// Elastic jobs: the worker must leave.
    #[error("task {task} is to leave the job")]
    Dismissed {
        /// The task.
        task: TaskId,
    },
    /// The job is done.
    #[error("the job is done: all workers of generation {generation} ended well")]
    Finished {
        /// The last generation.
        generation: Generation,
    },
}

/// The last heartbeat of an agent, and the time of its disconnection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AgentPresence {
    pub(crate) seen: Duration,
    pub(crate) disconnected: Option<Duration>,
}

impl AgentPresence {
    pub(crate) fn seen_at(now: Duration) -> Self {
        Self { seen: now, disconnected: None }
    }

    /// Returns the reason why the agent counts as gone, if there is one.
    pub(crate) fn gone_reason(&self, now: Duration, liveness: &LivenessLimits) -> Option<String> {
        let silent = now.saturating_sub(self.seen);
        // Silence counts also while the connection is open: a cut network closes no connection.
        if silent >= liveness.heartbeat_timeout {
            return Some(format!("its agent was silent for {:.1} s", silent.as_secs_f64()));
        }
        let since = self.disconnected?;
        (now.saturating_sub(since) >= liveness.disconnect_grace)
            .then(|| "its agent's connection closed".to_owned())
    }
}
