// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events of a job for its driver.

use farandole_membership::{ExitReport, GenerationVerdict};
use farandole_telemetry::{RingWeight, WorkerRecord};
use farandole_world::{Generation, Rank, TaskId, World};

/// An event of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum JobEvent {
    /// A task waits for its rank.
    Registered {
        /// The task.
        task: TaskId,
    },
    /// All tasks have their ranks. Seen from rank 0.
    Assigned {
        /// The world.
        world: World,
    },
    /// A worker wrote a line of output or reported a metric.
    Record(WorkerRecord),
    /// A worker ended.
    Exited {
        /// Its task.
        task: TaskId,
        /// Its rank.
        rank: Rank,
        /// The exit.
        exit: ExitReport,
    },
    /// A worker returned a result.
    Result {
        /// Its task.
        task: TaskId,
        /// Its rank.
        rank: Rank,
        /// The bytes.
        data: Vec<u8>,
    },
    /// An agent is gone, before (`rank: None`) or after ranks were assigned.
    Lost {
        /// Its task.
        task: TaskId,
        /// Its rank.
        rank: Option<Rank>,
        /// The observed reason.
        reason: String,
    },
    /// Elastic jobs: a worker must be started. The events of workers of one host follow each other.
    Start {
        /// Its task, which no worker had before.
        task: TaskId,
        /// The host, as it was discovered.
        host: String,
    },
    /// Elastic jobs: a worker must be ended.
    Stop {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: a worker that waited for a world may go.
    Dismissed {
        /// Its task.
        task: TaskId,
        /// The reason.
        reason: String,
    },
    /// Elastic jobs: the function has returned on every rank of the present world.
    Finished {
        /// The number of the world.
        generation: Generation,
    },
    /// A generation or the whole job is over, and its workers are being ended.
    Aborted {
        /// The reason, and the task that failed first, if one did.
        verdict: GenerationVerdict,
        /// The rank of that task.
        rank: Option<Rank>,
    },
}

impl RingWeight for JobEvent {
    fn weight_bytes(&self) -> usize {
        match self {
            Self::Record(record) => record.weight_bytes(),
            Self::Result { data, .. } => data.len(),
            _ => 64,
        }
    }

    /// Returns whether the event may be dropped if the driver is too slow. Only records may be
    /// dropped: the fate of the job depends on every other event.
    fn is_droppable(&self) -> bool {
        matches!(self, Self::Record(_))
    }
}
