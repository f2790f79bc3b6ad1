// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Who says which hosts there are.

use std::path::PathBuf;

use farandole_config::Config;

use super::discovery::{Discovery, Fixed, HostFile};
use super::script::Script;
use super::slurm::Slurm;
use crate::allocation::{Allocation, Here, Surroundings as _};
use crate::hosts::HostSlots;

/// The program that the configuration names, else a host file, else the hosts that were named, else those of the batch
/// system, else this host with `slots`.
pub fn chosen(
    config: &Config,
    hostfile: Option<PathBuf>,
    hosts: Vec<HostSlots>,
    allocation: Option<&Allocation>,
    slots: u32,
) -> Box<dyn Discovery> {
    let limit = config.discovery_timeout;
    if !config.host_discovery_script.is_empty() {
        let (command, slots_per_host) = (config.host_discovery_script.clone(), config.slots_per_host);
        return Box::new(Script { command, slots_per_host, limit });
    }
    match (hostfile, allocation) {
        (Some(path), _) => Box::new(HostFile(path)),
        _ if !hosts.is_empty() => Box::new(Fixed(hosts)),
        (None, Some(Allocation { file: Some(path), .. })) => Box::new(HostFile(path.clone())),
        (None, Some(Allocation { system: "Slurm", hosts, .. })) if Here.program("scontrol") => {
            Box::new(Slurm { nodes: hosts.clone(), limit })
        }
        (None, Some(Allocation { hosts, .. })) if !hosts.is_empty() => Box::new(Fixed(hosts.clone())),
        _ => Box::new(Fixed(vec![HostSlots::new("localhost", slots)])),
    }
}
