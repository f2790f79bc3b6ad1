// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Real connections among 64 hosts, counted: links are opened at their first use.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::{Duration, Instant};

use farandole_collectives::{Communicator, HostCommunicator, OperationToken};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::{Tensor, allreduce, run_in_own_process};
use farandole_transport::{MemoryRendezvous, Mesh, MeshOptions, heartbeat_peers};
use farandole_world::{HostHash, Rank};

const HOSTS: u32 = 64;
const LOCAL: u32 = 2;
const LIMIT: Duration = Duration::from_secs(240);

fn name(rank: u32) -> String {
    format!("host-{}", rank / LOCAL)
}

/// Sockets of this process, in which all ranks are.
fn sockets() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = descriptors.filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

fn join(rank: u32, meeting: &MemoryRendezvous) -> Mesh {
    let mut options = MeshOptions::new(Rank(rank), HOSTS * LOCAL, HostHash(name(rank)), [7; 32]);
    options.bind = vec![IpAddr::from(Ipv4Addr::LOCALHOST).into()];
    // More threads than processors: a rank may not run for seconds.
    options.peer_timeout = LIMIT;
    options.setup_timeout = LIMIT;
    Mesh::join(options, meeting).unwrap()
}

/// The links that sessions open at the start, and the others, which are opened at their first use.
fn communicator(mesh: &Mesh) -> HostCommunicator {
    let names: Vec<String> = (0..HOSTS * LOCAL).map(name).collect();
    let machines: Vec<&str> = names.iter().map(String::as_str).collect();
    let own = mesh.rank();
    let first: BTreeSet<Rank> = heartbeat_peers(&machines, own);
    let (first, later): (Vec<Rank>, Vec<Rank>) = (0..HOSTS * LOCAL)
        .map(Rank)
        .filter(|rank| *rank != own)
        .partition(|rank| first.contains(rank));
    let deadline = Instant::now() + LIMIT;
    let mut links = mesh.open_links_until(1, &first, 64 << 10, deadline, &mut || false).unwrap();
    links.extend(mesh.open_links_on_demand(1, &later, 64 << 10, deadline, &mut || false).unwrap());
    let hosts: Vec<u32> = (0..HOSTS * LOCAL).map(|rank| rank / LOCAL).collect();
    HostCommunicator::across_hosts(own, links, &hosts).unwrap()
}

/// Sums this many elements, and checks the result.
fn sum(communicators: &mut [HostCommunicator], count: u16) {
    let input: Vec<u8> = (0..count).flat_map(|k| f32::from(k).to_ne_bytes()).collect();
    let tensors: Vec<Tensor> = communicators.iter().map(|_| Tensor::new(&input, true)).collect();
    for (communicator, tensor) in communicators.iter_mut().zip(&tensors) {
        let sum = allreduce(DataType::F32, ReduceOp::Sum, std::slice::from_ref(tensor));
        communicator.submit_operation(OperationToken(1), sum).unwrap();
    }
    let (limit, mut completed) = (Instant::now() + LIMIT, Vec::new());
    while communicators.iter().any(|one| one.pending_count() > 0) {
        for communicator in &mut *communicators {
            communicator.make_progress(&mut completed).unwrap();
        }
        assert!(Instant::now() < limit, "{} of {} are done", completed.len(), communicators.len());
    }
    let size = f32::from(u16::try_from(communicators.len()).unwrap());
    let expected: Vec<u8> = (0..count).flat_map(|k| (size * f32::from(k)).to_ne_bytes()).collect();
    assert!(tensors.iter().all(|tensor| tensor.result() == expected), "{count} elements");
}

#[test]
fn a_rank_of_64_hosts_has_at_most_40_sockets_after_small_and_large_allreduces() {
    run_in_own_process("many_hosts::small_and_large_allreduces_of_64_hosts");
}

#[test]
#[ignore = "counts the sockets of its process, so the test above starts it"]
fn small_and_large_allreduces_of_64_hosts() {
    let meeting = MemoryRendezvous::default();
    let meshes: Vec<Mesh> = thread::scope(|scope| {
        let joining = (0..HOSTS * LOCAL).map(|rank| {
            let meeting = &meeting;
            scope.spawn(move || join(rank, meeting))
        });
        let joining: Vec<_> = joining.collect();
        joining.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let before = sockets();
    let mut communicators: Vec<HostCommunicator> = thread::scope(|scope| {
        let opening: Vec<_> =
            meshes.iter().map(|mesh| scope.spawn(|| communicator(mesh))).collect();
        opening.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let ranks = meshes.len();
    // Links for data and heartbeats, to 11 ranks each.
    assert_eq!(sockets() - before, 22 * ranks);
    for count in [1, 1000, 40_000, 65_000] {
        sum(&mut communicators, count);
    }
    // 6 more at most, of the negotiation, which is not here.
    let found = sockets() - before;
    println!("{} sockets of a rank", found as f64 / ranks as f64);
    assert!(found <= (40 - 6) * ranks, "{found} sockets of {ranks} ranks");
}
