// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finds the names that mean this host, and the tasks that run here.

use std::net::{IpAddr, ToSocketAddrs as _};
use std::thread;

use farandole_registrar::local_host_facts;

use crate::error::Result;
use crate::hosts::{HostPlacement, HostSlots, place_tasks};

/// Returns the tasks of this host, and the tasks of each other host. If `hosts` is empty, all tasks
/// run here.
///
/// # Errors
/// `Usage` when there are fewer slots than tasks.
pub fn split_local_tasks(
    hosts: &[HostSlots],
    num_proc: u32,
) -> Result<(Vec<u32>, Vec<HostPlacement>)> {
    if hosts.is_empty() {
        return Ok(((0..num_proc).collect(), Vec::new()));
    }
    let placements = place_tasks(hosts, num_proc)?;
    let names: Vec<&str> = placements.iter().map(|placement| placement.host.as_str()).collect();
    let (mut local_tasks, mut remote_placements) = (Vec::new(), Vec::new());
    for (is_here, placement) in which_hosts_are_local(&names).into_iter().zip(placements) {
        if is_here {
            local_tasks.extend(placement.tasks)
        } else {
            remote_placements.push(placement)
        }
    }
    Ok((local_tasks, remote_placements))
}

/// Returns for each name whether it means this host. Names are resolved in parallel, because a
/// resolver that does not answer takes seconds for each.
pub(crate) fn which_hosts_are_local(names: &[&str]) -> Vec<bool> {
    let own = local_host_facts::local_addresses();
    let facts = local_host_facts::host_facts();
    thread::scope(|scope| {
        let asked: Vec<_> = names
            .iter()
            .map(|name| {
                let (own, facts) = (&own, &facts);
                scope.spawn(move || is_local_host(name, &facts.hostname, own))
            })
            .collect();
        // The panic hook has logged a panicked thread; its host counts as remote and is reached by
        // ssh.
        asked.into_iter().map(|thread| thread.join().unwrap_or(false)).collect()
    })
}

fn is_local_host(name: &str, hostname: &str, own: &[IpAddr]) -> bool {
    if name == "localhost" || name == hostname {
        return true;
    }
    // `user@host` is a login for ssh, even if it leads back to this host.
    if name.contains('@') {
        return false;
    }
    // A name that does not resolve may be an alias in ssh's configuration.
    let found: Vec<IpAddr> = (name, 0).to_socket_addrs().map_or_else(
        |_| Vec::new(),
        |addresses| addresses.map(|address| address.ip().to_canonical()).collect(),
    );
    // All addresses: a name of several hosts, as in DNS round robin, must not count as this host.
    !found.is_empty() && found.iter().all(|address| address.is_loopback() || own.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_of_this_host_are_known() {
        let hostname = local_host_facts::host_facts().hostname;
        let names = [
            "localhost",
            "127.0.0.1",
            "::1",
            &hostname,
            "192.0.2.1",
            "no-such-host.invalid",
            "me@localhost",
        ];
        assert_eq!(which_hosts_are_local(&names), [true, true, true, true, false, false, false]);
    }
}
