// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Simulated jobs next to real communicators over modelled links.

mod modeled_links;

use std::collections::BTreeMap;
use std::time::Duration;

use farandole_collectives::CrossoverTable;
use farandole_collectives::simulation::MemberAction;
use farandole_config::Config;

use crate::{AllreduceSimulator, SimulatedCluster};

fn config() -> Config {
    Config::read(|_| None, &BTreeMap::new()).unwrap()
}

/// A cluster on which only the network takes time.
fn network(hosts: u32, ranks: u32) -> SimulatedCluster {
    SimulatedCluster {
        copy_rate: 1e18,
        memory_rate: 1e18,
        socket_rate: 1e18,
        message_cpu_time: Duration::ZERO,
        local_latency: Duration::from_nanos(100),
        ..SimulatedCluster::new(hosts, ranks).unwrap()
    }
}

/// SM-1: real communicators send what the jobs without bytes send, and need the same time on the
/// same network.
#[test]
fn real_communicators_take_the_time_of_simulated_jobs() {
    for (hosts, ranks, bytes) in [
        (1, 4, 1000),
        (2, 2, 1 << 20),
        (4, 4, 1000),
        (3, 3, 3 << 20),
        (2, 4, 2 << 20),
        (4, 8, 4 << 20),
    ] {
        let cluster = network(hosts, ranks);
        let collective = AllreduceSimulator::new(&cluster, &config()).unwrap();
        let plan = collective.allreduce_plan(bytes).unwrap();
        let each = collective.simulate_every_rank(bytes, &plan).unwrap();
        let actions = collective.record_actions_of_every_rank(&plan).unwrap();
        let capacity = collective.shared_memory_ring_bytes();
        let size = usize::try_from(bytes).unwrap();
        let live =
            modeled_links::run_allreduce(&cluster, size, capacity, &CrossoverTable::default());
        for (from, row) in live.sent.iter().enumerate() {
            let mut sent = vec![0u64; row.len()];
            for action in &actions[from] {
                if let MemberAction::Send(transfer) = action {
                    sent[transfer.member as usize] += transfer.bytes;
                }
            }
            assert_eq!(*row, sent, "rank {from} of {ranks} on {hosts} hosts");
        }
        let ratio = live.time.as_secs_f64() / each.time.as_secs_f64();
        println!(
            "{ranks} ranks on {hosts} hosts, {bytes} bytes: {:?} for {:?}: {ratio:.3}",
            live.time, each.time
        );
        assert!((0.75..1.25).contains(&ratio), "{ranks} ranks on {hosts} hosts: {ratio}");
    }
}
