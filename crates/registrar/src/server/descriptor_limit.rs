// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! File descriptors of the driver: every agent and every worker of a job holds a connection.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// Number of descriptors for other purposes: files, pipes, and connections that have not shown the
/// token.
const SPARE_DESCRIPTORS: u64 = 64;

/// Number of descriptors that connections may not take.
const RESERVED_DESCRIPTORS: u64 = SPARE_DESCRIPTORS / 2;

/// Raises the soft limit of open files to the number that the job may need: at least for
/// `min_connections` connections, if possible for `max_connections`, including connections that
/// have not shown the token. Returns the largest number of simultaneous connections. With more
/// connections, `accept` would fail for all callers until one connection ends.
///
/// # Errors
/// `Descriptors`, with the required number, if the hard limit is too low for `min_connections`
/// connections.
pub(super) fn raise_limit_for_connections(
    min_connections: u32,
    max_connections: u32,
) -> Result<usize> {
    // The driver is the user's process, which may have many files open.
    let taken = count_open_descriptors();
    let needed = |connections: u32| taken + u64::from(connections) + SPARE_DESCRIPTORS;
    let (must, may) = (needed(min_connections), needed(max_connections));
    raise_soft_limit(min_connections, must, may)?;
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(may);
    Ok(usize::try_from(
        soft.saturating_sub(taken + RESERVED_DESCRIPTORS).min(max_connections.into()),
    )
    .unwrap_or(usize::MAX))
}

fn raise_soft_limit(min_connections: u32, must: u64, may: u64) -> Result<()> {
    let limits = getrlimit(Resource::Nofile);
    if limits.current.is_none_or(|soft| soft >= may) {
        return Ok(());
    }
    let refused =
        |limit: u64| Error::Descriptors { connections: min_connections, needed: must, limit };
    // Fails at the start: later, some tasks could never connect, and the job would only time out.
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

/// Returns the number of open descriptors; 0 if the system does not show it.
fn count_open_descriptors() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |list| list.count() as u64)
}
