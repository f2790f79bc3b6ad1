// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Members of a hierarchy that are polled one by one.

use std::time::{Duration, Instant};

use farandole_transport::loopback;
use farandole_world::Rank;

use super::*;
use crate::kernel::{self, Reduction};
use crate::{DataType, Memory, ReduceOp};

/// What a rank of 64 hosts with 8 ranks each does before the first byte goes does not depend on the bytes.
#[test]
fn an_allreduce_among_many_hosts_begins_at_once() {
    let (hosts, each, own) = (64, 8, 259);
    let numbers: Vec<u32> = (0..hosts * each).map(|rank| rank / each).collect();
    let others = (0..hosts * each).filter(|rank| *rank != own);
    let (links, _ends): (Vec<Link>, Vec<Link>) =
        others.map(|rank| loopback::pair(Rank(own), Rank(rank), 64 << 10).unwrap()).unzip();
    let mut peers = Peers::new(Rank(own), links, Some(&numbers)).unwrap();
    let (dtype, op) = (DataType::F32, ReduceOp::Sum);
    let reduction = Reduction { dtype, op, members: peers.size(), prescale: 1.0, postscale: 1.0 };
    let path = kernel::Path::best();
    let mut began = |bytes: usize| {
        let memory = Memory::new(bytes);
        let flat = || Flat::new([memory.buffer()]);
        let reducer = Reducer::ordered(reduction, path, peers.orders.clone()).unwrap();
        let started = Instant::now();
        let job = Hierarchy::new(&mut peers, reducer, flat(), flat()).unwrap();
        let took = started.elapsed();
        assert_eq!((job.routes.len(), job.near.len()), (7 + 63, 7));
        peers.scratch.store = job.store;
        took
    };
    // The first one makes the routes.
    began(1 << 20);
    for bytes in [4 << 10, 1 << 20, 128 << 20] {
        let least = (0..10).map(|_| began(bytes)).min().unwrap_or_default();
        assert!(least < Duration::from_millis(1), "{least:?} for {bytes} bytes");
    }
}

/// The members of two hosts with two members each, with inputs that only sums of all of them give the result of.
fn jobs(elements: usize, capacity: usize) -> Vec<(Hierarchy, Peers, Memory)> {
    let (dtype, op) = (DataType::F32, ReduceOp::Sum);
    let links = loopback::mesh(4, capacity).unwrap();
    let job = |(member, links): (usize, Vec<Link>)| {
        let rank = Rank(u32::try_from(member).unwrap());
        let mut peers = Peers::new(rank, links, Some(&[0, 0, 1, 1])).unwrap();
        let memory = Memory::new(elements * 4);
        let flat = || Flat::new([memory.buffer()]);
        for element in 0..elements {
            flat().write(element * 4, &input(member, element).to_ne_bytes());
        }
        let reduction = Reduction { dtype, op, members: 4, prescale: 1.0, postscale: 1.0 };
        let reducer = Reducer::ordered(reduction, kernel::Path::best(), peers.orders.clone()).unwrap();
        let job = Hierarchy::new(&mut peers, reducer, flat(), flat()).unwrap();
        (job, peers, memory)
    };
    links.into_iter().enumerate().map(job).collect()
}

/// Small whole numbers, so that sums are exact.
fn input(member: usize, element: usize) -> f32 {
    f32::from(u8::try_from((element * 7 + member * 31) % 251).unwrap())
}

/// A number below `of`.
fn pick(random: u64, of: u64) -> usize {
    usize::try_from(random % of).unwrap()
}

/// The own part of a chunk comes before others: it is reduced while those behind it have not arrived, and the other host
/// may have sent partials of the next chunk.
#[test]
fn members_that_are_polled_in_any_order_add_only_what_has_arrived() {
    let elements = 100_003;
    for seed in 0..40_u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
        let mut members = jobs(elements, [4 << 10, 12 << 10, 32 << 10, 40 << 10][pick(seed, 4)]);
        let (mut done, mut idle) = ([false; 4], 0);
        while done != [true; 4] {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // One member at a time goes on for a while, so that the others fall behind.
            let (member, times) = (pick(random, 4), (random >> 8) % 20);
            let (job, peers, _) = &mut members[member];
            for _ in 0..times {
                let moved = job.poll(peers).unwrap();
                idle = if moved.any { 0 } else { idle + 1 };
                done[member] = moved.done;
            }
            assert!(idle < 10_000, "nobody can move: {done:?}, seed {seed}");
        }
        for (member, (_, _, memory)) in members.iter().enumerate() {
            let (mut bytes, flat) = ([0; 4], Flat::new([memory.buffer()]));
            for element in 0..elements {
                flat.read(element * 4, &mut bytes);
                let sum: f32 = (0..4).map(|other| input(other, element)).sum();
                assert_eq!(f32::from_ne_bytes(bytes), sum, "member {member}, element {element}, seed {seed}");
            }
        }
    }
}
