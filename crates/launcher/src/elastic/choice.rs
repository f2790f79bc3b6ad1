// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The choice of a source of hosts.

use std::path::PathBuf;

use farandole_config::Config;

use super::discovery::{Discovery, Fixed, HostFile};
use super::script::Script;
use super::slurm::Slurm;
use crate::allocation::{Allocation, Here, Surroundings as _};
use crate::hosts::HostSlots;

/// Returns the program that the configuration names, else a host file, else the hosts that were
/// named, else those of the batch system, else this host with `slots`.
pub fn chosen(
    config: &Config,
    hostfile: Option<PathBuf>,
    hosts: Vec<HostSlots>,
    allocation: Option<&Allocation>,
    slots: u32,
) -> Box<dyn Discovery> {
    let limit = config.discovery_timeout;
    if !config.host_discovery_script.is_empty() {
        let (command, slots_per_host) =
            (config.host_discovery_script.clone(), config.slots_per_host);
        return Box::new(Script { command, slots_per_host, limit });
    }
    match (hostfile, allocation) {
        (Some(path), _) => Box::new(HostFile(path)),
        _ if !hosts.is_empty() => Box::new(Fixed(hosts)),
        (None, Some(Allocation { file: Some(path), .. })) => Box::new(HostFile(path.clone())),
        (None, Some(Allocation { system: "Slurm", hosts, .. })) if Here.program("scontrol") => {
            Box::new(Slurm { nodes: hosts.clone(), limit })
        }
        (None, Some(Allocation { hosts, .. })) if !hosts.is_empty() => {
            Box::new(Fixed(hosts.clone()))
        }
        _ => Box::new(Fixed(vec![HostSlots::new("localhost", slots)])),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::discovery::Stop;
    use super::*;

    fn found(
        given: &[(&str, &str)],
        hostfile: Option<PathBuf>,
        hosts: &[&str],
        allocation: Option<&Allocation>,
    ) -> (String, bool) {
        let given: BTreeMap<String, String> =
            given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let config = Config::read(|_| None, &given).unwrap();
        let hosts = hosts.iter().map(|host| HostSlots::new(*host, 1)).collect();
        let mut discovery = chosen(&config, hostfile, hosts, allocation, 3);
        let hosts = discovery.find(&Stop::default()).unwrap();
        let shown: Vec<String> =
            hosts.iter().map(|host| format!("{}:{}", host.host, host.slots)).collect();
        (shown.join(" "), discovery.is_fixed())
    }

    #[test]
    fn flags_have_priority_over_the_batch_system_and_that_over_this_host() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "f slots=2\n").unwrap();
        let path = Some(file.path().to_owned());
        let batch = Allocation {
            system: "PBS",
            hosts: vec![HostSlots::new("b", 2)],
            shell: None,
            file: None,
        };
        let pods = Allocation { system: "MPIJob", file: path.clone(), ..batch.clone() };
        let script = [("host_discovery_script", "echo s"), ("slots_per_host", "4")];
        assert_eq!(found(&script, path.clone(), &["h"], Some(&batch)), ("s:4".to_owned(), false));
        assert_eq!(found(&[], path, &["h"], Some(&batch)), ("f:2".to_owned(), false));
        assert_eq!(found(&[], None, &["h"], Some(&batch)), ("h:1".to_owned(), true));
        assert_eq!(found(&[], None, &[], Some(&pods)), ("f:2".to_owned(), false));
        assert_eq!(found(&[], None, &[], Some(&batch)), ("b:2".to_owned(), true));
        assert_eq!(found(&[], None, &[], None), ("localhost:3".to_owned(), true));
    }
}
