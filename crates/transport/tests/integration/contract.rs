// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every kind of link passes the contract.

use farandole_transport::link_contract::{
    both_directions_flow_at_the_same_time, join_meshes, open_link_pair, run_link_contract,
};
use farandole_transport::{LinkKind, loopback};
use farandole_world::Rank;

#[test]
fn loopback_links_keep_the_contract() {
    run_link_contract(&mut |capacity| {
        loopback::link_pair(Rank(0), Rank(1), capacity).expect("a ring")
    });
}

fn mesh_links(kind: LinkKind, streams: u16) {
    let meshes = join_meshes(2, |options| {
        options.use_shared_memory = kind == LinkKind::SharedMemory;
        options.streams = streams;
    });
    let mut channel = 0;
    run_link_contract(&mut |capacity| {
        channel += 1;
        let (a, b) = open_link_pair(&meshes, channel, capacity);
        assert_eq!((a.kind, b.kind, a.peer, b.peer), (kind, kind, Rank(1), Rank(0)));
        (a, b)
    });
    if kind == LinkKind::Tcp {
        // Rings of many blocks, so that connections run ahead of each other.
        both_directions_flow_at_the_same_time(open_link_pair(&meshes, channel + 1, 4 << 20));
    }
}

#[test]
fn shared_memory_links_keep_the_contract() {
    mesh_links(LinkKind::SharedMemory, 1);
}

#[test]
fn tcp_links_keep_the_contract() {
    mesh_links(LinkKind::Tcp, 1);
}

#[test]
fn links_of_several_connections_keep_the_contract() {
    mesh_links(LinkKind::Tcp, 3);
}
