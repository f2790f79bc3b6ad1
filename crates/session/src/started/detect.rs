// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finds the world of this process from its environment.

use super::starters::{SLURM_STEP, STARTERS, Starter};
use super::{Lookup, nodes};

/// The result of the environment's variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No launcher started this process together with others; with a message for the user.
    Alone(Option<String>),
    /// It is one of several.
    World(Started),
}

/// A rank among others, as a foreign starter has told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Started {
    /// The launcher, for messages.
    pub(crate) starter: &'static str,
    pub(crate) key: &'static str,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    /// Whether all ranks are of one host, where that is known.
    pub(crate) one_host: bool,
    /// Names and values that only processes of this start share; empty where the starter tells
    /// none.
    pub(crate) exact: Vec<(String, String)>,
    /// The batch job around it: several starts may share it.
    pub(crate) batch: Vec<(String, String)>,
    /// The likely host of rank 0.
    pub(crate) first_host: Option<String>,
    /// The variable with the rank.
    pub(crate) variable: &'static str,
}

/// One starter that has told rank and size.
struct Told {
    starter: &'static Starter,
    rank: u32,
    size: u32,
    size_variable: &'static str,
    depth: u8,
}

/// Reads the environment. Pure.
///
/// # Errors
/// What contradicts itself or is missing, naming the variables.
pub(crate) fn detect(
    lookup: Lookup<'_>,
    read: &dyn Fn(&str) -> Option<String>,
) -> Result<Found, String> {
    // Our own launcher tells rank and size under other starters' names, too; its processes have a
    // ticket.
    if lookup("FARANDOLE_TASK").is_some() {
        return Ok(Found::Alone(None));
    }
    let is_singleton = lookup("OMPI_MCA_ess").is_some_and(|module| module == "singleton");
    let mut told = Vec::new();
    let mut sizeless = None;
    for starter in STARTERS.iter().filter(|starter| starter.applies(lookup)) {
        match one(starter, lookup)? {
            Some(one) => told.push(one),
            // If mpi4py is imported without mpirun, Open MPI sets variables of a world of one in
            // this process.
            None if starter.own_names && !is_singleton => sizeless = sizeless.or(Some(starter)),
            None => {}
        }
    }
    let Some(inner) =
        told.iter().max_by_key(|one| (one.depth, std::cmp::Reverse(position(one.starter))))
    else {
        return match sizeless {
            Some(starter) => Err(without_size(starter)),
            None => Ok(Found::Alone(in_batch_script(lookup))),
        };
    };
    for other in &told {
        agree(inner, other)?;
    }
    if inner.size == 1 {
        return Ok(Found::Alone(in_batch_script(lookup)));
    }
    Ok(Found::World(started(inner, lookup, read)))
}

fn position(starter: &Starter) -> Option<usize> {
    STARTERS.iter().position(|other| other.key == starter.key)
}

fn started(told: &Told, lookup: Lookup<'_>, read: &dyn Fn(&str) -> Option<String>) -> Started {
    let pairs = |names: &[&str]| -> Vec<(String, String)> {
        names.iter().filter_map(|name| Some(((*name).to_owned(), lookup(name)?))).collect()
    };
    let starter = told.starter;
    let near = |name: String| name == "localhost" || name == "::1" || name.starts_with("127.");
    let one_host = starter.one_host(told.size, lookup);
    Started {
        starter: starter.name,
        key: starter.key,
        rank: told.rank,
        size: told.size,
        one_host: one_host.unwrap_or_else(|| lookup("MASTER_ADDR").is_some_and(near)),
        exact: pairs(starter.exact),
        batch: pairs(&["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID"]),
        first_host: nodes::first(lookup, read),
        variable: starter.rank,
    }
}

/// The place in one launcher's variables; `None` if there is no size.
fn one(starter: &'static Starter, lookup: Lookup<'_>) -> Result<Option<Told>, String> {
    let number = |name: &str| -> Result<Option<u32>, String> {
        let Some(text) = lookup(name) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| format!("{name} is not a number: {text}"))
    };
    let generic = !starter.own_names;
    let Some(size_variable) = starter.size.iter().find(|name| lookup(name).is_some()) else {
        return Ok(None);
    };
    let (rank, size) = match (number(starter.rank), number(size_variable)) {
        (Ok(Some(rank)), Ok(Some(size))) => (rank, size),
        // Anything may be called RANK.
        (Err(_), _) | (_, Err(_)) if generic && lookup("MASTER_ADDR").is_none() => return Ok(None),
        (Err(reason), _) | (_, Err(reason)) => return Err(reason),
        _ => return Ok(None),
    };
    if rank >= size {
        return Err(format!("{}={rank} is no rank of {size_variable}={size}", starter.rank));
    }
    Ok(Some(Told { starter, rank, size, size_variable, depth: starter.depth(lookup) }))
}

/// # Errors
/// Two starters of which neither stands within the other tell different ranks or sizes; or the
/// inner one says that this process is alone.
fn agree(inner: &Told, other: &Told) -> Result<(), String> {
    if (inner.rank, inner.size) == (other.rank, other.size) {
        return Ok(());
    }
    if inner.depth > other.depth && (inner.size > 1 || other.size == 1) {
        return Ok(());
    }
    let show = |told: &Told| {
        format!("{}={}, {}={}", told.starter.rank, told.rank, told.size_variable, told.size)
    };
    let (inner_name, other_name) = (inner.starter.name, other.starter.name);
    Err(format!(
        "{inner_name} ({}) and {other_name} ({}) tell different places; remove the variables of \
         one of them (env -u)",
        show(inner),
        show(other),
    ))
}

fn without_size(starter: &Starter) -> String {
    match starter.size {
        [] => format!(
            "{} tells a rank and no size: set HOROVOD_RANK and HOROVOD_SIZE, or start by mpirun, \
             srun or farandole run",
            starter.rank
        ),
        names => format!("{} is set without {}", starter.rank, names.join(" or ")),
    }
}

/// One process runs where several were asked for.
fn in_batch_script(lookup: Lookup<'_>) -> Option<String> {
    let tasks = lookup("SLURM_NTASKS").or_else(|| lookup("SLURM_NPROCS"))?;
    let several = tasks.trim().parse::<u32>().is_ok_and(|tasks| tasks > 1);
    let stepless = lookup(SLURM_STEP).is_none();
    (several && stepless).then(|| {
        format!(
            "this process is a world of one, though Slurm's job has {tasks} tasks (SLURM_NTASKS) \
             and no step started it: start it as srun python ..."
        )
    })
}

#[cfg(test)]
mod tests;
