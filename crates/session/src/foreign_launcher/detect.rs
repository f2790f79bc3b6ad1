// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Detects from the environment which rank another launcher gave to this process.

use farandole_world::format_counted_noun;

use super::launcher_table::{KNOWN_LAUNCHERS, LauncherVariables, SLURM_STEP_VARIABLE};
use super::{VariableLookup, first_host};

/// Result of the detection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LaunchDetection {
    /// This process runs alone. The text is a warning for the user.
    Alone(Option<String>),
    /// This process is one of several.
    World(DetectedRank),
}

/// A rank of several, as the variables of another launcher say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DetectedRank {
    /// The launcher, for messages.
    pub(crate) launcher: &'static str,
    pub(crate) launcher_key: &'static str,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    /// Whether all ranks are known to be on one host.
    pub(crate) one_host: bool,
    /// Names and values that only the processes of this start share; empty if the launcher sets
    /// none.
    pub(crate) start_variables: Vec<(String, String)>,
    /// Variables of the batch job, which several starts may share.
    pub(crate) batch_variables: Vec<(String, String)>,
    /// The likely host of rank 0.
    pub(crate) first_host: Option<String>,
    /// The variable with the rank.
    pub(crate) rank_variable: &'static str,
}

/// Rank and size according to one launcher.
struct ReportedRank {
    launcher: &'static LauncherVariables,
    rank: u32,
    size: u32,
    size_variable: &'static str,
    depth: u8,
}

/// Detects the launch from the environment. Pure.
///
/// # Errors
/// The variables contradict each other, or one is missing; the text names them.
pub(crate) fn detect_launch(
    lookup: VariableLookup<'_>,
    read: &dyn Fn(&str) -> Option<String>,
) -> Result<LaunchDetection, String> {
    // Our own launcher also sets rank and size under other launchers' names; its processes have a
    // ticket.
    if lookup("FARANDOLE_TASK").is_some() {
        return Ok(LaunchDetection::Alone(None));
    }
    let is_singleton = lookup("OMPI_MCA_ess").is_some_and(|module| module == "singleton");
    let mut reports = Vec::new();
    let mut sizeless = None;
    for starter in KNOWN_LAUNCHERS.iter().filter(|starter| starter.applies_to_process(lookup)) {
        match read_reported_rank(starter, lookup)? {
            Some(one) => reports.push(one),
            // If mpi4py is imported without mpirun, Open MPI sets variables of a world of one in
            // this process.
            None if starter.own_names && !is_singleton => sizeless = sizeless.or(Some(starter)),
            None => {}
        }
    }
    let Some(inner) = reports
        .iter()
        .max_by_key(|one| (one.depth, std::cmp::Reverse(launcher_table_index(one.launcher))))
    else {
        return match sizeless {
            Some(starter) => Err(missing_size_message(starter)),
            None => Ok(LaunchDetection::Alone(batch_script_warning(lookup))),
        };
    };
    // Variables of an outer shell or batch job may be stale. Guessing one of them could start a
    // world with wrong ranks.
    for other in &reports {
        check_nested_launchers_agree(inner, other)?;
    }
    // A world of one needs no rendezvous, but a forgotten `srun` is a common mistake.
    if inner.size == 1 {
        return Ok(LaunchDetection::Alone(batch_script_warning(lookup)));
    }
    Ok(LaunchDetection::World(build_detected_rank(inner, lookup, read)))
}

fn launcher_table_index(starter: &LauncherVariables) -> Option<usize> {
    KNOWN_LAUNCHERS.iter().position(|other| other.key == starter.key)
}

fn build_detected_rank(
    reported: &ReportedRank,
    lookup: VariableLookup<'_>,
    read: &dyn Fn(&str) -> Option<String>,
) -> DetectedRank {
    let pairs = |names: &[&str]| -> Vec<(String, String)> {
        names.iter().filter_map(|name| Some(((*name).to_owned(), lookup(name)?))).collect()
    };
    let starter = reported.launcher;
    // A loopback address of rank 0 can be reached only from its own host.
    let near = |name: String| name == "localhost" || name == "::1" || name.starts_with("127.");
    let one_host = starter.is_single_host(reported.size, lookup);
    DetectedRank {
        launcher: starter.name,
        launcher_key: starter.key,
        rank: reported.rank,
        size: reported.size,
        one_host: one_host.unwrap_or_else(|| lookup("MASTER_ADDR").is_some_and(near)),
        start_variables: pairs(starter.start_variables),
        // The restart count makes a requeued job another job: a ticket of the first try must not be
        // used.
        batch_variables: pairs(&["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID"]),
        first_host: first_host::likely_first_host(lookup, read),
        rank_variable: starter.rank_variable,
    }
}

/// Reads the rank from one launcher's variables; `None` if no size is set.
fn read_reported_rank(
    starter: &'static LauncherVariables,
    lookup: VariableLookup<'_>,
) -> Result<Option<ReportedRank>, String> {
    let number = |name: &str| -> Result<Option<u32>, String> {
        let Some(text) = lookup(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| format!("{name} is not a number: {text}"))
    };
    let generic = !starter.own_names;
    let Some(size_variable) = starter.size_variables.iter().find(|name| lookup(name).is_some())
    else {
        return Ok(None);
    };
    let (rank, size) = match (number(starter.rank_variable), number(size_variable)) {
        (Ok(Some(rank)), Ok(Some(size))) => (rank, size),
        // Other software may set RANK, too: without MASTER_ADDR, a value that is no number is
        // ignored.
        (Err(_), _) | (_, Err(_)) if generic && lookup("MASTER_ADDR").is_none() => return Ok(None),
        (Err(reason), _) | (_, Err(reason)) => return Err(reason),
        _ => return Ok(None),
    };
    if rank >= size {
        return Err(format!(
            "{}={rank} is no rank of {size_variable}={size}",
            starter.rank_variable
        ));
    }
    Ok(Some(ReportedRank {
        launcher: starter,
        rank,
        size,
        size_variable,
        depth: starter.nesting_depth(lookup),
    }))
}

/// # Errors
/// Neither of the two launchers is inside the other, and their ranks or sizes differ; or the inner
/// one has a size of one and the outer one does not.
fn check_nested_launchers_agree(inner: &ReportedRank, other: &ReportedRank) -> Result<(), String> {
    if (inner.rank, inner.size) == (other.rank, other.size) {
        return Ok(());
    }
    if inner.depth > other.depth && (inner.size > 1 || other.size == 1) {
        return Ok(());
    }
    let show = |reported: &ReportedRank| {
        format!(
            "{}={}, {}={}",
            reported.launcher.rank_variable, reported.rank, reported.size_variable, reported.size
        )
    };
    let (inner_name, other_name) = (inner.launcher.name, other.launcher.name);
    Err(format!(
        "{inner_name} ({}) and {other_name} ({}) tell different places; remove the variables of \
         one of them (env -u)",
        show(inner),
        show(other),
    ))
}

fn missing_size_message(starter: &LauncherVariables) -> String {
    match starter.size_variables {
        [] => format!(
            "{} tells a rank and no size: set HOROVOD_RANK and HOROVOD_SIZE, or start by mpirun, \
             srun or farandole run",
            starter.rank_variable
        ),
        names => format!("{} is set without {}", starter.rank_variable, names.join(" or ")),
    }
}

/// Returns a warning if Slurm's job has several tasks, but this process was not started by a step.
fn batch_script_warning(lookup: VariableLookup<'_>) -> Option<String> {
    let tasks = lookup("SLURM_NTASKS").or_else(|| lookup("SLURM_NPROCS"))?;
    let tasks = tasks.trim().parse::<u64>().ok().filter(|tasks| *tasks > 1)?;
    lookup(SLURM_STEP_VARIABLE).is_none().then(|| {
        format!(
            "this process is a world of one, though Slurm's job has {} (SLURM_NTASKS) and no step \
             started it: start it as srun python ...",
            format_counted_noun(tasks, "task")
        )
    })
}

#[cfg(test)]
mod tests;
