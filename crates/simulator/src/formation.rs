// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The forming of a world: from agents that begin to connect until every rank has the links that
//! are opened at the start.

use std::time::Duration;

use farandole_config::Config;
use farandole_engine::control_plane_model::control_parents;
use farandole_registrar::formation_model;
use farandole_session::partition_eager_peers;
use farandole_transport::{heartbeat_peers, max_concurrent_dials};
use farandole_world::Rank;

use crate::events::bytes_to_f64;
use crate::{Error, Result, SimulatedCluster};

/// Bytes of a rank's peer addresses: its host, process, socket and one address.
const PEER_ADDRESSES_BYTES: u64 = 160;
/// Round trips of a connection to the registrar before its first call: TCP and TLS.
const REGISTRAR_CONNECT_ROUND_TRIPS: f64 = 2.0;
/// Round trips of a connection between ranks: TCP, the challenge, and the proof of the job's key.
const LINK_ROUND_TRIPS: f64 = 3.0;

/// The time to form a world. Starting processes is not part of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FormationEstimate {
    /// Calls at the registrar.
    pub calls: u64,
    /// Connections to it.
    pub connections: u64,
    /// Bytes that it sends.
    pub sent: u64,
    /// Links that the busiest rank opens.
    pub links: u64,
    /// Until the last agent has registered.
    pub registered: Duration,
    /// Until every worker knows its rank.
    pub assigned: Duration,
    /// Until every rank knows where the others are.
    pub addresses_exchanged: Duration,
    /// Until every rank has these links.
    pub time: Duration,
}

impl FormationEstimate {
    /// Returns the formation of a world with these settings on a cluster. The registrar runs on one
    /// core of a separate host.
    ///
    /// # Errors
    /// `SimulatedCluster`.
    pub fn simulate(cluster: &SimulatedCluster, config: &Config) -> Result<Self> {
        cluster.check_parameters()?;
        let ranks = bytes_to_f64(cluster.ranks.into());
        let round_trip = 2.0 * cluster.latency.as_secs_f64();
        let (call, handshake) =
            (cluster.registrar_call_time.as_secs_f64(), cluster.handshake_time.as_secs_f64());
        // All agents come at once; the registrar takes one after the other.
        // The first call is one more round trip.
        let first = (REGISTRAR_CONNECT_ROUND_TRIPS + 1.0) * round_trip;
        let arrival = |task: u32| {
            Duration::from_secs_f64(first + bytes_to_f64(u64::from(task) + 1) * (handshake + call))
        };
        let formed = cluster
            .model_formation(arrival)
            .ok_or(Error::Stuck { left: cluster.ranks as usize })?;
        let sending = |bytes: f64| bytes / cluster.payload_rate() * ranks;
        let answers = sending(bytes_to_f64(formed.reply_bytes));
        // Agents receive their ranks and start workers, which connect and request their ranks.
        // The registrar computes while its interface sends, so the longer of the two counts.
        let agents = formed.at.as_secs_f64() + answers.max(ranks * call) + round_trip / 2.0;
        let workers = agents + first + (ranks * (handshake + call)).max(answers);
        let addresses_sent = sending(ranks * bytes_to_f64(PEER_ADDRESSES_BYTES));
        let members_met = workers + round_trip + (ranks * call).max(addresses_sent);
        let links = startup_links(cluster, config, &formed);
        Ok(Self {
            calls: formed.registrations * formation_model::CALLS_PER_RANK,
            connections: formed.registrations * formation_model::CONNECTIONS_PER_RANK,
            // An agent and its worker get the same answer, and each rank gets the addresses of all.
            sent: u64::from(cluster.ranks)
                * (2 * formed.reply_bytes + u64::from(cluster.ranks) * PEER_ADDRESSES_BYTES),
            links: links.busiest,
            registered: formed.at,
            assigned: Duration::from_secs_f64(workers),
            addresses_exchanged: Duration::from_secs_f64(members_met),
            time: Duration::from_secs_f64(members_met + links.seconds),
        })
    }
}

struct StartupLinks {
    busiest: u64,
    seconds: f64,
}

/// Returns the links of the busiest rank and the time to open them. Every rank has the data links
/// that are opened at the start, control links to its neighbours in the tree, and heartbeat
/// connections with few ranks of other hosts: as many as rank 0, because hosts are equal. The
/// higher rank dials, several peers at once, so the last rank takes longest; each connection takes
/// time of one core at both ends.
fn startup_links(
    cluster: &SimulatedCluster,
    config: &Config,
    formed: &formation_model::ModeledFormation,
) -> StartupLinks {
    let members: Vec<Rank> = (0..cluster.ranks).map(Rank).collect();
    let parents = control_parents(&formed.world, &members).0;
    let children =
        |rank: u32| parents.iter().filter(|parent| **parent == Some(rank)).count() as u64;
    let control = children(0);
    let near = u64::from(cluster.ranks_per_host()) - 1;
    let machines: Vec<&str> =
        formed.world.seats.iter().map(|seat| seat.host.machine_name()).collect();
    let (data, _) = partition_eager_peers(&formed.world, &members, config.links_at_start);
    let data = data.len() as u64;
    // Both lists contain the ranks of this host.
    let far = data - near + heartbeat_peers(&machines, Rank(0)).len() as u64 - near;
    let handshake = cluster.handshake_time.as_secs_f64();
    let connections = bytes_to_f64(far + near);
    let wait = |one_way: Duration| LINK_ROUND_TRIPS * 2.0 * one_way.as_secs_f64() + handshake;
    let waits = bytes_to_f64(far) * wait(cluster.latency)
        + bytes_to_f64(near) * wait(cluster.local_latency);
    let at_once = max_concurrent_dials(usize::try_from(data).unwrap_or(usize::MAX));
    // Waits for peers overlap, and the work of the core does not.
    let dialled = (waits / bytes_to_f64(at_once as u64)).max(connections * handshake);
    // Rank 0 answers all others, and the control links below it.
    let answered = (connections + bytes_to_f64(control)) * handshake;
    StartupLinks { busiest: data + control, seconds: dialled.max(answered) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forming(hosts: u32, ranks: u32) -> FormationEstimate {
        let cluster = SimulatedCluster {
            latency: Duration::from_millis(1),
            ..SimulatedCluster::new(hosts, ranks).unwrap()
        };
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        FormationEstimate::simulate(&cluster, &Config { links_at_start: 16, ..config }).unwrap()
    }

    #[test]
    fn calls_grow_with_the_ranks_and_not_with_their_square() {
        let (small, large) = (forming(64, 512), forming(512, 4096));
        assert_eq!(small.calls, 4 * 512);
        assert_eq!((large.calls, large.connections), (8 * small.calls, 8 * small.connections));
    }

    #[test]
    fn steps_follow_each_other() {
        for (hosts, ranks) in [(1, 1), (1, 8), (2, 2), (64, 512), (512, 4096)] {
            let found = forming(hosts, ranks);
            assert!(
                found.registered < found.assigned
                    && found.assigned < found.addresses_exchanged
                    && found.addresses_exchanged <= found.time
            );
            assert!(found.links >= u64::from(ranks / hosts) - 1);
        }
    }

    #[test]
    fn few_links_are_opened_at_the_start_of_a_large_world_and_all_of_a_small_one() {
        // To the other hosts, and below rank 0.
        assert_eq!(forming(2, 32).links, 31 + 16);
        assert_eq!(forming(4, 16).links, 15 + 3 + 2);
        // 7 ranks of the host, 11 that exchange heartbeats, and 7 + 6 below rank 0.
        assert_eq!(forming(64, 512).links, 7 + 11 + 7 + 6);
        assert!(forming(512, 4096).links < 50);
    }
}
