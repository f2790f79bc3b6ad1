// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Descriptors of the driver: every agent and every worker of a job holds a connection.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, Result};

/// Descriptors that the process needs besides: files, pipes, and connections that are still strangers.
const SPARE: u64 = 64;

/// Raises the soft limit as far as `connections` need it.
///
/// # Errors
/// `Descriptors`, naming the number that is needed, where the hard limit is lower.
pub(super) fn allow(connections: u32) -> Result<()> {
    let needed = open() + u64::from(connections) + SPARE;
    let limits = getrlimit(Resource::Nofile);
    if limits.current.is_none_or(|soft| soft >= needed) {
        return Ok(());
    }
    let refused = |limit: u64| Error::Descriptors { connections, needed, limit };
    if let Some(hard) = limits.maximum.filter(|hard| *hard < needed) {
        return Err(refused(hard));
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), ..limits })
        .map_err(|_| refused(limits.current.unwrap_or(u64::MAX)))
}

/// Descriptors that are open now; none known where the system does not tell.
fn open() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |list| list.count() as u64)
}
