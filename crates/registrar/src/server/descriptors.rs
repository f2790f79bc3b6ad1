// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Descriptors of the driver: every agent and every worker of a job holds a connection.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// Descriptors that the process needs besides: files, pipes, and connections that are still
/// strangers.
const SPARE: u64 = 64;

/// The number of descriptors that connections may not take.
const OWN: u64 = SPARE / 2;

/// Raises the soft limit as far as the job may need it: `least` connections for certain, `most` at
/// times, strangers included. How many connections there may be at a time: were there more,
/// `accept` would fail, for honest callers as for strangers, until one of them ends.
///
/// # Errors
/// `Descriptors`, naming the number that is needed, where the hard limit is lower than for `least`.
pub(super) fn allow(least: u32, most: u32) -> Result<usize> {
    let taken = open();
    let needed = |connections: u32| taken + u64::from(connections) + SPARE;
    let (must, may) = (needed(least), needed(most));
    raise(least, must, may)?;
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(may);
    Ok(usize::try_from(soft.saturating_sub(taken + OWN).min(most.into())).unwrap_or(usize::MAX))
}

fn raise(least: u32, must: u64, may: u64) -> Result<()> {
    let limits = getrlimit(Resource::Nofile);
    if limits.current.is_none_or(|soft| soft >= may) {
        return Ok(());
    }
    let refused = |limit: u64| Error::Descriptors { connections: least, needed: must, limit };
    if let Some(hard) = limits.maximum.filter(|hard| *hard < must) {
        return Err(refused(hard));
    }
    let current = limits.maximum.map_or(may, |hard| hard.min(may));
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limits })
        .or_else(
            |error| {
                if limits.current.is_some_and(|soft| soft >= must) { Ok(()) } else { Err(error) }
            },
        )
        .map_err(|_| refused(limits.current.unwrap_or(u64::MAX)))
}

/// Descriptors that are open now; none known where the system does not tell.
fn open() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |list| list.count() as u64)
}
