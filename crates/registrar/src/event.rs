// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events of a job for its driver.

use farandole_telemetry::{Record, Weight};
use farandole_world::{Generation, Rank, TaskId, World};

use crate::exit::{Exit, Verdict};

/// Something that happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
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
    /// A worker wrote or reported something.
    Record(Record),
    /// A worker ended.
    Exited {
        /// Its task.
        task: TaskId,
        /// Its rank.
        rank: Rank,
        /// The exit.
        exit: Exit,
    },
    /// A worker returned something.
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
    /// Elastic jobs: a worker is to be started. Those of one host come together.
    Start {
        /// Its task, which no worker had before.
        task: TaskId,
        /// The host, as it was discovered.
        host: String,
    },
    /// Elastic jobs: a worker is to be ended.
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
    /// A generation is over, or the whole job, and its workers are being ended.
    Aborted {
        /// The reason, and the task that failed first, if one did.
        verdict: Verdict,
        /// The rank of that task.
        rank: Option<Rank>,
    },
}

impl Weight for Event {
    fn weight(&self) -> usize {
        match self {
            Self::Record(record) => record.weight(),
            Self::Result { data, .. } => data.len(),
            _ => 64,
        }
    }

    /// Records may be dropped when the driver does not keep up; what the job's life hangs on may
    /// not.
    fn droppable(&self) -> bool {
        matches!(self, Self::Record(_))
    }
}
