// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations within a host choose between copies through the caches and past them.

use farandole_kernels::{
    BlockReducer, Buffer, DataType, GatherList, HostMemory, ReduceOp, ReductionSpec,
};
use farandole_transport::{Link, LinkKind, loopback};
use farandole_world::Rank;

use super::allgather::AllgatherJob;
use super::alltoall::AlltoallJob;
use super::broadcast::BroadcastJob;
use super::copy_path::RingCopier;
use super::peer_links::{CollectiveJob, PeerLinks};
use super::reducescatter::ReducescatterJob;
use crate::TensorSegment;

const PART_BYTES: usize = 1 << 20;
const RING_BYTES: usize = 256 << 10;

/// Returns the links of two members, which measure their copies as links in shared memory do.
fn measured_members() -> Vec<PeerLinks> {
    let members = (0..).zip(loopback::link_mesh(2, RING_BYTES).unwrap());
    let member = |(rank, links): (u32, Vec<Link>)| {
        let mut peers = PeerLinks::new(Rank(rank), links, None).unwrap();
        peers.copies = vec![RingCopier::new(LinkKind::SharedMemory)];
        peers
    };
    members.map(member).collect()
}

/// Runs an operation to its end, and returns the measured copies of each member.
fn count_measured_copies(make: impl Fn(&PeerLinks) -> Box<dyn CollectiveJob>) -> Vec<u64> {
    let mut members = measured_members();
    let mut jobs: Vec<_> = members.iter().map(&make).collect();
    let mut done = [false; 2];
    while done.contains(&false) {
        for ((peers, job), done) in members.iter_mut().zip(&mut jobs).zip(&mut done) {
            *done = *done || job.poll(peers).unwrap().done;
        }
    }
    members.iter().map(|peers| peers.copies[0].measured_copies).collect()
}

fn buffer(bytes: usize) -> Buffer {
    HostMemory::new(bytes).as_buffer()
}

#[test]
fn every_operation_measures_its_copies_into_rings() {
    let segment = |input, output| TensorSegment { input: buffer(input), output: buffer(output) };
    let both = 2 * PART_BYTES;
    let gathered = count_measured_copies(|peers| {
        let segments = [segment(PART_BYTES, both)];
        Box::new(AllgatherJob::new(peers, &segments, &[vec![PART_BYTES; 2]]))
    });
    let exchanged = count_measured_copies(|peers| {
        let parts = [PART_BYTES; 2];
        Box::new(AlltoallJob::new(peers, &segment(both, both), &parts, &parts))
    });
    let scattered = count_measured_copies(|peers| {
        let (dtype, op) = (DataType::F32, ReduceOp::Sum);
        let reduction = ReductionSpec { dtype, op, members: 2, prescale: 1.0, postscale: 1.0 };
        let reducer = BlockReducer::new(reduction).unwrap();
        let segments = [segment(both, PART_BYTES)];
        Box::new(ReducescatterJob::new(peers, reducer, &segments, &[vec![PART_BYTES; 2]]))
    });
    for copies in [gathered, exchanged, scattered] {
        assert!(copies.iter().all(|copies| *copies >= 16), "{copies:?}");
    }
    let broadcast = count_measured_copies(|peers| {
        let list = || GatherList::new([buffer(PART_BYTES)]);
        Box::new(BroadcastJob::new(peers, 0, list(), list()))
    });
    assert!(broadcast[0] >= 16 && broadcast[1] == 0, "{broadcast:?}");
}
