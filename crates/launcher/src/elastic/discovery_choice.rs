// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The choice of the host discovery.

use std::path::PathBuf;

use farandole_config::Config;

use super::discovery::{DiscoverySource, HostFile, StaticHostList};
use super::script::DiscoveryScript;
use super::slurm::SlurmNodes;
use crate::allocation::{BatchAllocation, LaunchEnvironment as _, LocalEnvironment};
use crate::hosts::HostSlots;

/// Chooses the first available source: the script of the configuration, the host file, the given
/// hosts, the hosts of the batch system, or else this host with `slots`.
pub fn choose_discovery(
    config: &Config,
    hostfile: Option<PathBuf>,
    hosts: Vec<HostSlots>,
    allocation: Option<&BatchAllocation>,
    slots: u32,
) -> Box<dyn DiscoverySource> {
    let limit = config.discovery_timeout;
    if !config.host_discovery_script.is_empty() {
        let (command, slots_per_host) =
            (config.host_discovery_script.clone(), config.slots_per_host);
        return Box::new(DiscoveryScript { command, slots_per_host, limit });
    }
    match (hostfile, allocation) {
        // Read again every second, because another program may rewrite it.
        (Some(path), _) => Box::new(HostFile(path)),
        _ if !hosts.is_empty() => Box::new(StaticHostList(hosts)),
        (None, Some(BatchAllocation { file: Some(path), .. })) => Box::new(HostFile(path.clone())),
        (None, Some(BatchAllocation { system: "Slurm", hosts, .. }))
            if LocalEnvironment.has_program("scontrol") =>
        {
            Box::new(SlurmNodes { nodes: hosts.clone(), limit })
        }
        (None, Some(BatchAllocation { hosts, .. })) if !hosts.is_empty() => {
            Box::new(StaticHostList(hosts.clone()))
        }
        _ => Box::new(StaticHostList(vec![HostSlots::new("localhost", slots)])),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::discovery::DiscoveryStopFlag;
    use super::*;

    fn found(
        given: &[(&str, &str)],
        hostfile: Option<PathBuf>,
        hosts: &[&str],
        allocation: Option<&BatchAllocation>,
    ) -> (String, bool) {
        let given: BTreeMap<String, String> =
            given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let config = Config::read(|_| None, &given).unwrap();
        let hosts = hosts.iter().map(|host| HostSlots::new(*host, 1)).collect();
        let mut discovery = choose_discovery(&config, hostfile, hosts, allocation, 3);
        let hosts = discovery.find_hosts(&DiscoveryStopFlag::default()).unwrap();
        let shown: Vec<String> =
            hosts.iter().map(|host| format!("{}:{}", host.host, host.slots)).collect();
        (shown.join(" "), discovery.is_fixed())
    }

    #[test]
    fn flags_have_priority_over_the_batch_system_and_that_over_this_host() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "f slots=2\n").unwrap();
        let path = Some(file.path().to_owned());
        let batch = BatchAllocation {
            system: "PBS",
            hosts: vec![HostSlots::new("b", 2)],
            shell: None,
            file: None,
            refusal: None,
        };
        let pods = BatchAllocation { system: "MPIJob", file: path.clone(), ..batch.clone() };
        let script = [("host_discovery_script", "echo s"), ("slots_per_host", "4")];
        assert_eq!(found(&script, path.clone(), &["h"], Some(&batch)), ("s:4".to_owned(), false));
        assert_eq!(found(&[], path, &["h"], Some(&batch)), ("f:2".to_owned(), false));
        assert_eq!(found(&[], None, &["h"], Some(&batch)), ("h:1".to_owned(), true));
        assert_eq!(found(&[], None, &[], Some(&pods)), ("f:2".to_owned(), false));
        assert_eq!(found(&[], None, &[], Some(&batch)), ("b:2".to_owned(), true));
        assert_eq!(found(&[], None, &[], None), ("localhost:3".to_owned(), true));
    }
}
