// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finds which names mean this host, and which tasks run here.

use std::net::{IpAddr, ToSocketAddrs as _};
use std::thread;

use farandole_registrar::host;

use crate::error::Result;
use crate::hosts::{HostSlots, Placement, place};

/// Returns the tasks of this host, and those of every other one. No hosts: all stay here.
///
/// # Errors
/// `Usage` when there are fewer slots than tasks.
pub fn placements(hosts: &[HostSlots], num_proc: u32) -> Result<(Vec<u32>, Vec<Placement>)> {
    if hosts.is_empty() {
        return Ok(((0..num_proc).collect(), Vec::new()));
    }
    let placements = place(hosts, num_proc)?;
    let names: Vec<&str> = placements.iter().map(|placement| placement.host.as_str()).collect();
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for (is_here, placement) in are_here(&names).into_iter().zip(placements) {
        if is_here { here.extend(placement.tasks) } else { there.push(placement) }
    }
    Ok((here, there))
}

/// For each of the names, whether it means this host. Names are resolved side by side: a resolver
/// that does not answer takes seconds for each.
pub(crate) fn are_here(names: &[&str]) -> Vec<bool> {
    let own = host::addresses();
    let facts = host::facts();
    thread::scope(|scope| {
        let asked: Vec<_> = names
            .iter()
            .map(|name| {
                let (own, facts) = (&own, &facts);
                scope.spawn(move || is_here(name, &facts.hostname, own))
            })
            .collect();
        // A thread that panicked has said so; its host is reached by ssh.
        asked.into_iter().map(|thread| thread.join().unwrap_or(false)).collect()
    })
}

fn is_here(name: &str, hostname: &str, own: &[IpAddr]) -> bool {
    if name == "localhost" || name == hostname {
        return true;
    }
    // `user@host` is for ssh, even where it leads back here.
    if name.contains('@') {
        return false;
    }
    // A name that does not resolve may be an alias in ssh's own configuration.
    let found: Vec<IpAddr> = (name, 0).to_socket_addrs().map_or_else(
        |_| Vec::new(),
        |addresses| addresses.map(|address| address.ip().to_canonical()).collect(),
    );
    !found.is_empty() && found.iter().all(|address| address.is_loopback() || own.contains(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_of_this_host_are_known() {
        let hostname = host::facts().hostname;
        let names = [
            "localhost",
            "127.0.0.1",
            "::1",
            &hostname,
            "192.0.2.1",
            "no-such-host.invalid",
            "me@localhost",
        ];
        assert_eq!(are_here(&names), [true, true, true, true, false, false, false]);
    }
}
