// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Test support for jobs of an allreduce: polls members one by one.

use std::time::{Duration, Instant};

use farandole_kernels::{
    BlockReducer, DataType, GatherList, HostMemory, InstructionSet, ReduceOp, ReductionSpec,
};
use farandole_transport::{Link, loopback};
use farandole_world::Rank;

use super::peer_links::{CollectiveJob, PeerLinks};
use crate::Result;

/// Constructor of a job.
pub(super) type JobConstructor<J> =
    fn(&mut PeerLinks, BlockReducer, GatherList, GatherList) -> Result<J>;

/// Checks with 64 hosts of 8 ranks that the work of a rank before the first byte does not depend on
/// the number of bytes. A job of `first` bytes precedes the measured jobs; `finish` receives every
/// job.
pub(super) fn assert_starts_promptly<J>(
    first: usize,
    make: JobConstructor<J>,
    finish: impl Fn(&mut PeerLinks, J),
) {
    let (hosts, each, own) = (64, 8, 259);
    let numbers: Vec<u32> = (0..hosts * each).map(|rank| rank / each).collect();
    let others = (0..hosts * each).filter(|rank| *rank != own);
    let (links, _ends): (Vec<Link>, Vec<Link>) =
        others.map(|rank| loopback::link_pair(Rank(own), Rank(rank), 64 << 10).unwrap()).unzip();
    let mut peers = PeerLinks::new(Rank(own), links, Some(&numbers)).unwrap();
    let (dtype, op) = (DataType::F32, ReduceOp::Sum);
    let reduction =
        ReductionSpec { dtype, op, members: peers.member_count(), prescale: 1.0, postscale: 1.0 };
    let path = InstructionSet::best_available();
    let mut began = |bytes: usize| {
        let memory = HostMemory::new(bytes);
        let flat = || GatherList::new([memory.as_buffer()]);
        let reducer = BlockReducer::with_order(reduction, path, peers.orders.clone()).unwrap();
        let started = Instant::now();
        let job = make(&mut peers, reducer, flat(), flat()).unwrap();
        let took = started.elapsed();
        finish(&mut peers, job);
        took
    };
    began(first);
    for bytes in [4 << 10, 1 << 20, 128 << 20] {
        let least = (0..10).map(|_| began(bytes)).min().unwrap_or_default();
        println!("before the first byte of {bytes}: {least:?}");
        assert!(least < Duration::from_millis(1), "{least:?} for {bytes} bytes");
    }
}

/// Polls the members of these worlds in 60 orders, and checks all results.
pub(super) fn assert_sums_in_any_order<J: CollectiveJob>(
    worlds: &[&'static [u32]],
    make: JobConstructor<J>,
) {
    for seed in 0..60 {
        let hosts = worlds[pick_below(seed, worlds.len())];
        let dtype = if seed % 3 == 0 { DataType::Bf16 } else { DataType::F32 };
        let capacity = [4 << 10, 12 << 10, 32 << 10, 40 << 10][pick_below(seed, 4)];
        PolledAllreduce { hosts, dtype, make }.poll_until_done(seed, 40_003, capacity);
    }
}

/// Allreduce of one element type in one world, with the constructor of its jobs.
struct PolledAllreduce<J> {
    hosts: &'static [u32],
    dtype: DataType,
    make: JobConstructor<J>,
}

impl<J: CollectiveJob> PolledAllreduce<J> {
    /// Returns a small whole number, so that sums are exact also in 16 bits.
    fn input_value(member: usize, element: usize) -> f32 {
        f32::from(u8::try_from((element * 7 + member * 31) % 23).unwrap())
    }

    fn expected_sum(&self, element: usize) -> f32 {
        (0..self.hosts.len()).map(|member| Self::input_value(member, element)).sum()
    }

    fn encode_value(&self, value: f32) -> Vec<u8> {
        // A bfloat16 is the upper half of a float32.
        match self.dtype {
            DataType::Bf16 => u16::try_from(value.to_bits() >> 16).unwrap().to_ne_bytes().to_vec(),
            _ => value.to_ne_bytes().to_vec(),
        }
    }

    fn element_bytes(&self) -> usize {
        self.encode_value(0.0).len()
    }

    /// Starts the jobs of all members, with outputs that are also the inputs.
    fn start_jobs(&self, elements: usize, capacity: usize) -> Vec<(J, PeerLinks, HostMemory)> {
        let (dtype, op, size) = (self.dtype, ReduceOp::Sum, self.hosts.len());
        let links = loopback::link_mesh(size, capacity).unwrap();
        let job = |(member, links): (usize, Vec<Link>)| {
            let rank = Rank(u32::try_from(member).unwrap());
            let mut peers = PeerLinks::new(rank, links, Some(self.hosts)).unwrap();
            let memory = HostMemory::new(elements * self.element_bytes());
            let flat = || GatherList::new([memory.as_buffer()]);
            for element in 0..elements {
                flat().write_at(
                    element * self.element_bytes(),
                    &self.encode_value(Self::input_value(member, element)),
                );
            }
            let reduction =
                ReductionSpec { dtype, op, members: size, prescale: 1.0, postscale: 1.0 };
            let reducer = BlockReducer::with_order(
                reduction,
                InstructionSet::best_available(),
                peers.orders.clone(),
            )
            .unwrap();
            let job = (self.make)(&mut peers, reducer, flat(), flat()).unwrap();
            (job, peers, memory)
        };
        links.into_iter().enumerate().map(job).collect()
    }

    /// Polls members in a pseudo-random order that the seed determines, and checks all results.
    fn poll_until_done(&self, seed: u64, elements: usize, capacity: usize) {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
        let mut members = self.start_jobs(elements, capacity);
        let (mut done, mut idle) = (vec![false; members.len()], 0);
        while done.contains(&false) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // One member at a time continues for a while, so that the others fall behind.
            let (member, times) = (pick_below(random, members.len()), (random >> 8) % 20);
            let (job, peers, _) = &mut members[member];
            for _ in 0..times {
                let moved = job.poll(peers).unwrap();
                idle = if moved.any { 0 } else { idle + 1 };
                done[member] = moved.done;
            }
            assert!(idle < 10_000, "nobody can move: {done:?}, seed {seed}");
        }
        for (member, (_, _, memory)) in members.iter().enumerate() {
            let (mut bytes, flat) = (self.encode_value(0.0), GatherList::new([memory.as_buffer()]));
            for element in 0..elements {
                flat.read_at(element * bytes.len(), &mut bytes);
                let sum = self.encode_value(self.expected_sum(element));
                assert_eq!(
                    bytes, sum,
                    "member {member}, element {element}, {:?}, seed {seed}",
                    self.hosts
                );
            }
        }
    }
}

/// Returns a number below `of`.
fn pick_below(random: u64, of: usize) -> usize {
    usize::try_from(random % of as u64).unwrap()
}
