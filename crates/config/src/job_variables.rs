// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The variables that a job sets for its own processes, in both languages. They are no settings:
//! users only read them. The tickets, numbers and times among them are knobs, because a process may
//! also get them from its user.

/// A variable that a job sets for its own processes.
#[derive(Clone, Copy, Debug)]
pub struct JobVariable {
    /// Name without a prefix: `FARANDOLE_<name>`.
    pub name: &'static str,
    /// The documentation.
    pub doc: &'static str,
}

/// Every such variable, in the order of the reference page.
pub const JOB_VARIABLES: &[JobVariable] = &[
    JobVariable {
        name: "PAYLOAD_FD",
        doc: "Number of the pipe from which a worker reads its function.",
    },
    JobVariable {
        name: "RESULT_FD",
        doc: "Number of the pipe into which a worker writes its result.",
    },
    JobVariable { name: "SCRATCH", doc: "Temporary directory of a worker. Its agent removes it." },
    JobVariable {
        name: "TASK_RESOURCES",
        doc: "The addresses of resources that Spark has assigned to the task, as JSON.",
    },
    JobVariable { name: "SPARK_EXECUTOR", doc: "Executor or Ray node that runs the worker." },
    JobVariable {
        name: "SPARK_TOLD",
        doc: "Set if the driver shows the reports of its workers: their GPUs, and their use of time.",
    },
    JobVariable {
        name: "SPARK_STOP",
        doc: "Token that the stop file of a fit must contain. Then the fit ends in order.",
    },
    JobVariable {
        name: "REQUEUE",
        doc: "Set if the launcher requeues its batch job once its ranks have committed and ended.",
    },
    JobVariable {
        name: "KEYS_AT_DRIVER",
        doc: "Job whose driver has the secret of the store, and whether a worker can ask it.",
    },
    JobVariable {
        name: "RANK_HOLDER",
        doc: "Job, rank and process that hold a rank of another launcher, for processes that it \
              starts.",
    },
];
