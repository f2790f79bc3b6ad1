// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every kind of link passes the contract.

use farandole_transport::contract::{all, meshes, open_pair};
use farandole_transport::{LinkKind, loopback};
use farandole_world::Rank;

#[test]
fn loopback_links_keep_the_contract() {
    all(&mut |capacity| loopback::pair(Rank(0), Rank(1), capacity).expect("a ring"));
}

fn mesh_links(kind: LinkKind) {
    let meshes = meshes(2, |options| options.use_shared_memory = kind == LinkKind::SharedMemory);
    let mut channel = 0;
    all(&mut |capacity| {
        channel += 1;
        let (a, b) = open_pair(&meshes, channel, capacity);
        assert_eq!((a.kind, b.kind, a.peer, b.peer), (kind, kind, Rank(1), Rank(0)));
        (a, b)
    });
}

#[test]
fn shared_memory_links_keep_the_contract() {
    mesh_links(LinkKind::SharedMemory);
}

#[test]
fn tcp_links_keep_the_contract() {
    mesh_links(LinkKind::Tcp);
}
