// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Shared memory comes and goes. The test counts descriptors and mappings of its process, so it
//! has its own.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Barrier;

use farandole_collectives::Communicator;
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_testkit::{Harness, complete, run_in_own_process};

const NAME: &str = "farandole-region";

fn descriptors() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let target =
        |entry: std::io::Result<std::fs::DirEntry>| std::fs::read_link(entry.unwrap().path());
    entries
        .filter_map(|entry| target(entry).ok())
        .filter(|to| to.to_string_lossy().contains(NAME))
        .count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(NAME)).count()
}

fn sum(communicator: &mut dyn Communicator, memory: &HostMemory) {
    let segment = farandole_collectives::TensorSegment {
        input: memory.as_buffer(),
        output: memory.as_buffer(),
    };
    let operation = farandole_collectives::CollectiveOperation::Allreduce {
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        prescale: 1.0,
        postscale: 1.0,
        segments: vec![segment],
    };
    complete(communicator, operation).unwrap();
}

#[test]
fn neither_descriptors_nor_mappings_pile_up_where_memory_comes_and_goes() {
    run_in_own_process("in_place_leaks::memory_comes_and_goes");
}

#[test]
#[ignore = "counts what its process has, so the test above starts it"]
fn memory_comes_and_goes() {
    let size = 3;
    let (count, all) = (Barrier::new(size), Barrier::new(size));
    Harness::new(size).run(|rank, mut communicator| {
        let kept = HostMemory::new_shareable(1 << 20).unwrap();
        for _ in 0..20 {
            let memory = HostMemory::new_shareable(1 << 20).unwrap();
            sum(&mut communicator, &memory);
            sum(&mut communicator, &kept);
            count.wait();
            if rank.0 == 0 {
                // Two of each member, each mapped by all; and what was freed since, until the next
                // operation.
                assert_eq!(descriptors(), 2 * size);
                assert!(mappings() <= 3 * size * size, "{} mappings", mappings());
            }
            all.wait();
        }
        drop(kept);
        count.wait();
        drop(communicator);
        all.wait();
        if rank.0 == 0 {
            assert_eq!((descriptors(), mappings()), (0, 0));
        }
        count.wait();
    });
}
