// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The usable nodes of a Slurm job. A job that was submitted with `--no-kill` survives failed
//! nodes, and such nodes may come back.

use std::process::Command;
use std::time::Duration;

use super::discovery::{DiscoverySource, DiscoveryStopFlag};
use super::program_query::query_program;
use crate::hosts::HostSlots;

/// States in which a node runs nothing. A `*` behind a state marks a node that does not respond.
const UNUSABLE_NODE_STATES: [&str; 8] =
    ["DOWN", "ERROR", "FAIL", "FAILING", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT", "UNKNOWN"];

/// The nodes of this process's job, as Slurm's controller sees them.
#[derive(Clone, Debug)]
pub struct SlurmNodes {
    /// The job's nodes and their slots.
    pub nodes: Vec<HostSlots>,
    /// Longest time for an answer of the controller.
    pub limit: Duration,
}

impl DiscoverySource for SlurmNodes {
    fn find_hosts(&mut self, stop: &DiscoveryStopFlag) -> Result<Vec<HostSlots>, String> {
        let names: Vec<&str> = self.nodes.iter().map(|node| node.host.as_str()).collect();
        let mut scontrol = Command::new("scontrol");
        scontrol.args(["--oneliner", "show", "node", &names.join(",")]);
        let answer = query_program(scontrol, self.limit, stop)
            .map_err(|reason| format!("scontrol {reason}"))?;
        if answer.exit_code != Some(0) {
            return Err(format!(
                "scontrol cannot tell the state of the job's nodes: {}",
                answer.stderr_line
            ));
        }
        Ok(usable_nodes(&self.nodes, &answer.stdout))
    }
}

/// Returns the nodes that a listing shows in a usable state.
fn usable_nodes(nodes: &[HostSlots], listing: &str) -> Vec<HostSlots> {
    let up: Vec<&str> = listing.lines().filter_map(parse_usable_node).collect();
    nodes.iter().filter(|node| up.contains(&node.host.as_str())).cloned().collect()
}

/// Returns the node of a line, if it is usable.
fn parse_usable_node(line: &str) -> Option<&str> {
    let value = |key: &str| line.split_whitespace().find_map(|word| word.strip_prefix(key));
    let (name, state) = (value("NodeName=")?, value("State=")?);
    // Flags follow a state with `+`, such as `IDLE+DRAIN`. A draining node still runs its job.
    let down =
        state.contains('*') || state.split('+').any(|part| UNUSABLE_NODE_STATES.contains(&part));
    (!down).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_are_down_or_do_not_answer_are_left_out_and_come_back() {
        let nodes = ["n1", "n2", "n3", "n4"].map(|name| HostSlots::new(name, 2));
        let listing = "NodeName=n1 Arch=x86_64 CPUAlloc=4 State=ALLOCATED ThreadsPerCore=1\n\
                       NodeName=n2 State=DOWN+NOT_RESPONDING\nNodeName=n3 State=MIXED+DRAIN\n\
                       NodeName=n4 State=ALLOCATED*\n";
        let names = |listing: &str| -> Vec<String> {
            usable_nodes(&nodes, listing).into_iter().map(|node| node.host).collect()
        };
        assert_eq!(names(listing), ["n1", "n3"]);
        assert_eq!(names(&listing.replace("DOWN+NOT_RESPONDING", "IDLE")), ["n1", "n2", "n3"]);
    }
}
