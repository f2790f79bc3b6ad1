// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table of other launchers and their variables.

use super::VariableLookup;

/// The variables of one launcher.
#[derive(Debug)]
pub(super) struct LauncherVariables {
    /// Name for messages.
    pub(super) name: &'static str,
    /// Name within the names of jobs.
    pub(super) key: &'static str,
    pub(super) rank_variable: &'static str,
    /// The first variable that is set has the size.
    pub(super) size_variables: &'static [&'static str],
    pub(super) host_evidence: SingleHostEvidence,
    /// Variables that identify one start, with the same values in all its processes.
    pub(super) start_variables: &'static [&'static str],
    /// Whether only this launcher uses these names. Then a rank without a size is an error.
    pub(super) own_names: bool,
}

/// Variables that say whether all processes are on one host.
#[derive(Debug)]
pub(super) enum SingleHostEvidence {
    /// Number of processes on this host.
    LocalSize(&'static str),
    /// Number of hosts; the first variable that is set counts.
    Hosts(&'static [&'static str]),
    /// The launcher does not say.
    Unknown,
}

/// Set by a step of Slurm, and not in the shell of a batch script.
pub(super) const SLURM_STEP_VARIABLE: &str = "SLURM_STEP_ID";
/// Set by the agent of torchrun, which always starts the process itself.
const TORCH_AGENT_VARIABLE: &str = "TORCHELASTIC_RUN_ID";

/// Sorted by priority: if several launchers apply equally, the first one names the job.
pub(super) const KNOWN_LAUNCHERS: &[LauncherVariables] = &[
    LauncherVariables {
        name: "torchrun (RANK, WORLD_SIZE)",
        key: "torchrun",
        rank_variable: "RANK",
        size_variables: &["WORLD_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("LOCAL_WORLD_SIZE"),
        start_variables: &[
            TORCH_AGENT_VARIABLE,
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RESTART_COUNT",
        ],
        own_names: false,
    },
    LauncherVariables {
        name: "Open MPI's mpirun",
        key: "openmpi",
        rank_variable: "OMPI_COMM_WORLD_RANK",
        size_variables: &["OMPI_COMM_WORLD_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("OMPI_COMM_WORLD_LOCAL_SIZE"),
        start_variables: &[
            "OMPI_MCA_ess_base_jobid",
            "PMIX_NAMESPACE",
            "OMPI_MCA_orte_precondition_transports",
        ],
        own_names: true,
    },
    LauncherVariables {
        name: "jsrun",
        key: "jsrun",
        rank_variable: "JSM_NAMESPACE_RANK",
        size_variables: &["JSM_NAMESPACE_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("JSM_NAMESPACE_LOCAL_SIZE"),
        start_variables: &["LSB_JOBID", "JSM_NAMESPACE_ID", "PMIX_NAMESPACE"],
        own_names: true,
    },
    LauncherVariables {
        name: "the mpirun of MPICH or Intel MPI",
        key: "hydra",
        rank_variable: "PMI_RANK",
        size_variables: &["PMI_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("MPI_LOCALNRANKS"),
        start_variables: &["PMI_JOBID", "PMI_PORT"],
        own_names: true,
    },
    LauncherVariables {
        name: "MVAPICH's mpirun_rsh",
        key: "mvapich",
        rank_variable: "MV2_COMM_WORLD_RANK",
        size_variables: &["MV2_COMM_WORLD_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("MV2_COMM_WORLD_LOCAL_SIZE"),
        start_variables: &[],
        own_names: true,
    },
    LauncherVariables {
        name: "Horovod's variables",
        key: "horovod",
        rank_variable: "HOROVOD_RANK",
        size_variables: &["HOROVOD_SIZE"],
        host_evidence: SingleHostEvidence::LocalSize("HOROVOD_LOCAL_SIZE"),
        start_variables: &[
            "HOROVOD_GLOO_RENDEZVOUS_ADDR",
            "HOROVOD_GLOO_RENDEZVOUS_PORT",
            "MASTER_ADDR",
            "MASTER_PORT",
        ],
        own_names: true,
    },
    LauncherVariables {
        name: "srun",
        key: "slurm",
        rank_variable: "SLURM_PROCID",
        size_variables: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        host_evidence: SingleHostEvidence::Hosts(&[
            "SLURM_STEP_NUM_NODES",
            "SLURM_JOB_NUM_NODES",
            "SLURM_NNODES",
        ]),
        start_variables: &["SLURM_JOB_ID", SLURM_STEP_VARIABLE, "SLURM_RESTART_COUNT"],
        own_names: true,
    },
    // Last: PMIx has no variable for the size, and counts only if no other launcher sets one.
    LauncherVariables {
        name: "PMIx",
        key: "pmix",
        rank_variable: "PMIX_RANK",
        size_variables: &[],
        host_evidence: SingleHostEvidence::Unknown,
        start_variables: &["PMIX_NAMESPACE"],
        own_names: true,
    },
];

impl LauncherVariables {
    /// Returns how deep the launcher is inside others: with `srun mpirun` or `srun torchrun`, the
    /// second one starts the process, and the variables of the first one are only inherited.
    pub(super) fn nesting_depth(&self, lookup: VariableLookup<'_>) -> u8 {
        match self.key {
            // The agent of torchrun starts each process itself, so its variables describe this
            // process.
            "torchrun" if lookup(TORCH_AGENT_VARIABLE).is_some() => 2,
            "slurm" => 0,
            _ => 1,
        }
    }

    /// Returns whether the variables describe this process. Slurm also sets them in a batch script,
    /// where only one process runs.
    pub(super) fn applies_to_process(&self, lookup: VariableLookup<'_>) -> bool {
        lookup(self.rank_variable).is_some()
            && (self.key != "slurm" || lookup(SLURM_STEP_VARIABLE).is_some())
    }

    /// Returns whether all processes are on one host; `None` if the launcher does not say.
    pub(super) fn is_single_host(&self, size: u32, lookup: VariableLookup<'_>) -> Option<bool> {
        let number = |name: &str| lookup(name)?.trim().parse::<u32>().ok();
        match self.host_evidence {
            SingleHostEvidence::LocalSize(name) => number(name).map(|local| local == size),
            SingleHostEvidence::Hosts(names) => {
                names.iter().find_map(|name| number(name)).map(|hosts| hosts == 1)
            }
            SingleHostEvidence::Unknown => None,
        }
    }
}
