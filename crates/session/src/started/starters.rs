// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table of other launchers and their variables.

use super::Lookup;

/// The variables of one launcher.
#[derive(Debug)]
pub(super) struct Starter {
    /// Its name, for messages.
    pub(super) name: &'static str,
    /// Its name within names of jobs.
    pub(super) key: &'static str,
    pub(super) rank: &'static str,
    /// The first that is set counts.
    pub(super) size: &'static [&'static str],
    pub(super) spread: Spread,
    /// Variables that tell one start of it from every other, equal in all its processes.
    pub(super) exact: &'static [&'static str],
    /// Whether a rank without a size is an error: names that only this starter uses.
    pub(super) own_names: bool,
}

/// A starter's statement whether all its processes are on one host.
#[derive(Debug)]
pub(super) enum Spread {
    /// Number of processes on this host.
    LocalSize(&'static str),
    /// Number of hosts; the first that is set counts.
    Hosts(&'static [&'static str]),
    /// It does not.
    Unknown,
}

/// A process started by Slurm's own step, and not by the shell of a batch script.
pub(super) const SLURM_STEP: &str = "SLURM_STEP_ID";
/// Set by the agent of torchrun, which always starts the process itself.
const TORCH_AGENT: &str = "TORCHELASTIC_RUN_ID";

/// In the order in which the first that is there gives the job its name.
pub(super) const STARTERS: &[Starter] = &[
    Starter {
        name: "torchrun (RANK, WORLD_SIZE)",
        key: "torchrun",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        spread: Spread::LocalSize("LOCAL_WORLD_SIZE"),
        exact: &[TORCH_AGENT, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"],
        own_names: false,
    },
    Starter {
        name: "Open MPI's mpirun",
        key: "openmpi",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        spread: Spread::LocalSize("OMPI_COMM_WORLD_LOCAL_SIZE"),
        exact: &[
            "OMPI_MCA_ess_base_jobid",
            "PMIX_NAMESPACE",
            "OMPI_MCA_orte_precondition_transports",
        ],
        own_names: true,
    },
    Starter {
        name: "jsrun",
        key: "jsrun",
        rank: "JSM_NAMESPACE_RANK",
        size: &["JSM_NAMESPACE_SIZE"],
        spread: Spread::LocalSize("JSM_NAMESPACE_LOCAL_SIZE"),
        exact: &["LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE"],
        own_names: true,
    },
    Starter {
        name: "the mpirun of MPICH or Intel MPI",
        key: "hydra",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        spread: Spread::LocalSize("MPI_LOCALNRANKS"),
        exact: &["PMI_JOBID", "PMI_PORT"],
        own_names: true,
    },
    Starter {
        name: "MVAPICH's mpirun_rsh",
        key: "mvapich",
        rank: "MV2_COMM_WORLD_RANK",
        size: &["MV2_COMM_WORLD_SIZE"],
        spread: Spread::LocalSize("MV2_COMM_WORLD_LOCAL_SIZE"),
        exact: &[],
        own_names: true,
    },
    Starter {
        name: "Horovod's variables",
        key: "horovod",
        rank: "HOROVOD_RANK",
        size: &["HOROVOD_SIZE"],
        spread: Spread::LocalSize("HOROVOD_LOCAL_SIZE"),
        exact: &[
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT",
            "MASTER_ADDR",
            "MASTER_PORT",
        ],
        own_names: true,
    },
    Starter {
        name: "srun",
        key: "slurm",
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        spread: Spread::Hosts(&["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"]),
        exact: &["SLURM_JOB_ID", SLURM_STEP, "SLURM_RESTART_COUNT"],
        own_names: true,
    },
    // Last: it has no size of its own, and counts only if no other starter gives one.
    Starter {
        name: "PMIx",
        key: "pmix",
        rank: "PMIX_RANK",
        size: &[],
        spread: Spread::Unknown,
        exact: &["PMIX_NAMESPACE"],
        own_names: true,
    },
];

impl Starter {
    /// Returns the depth within other starters: of `srun mpirun` and `srun torchrun` the second one
    /// starts the process, and the variables of the first are left over.
    pub(super) fn depth(&self, lookup: Lookup<'_>) -> u8 {
        match self.key {
            "torchrun" if lookup(TORCH_AGENT).is_some() => 2,
            "slurm" => 0,
            _ => 1,
        }
    }

    /// Returns whether its variables are this process's: those of Slurm are also set in a batch
    /// script, where one process runs.
    pub(super) fn applies(&self, lookup: Lookup<'_>) -> bool {
        lookup(self.rank).is_some() && (self.key != "slurm" || lookup(SLURM_STEP).is_some())
    }

    /// Returns whether all its processes are on one host; `None` where it does not say.
    pub(super) fn one_host(&self, size: u32, lookup: Lookup<'_>) -> Option<bool> {
        let number = |name: &str| lookup(name)?.trim().parse::<u32>().ok();
        match self.spread {
            Spread::LocalSize(name) => number(name).map(|local| local == size),
            Spread::Hosts(names) => {
                names.iter().find_map(|name| number(name)).map(|hosts| hosts == 1)
            }
            Spread::Unknown => None,
        }
    }
}
