// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A round of negotiation: announcements up the engine's tree, a list down.

use std::time::Duration;

use farandole_engine::control_plane_model;
use farandole_world::Rank;

use crate::{Result, SimulatedCluster};

/// The processor time of a control message within a host, as a fraction of the processor time of a
/// control message between hosts.
const LOCAL_MESSAGE_COST_RATIO: f64 = 0.1;

/// The time of a round in which all ranks announce at the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ControlRound {
    /// Until the coordinator knows that all ranks are ready.
    pub announce_time: Duration,
    /// From the coordinator's decision to the last rank.
    pub distribute_time: Duration,
    /// Messages at the rank that has most, sent and received.
    pub busiest_rank_messages: u64,
    /// Messages of all ranks.
    pub messages: u64,
}

/// The tree, with the time of an edge and the processor time of a message on it.
struct ControlTreeWithCosts<'a> {
    cluster: &'a SimulatedCluster,
    rank_hosts: Vec<u32>,
    children: Vec<Vec<usize>>,
}

impl ControlRound {
    /// Returns a round on a cluster.
    ///
    /// # Errors
    /// `SimulatedCluster`.
    pub fn simulate(cluster: &SimulatedCluster) -> Result<Self> {
        let world = cluster.formed_world()?;
        let members: Vec<Rank> = (0..cluster.ranks).map(Rank).collect();
        let parents = control_plane_model::control_parents(&world, &members).0;
        let mut children = vec![Vec::new(); parents.len()];
        for (child, parent) in parents.iter().enumerate() {
            if let Some(parent) = parent {
                children[*parent as usize].push(child);
            }
        }
        let edges = parents.iter().flatten().count() as u64;
        let degree =
            |member: usize| children[member].len() + usize::from(parents[member].is_some());
        let busiest = (0..parents.len()).map(degree).max().unwrap_or_default();
        let tree = ControlTreeWithCosts { cluster, rank_hosts: cluster.rank_hosts(), children };
        Ok(Self {
            announce_time: Duration::from_secs_f64(tree.announce_seconds()),
            distribute_time: Duration::from_secs_f64(tree.distribute_seconds()),
            // On each edge, an announcement goes up and a list goes down.
            busiest_rank_messages: 2 * busiest as u64,
            messages: 2 * edges,
        })
    }
}

impl ControlTreeWithCosts<'_> {
    /// Returns the latency and the processor time of a message between two members.
    fn tree_edge_cost(&self, one: usize, other: usize) -> (f64, f64) {
        let message = self.cluster.message_cpu_time.as_secs_f64();
        if self.rank_hosts[one] == self.rank_hosts[other] {
            (self.cluster.local_latency.as_secs_f64(), LOCAL_MESSAGE_COST_RATIO * message)
        } else {
            (self.cluster.latency.as_secs_f64(), message)
        }
    }

    /// Returns the time at which member 0 has the announcements of all members: a parent receives
    /// one announcement after the other.
    fn announce_seconds(&self) -> f64 {
        let mut ready = vec![0.0f64; self.children.len()];
        // A parent's number is lower than its children's.
        for member in (0..self.children.len()).rev() {
            let arrival = |child: &usize| {
                let (latency, work) = self.tree_edge_cost(member, *child);
                (ready[*child] + work + latency, work)
            };
            let mut arrivals: Vec<(f64, f64)> = self.children[member].iter().map(arrival).collect();
            // The parent takes announcements in the order of their arrival.
            arrivals.sort_by(|one, other| one.0.total_cmp(&other.0));
            ready[member] =
                arrivals.iter().fold(0.0, |free: f64, (time, work)| free.max(*time) + work);
        }
        ready.first().copied().unwrap_or_default()
    }

    /// Returns the time at which the last member has the list: each parent sends it first, to one
    /// child after the other.
    fn distribute_seconds(&self) -> f64 {
        let mut have = vec![0.0f64; self.children.len()];
        for member in 0..self.children.len() {
            let mut sent = have[member];
            for child in &self.children[member] {
                let (latency, work) = self.tree_edge_cost(member, *child);
                sent += work;
                have[*child] = sent + latency + work;
            }
        }
        have.into_iter().fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_grow_with_the_logarithm_of_the_hosts() {
        let round = |hosts: u32| {
            let cluster = SimulatedCluster {
                message_cpu_time: Duration::ZERO,
                ..SimulatedCluster::new(hosts, hosts * 8).unwrap()
            };
            let control = ControlRound::simulate(&cluster).unwrap();
            (control.announce_time + control.distribute_time).as_secs_f64()
                / cluster.latency.as_secs_f64()
        };
        // A binomial tree of 2^k hosts has k levels; what processes of a host add is less than one
        // of them.
        for levels in [1u32, 3, 6, 9] {
            let found = round(1 << levels);
            assert!(
                (f64::from(2 * levels)..f64::from(2 * levels) + 1.0).contains(&found),
                "{levels}: {found}"
            );
        }
    }

    /// As the engine's own simulation counts them.
    #[test]
    fn every_rank_but_the_first_has_one_message_each_way() {
        let control = ControlRound::simulate(&SimulatedCluster::new(512, 4096).unwrap()).unwrap();
        assert_eq!(control.messages, 2 * 4095);
        assert_eq!(control.busiest_rank_messages, 2 * (7 + 9));
    }
}
