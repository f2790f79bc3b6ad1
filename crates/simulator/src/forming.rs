// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The forming of a world: from agents that begin to connect until every rank has the links that
//! are opened at the start.

use std::time::Duration;

use farandole_config::Config;
use farandole_engine::outline::parents;
use farandole_registrar::outline;
use farandole_session::at_start;
use farandole_transport::{dials_at_once, heartbeats};
use farandole_world::Rank;

use crate::events::float;
use crate::{Cluster, Error, Result};

/// Bytes of what a rank tells the others: its host, process, socket and one address.
const CARD: u64 = 160;
/// Round trips of a connection to the registrar before its first call: TCP and TLS.
const CONNECT: f64 = 2.0;
/// Round trips of a connection between ranks: TCP, the challenge, and the proof of the job's key.
const LINK: f64 = 3.0;

/// The time to form a world. Starting processes is not part of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forming {
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
    pub met: Duration,
    /// Until every rank has these links.
    pub time: Duration,
}

impl Forming {
    /// Returns a world with these settings on a cluster whose registrar runs on one core of a host
    /// of its own.
    ///
    /// # Errors
    /// `Cluster`.
    pub fn simulate(cluster: &Cluster, config: &Config) -> Result<Self> {
        cluster.check()?;
        let ranks = float(cluster.ranks.into());
        let round_trip = 2.0 * cluster.latency.as_secs_f64();
        let (call, handshake) = (cluster.call.as_secs_f64(), cluster.handshake.as_secs_f64());
        // All agents come at once; the registrar takes one after the other.
        let first = (CONNECT + 1.0) * round_trip;
        let arrival = |task: u32| {
            Duration::from_secs_f64(first + float(u64::from(task) + 1) * (handshake + call))
        };
        let formed =
            cluster.formed(arrival).ok_or(Error::Stuck { left: cluster.ranks as usize })?;
        let sending = |bytes: f64| bytes / cluster.payload_rate() * ranks;
        let answers = sending(float(formed.answer));
        // Agents hear of their ranks and start workers, which connect and ask for theirs.
        let agents = formed.at.as_secs_f64() + answers.max(ranks * call) + round_trip / 2.0;
        let workers = agents + first + (ranks * (handshake + call)).max(answers);
        let cards = sending(ranks * float(CARD));
        let met = workers + round_trip + (ranks * call).max(cards);
        let links = links(cluster, config, &formed);
        Ok(Self {
            calls: formed.registrations * outline::CALLS,
            connections: formed.registrations * outline::CONNECTIONS,
            sent: u64::from(cluster.ranks) * (2 * formed.answer + u64::from(cluster.ranks) * CARD),
            links: links.busiest,
            registered: formed.at,
            assigned: Duration::from_secs_f64(workers),
            met: Duration::from_secs_f64(met),
            time: Duration::from_secs_f64(met + links.seconds),
        })
    }
}

struct Links {
    busiest: u64,
    seconds: f64,
}

/// Every rank has links for data to those to which they are opened at the start, links for control
/// to its neighbours in the tree, and connections for heartbeats with few ranks of other hosts: as
/// many as rank 0, because hosts are equal. The higher rank dials, several peers at once, so the
/// last rank takes longest; each connection takes time of one core at both ends.
fn links(cluster: &Cluster, config: &Config, formed: &outline::Formed) -> Links {
    let members: Vec<Rank> = (0..cluster.ranks).map(Rank).collect();
    let parents = parents(&formed.world, &members);
    let children =
        |rank: u32| parents.iter().filter(|parent| **parent == Some(rank)).count() as u64;
    let control = children(0);
    let near = u64::from(cluster.local()) - 1;
    let machines: Vec<&str> = formed.world.seats.iter().map(|seat| seat.host.machine()).collect();
    let (data, _) = at_start(&formed.world, &members, config.links_at_start);
    let data = data.len() as u64;
    let far = data - near + heartbeats(&machines, Rank(0)).len() as u64 - near;
    let handshake = cluster.handshake.as_secs_f64();
    let connections = float(far + near);
    let wait = |one_way: Duration| LINK * 2.0 * one_way.as_secs_f64() + handshake;
    let waits = float(far) * wait(cluster.latency) + float(near) * wait(cluster.near);
    let at_once = dials_at_once(usize::try_from(data).unwrap_or(usize::MAX));
    let dialled = (waits / float(at_once as u64)).max(connections * handshake);
    // Rank 0 answers all others, and the control links below it.
    let answered = (connections + float(control)) * handshake;
    Links { busiest: data + control, seconds: dialled.max(answered) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forming(hosts: u32, ranks: u32) -> Forming {
        let cluster =
            Cluster { latency: Duration::from_millis(1), ..Cluster::new(hosts, ranks).unwrap() };
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        Forming::simulate(&cluster, &Config { links_at_start: 16, ..config }).unwrap()
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
                    && found.assigned < found.met
                    && found.met <= found.time
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
