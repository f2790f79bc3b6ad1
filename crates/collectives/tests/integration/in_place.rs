// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Allreduces in memory that members share.
#![expect(clippy::unwrap_used, reason = "tests")]

use farandole_collectives::{
    CollectiveOperation, Communicator, Error, HostCommunicator, OperationToken, TensorSegment,
};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_testkit::{Harness, Links, complete, contents, elements, fill};
use farandole_transport::Error as LinkError;
use farandole_world::Rank;

/// Ring bytes of one link in these tests: far less than the tensors.
const ROUNDS: usize = 16 << 10;

/// Tensors in memory of their own, each behind `skip` bytes of it.
struct Tensors {
    memories: Vec<HostMemory>,
    skip: usize,
}

impl Tensors {
    fn new(inputs: &[Vec<u8>], skip: usize, shared: bool) -> Self {
        let memory = |input: &Vec<u8>| {
            let bytes = skip + input.len() + 100;
            let memory = if shared {
                HostMemory::new_shareable(bytes).unwrap()
            } else {
                HostMemory::new(bytes)
            };
            fill(&memory, 0, &vec![0x5a; bytes]);
            fill(&memory, skip, input);
            memory
        };
        Self { memories: inputs.iter().map(memory).collect(), skip }
    }

    fn operation(&self, dtype: DataType, op: ReduceOp) -> CollectiveOperation {
        let segment = |memory: &HostMemory| {
            let buffer = memory.as_buffer().slice(self.skip, memory.len() - self.skip - 100);
            TensorSegment { input: buffer.clone(), output: buffer }
        };
        let segments = self.memories.iter().map(segment).collect();
        CollectiveOperation::Allreduce { dtype, op, prescale: 0.5, postscale: 3.0, segments }
    }

    /// Returns the values; the memory around them is unchanged.
    fn results(&self) -> Vec<Vec<u8>> {
        let result = |memory: &HostMemory| {
            let mut all = contents(memory);
            let end = all.split_off(all.len() - 100);
            let tensor = all.split_off(self.skip);
            assert!(all.iter().chain(&end).all(|byte| *byte == 0x5a));
            tensor
        };
        self.memories.iter().map(result).collect()
    }
}

fn inputs(dtype: DataType, counts: &[usize], rank: Rank) -> Vec<Vec<u8>> {
    let input =
        |(count, seed): (&usize, u64)| elements(dtype, *count, seed + 10 * u64::from(rank.0));
    counts.iter().zip(0..).map(input).collect()
}

fn large(dtype: DataType) -> usize {
    (300 << 10) / dtype.element_size() + 7
}

/// Returns every member's result, with and without shared memory.
fn reduced(
    world: &Harness,
    dtype: DataType,
    op: ReduceOp,
    counts: &[usize],
    shared: impl Fn(Rank) -> bool + Sync,
) -> Vec<Vec<Vec<u8>>> {
    world.run(|rank, mut communicator| {
        let skip = dtype.element_size() * (3 + rank.index());
        let tensors = Tensors::new(&inputs(dtype, counts, rank), skip, shared(rank));
        complete(&mut communicator, tensors.operation(dtype, op)).unwrap();
        tensors.results()
    })
}

#[test]
fn the_bits_are_those_of_other_ways_and_no_tensor_goes_over_a_link() {
    for size in [2, 3, 4] {
        for dtype in [
            DataType::F32,
            DataType::F64,
            DataType::Bf16,
            DataType::F16,
            DataType::I32,
            DataType::C128,
        ] {
            let one = [large(dtype)];
            let some = [5, large(dtype), 0, 1000];
            for counts in [&one[..], &some] {
                let op = if dtype == DataType::I32 { ReduceOp::Average } else { ReduceOp::Sum };
                let plain = reduced(&Harness::new(size), dtype, op, counts, |_| false);
                let world = Harness::new(size).cut(0, 1, ROUNDS);
                let in_place = reduced(&world, dtype, op, counts, |_| true);
                assert!(plain == in_place, "{dtype} among {size}");
                assert!(in_place.iter().all(|results| *results == in_place[0]));
            }
        }
    }
}

#[test]
fn processes_that_share_rings_share_tensors_too() {
    let world = Harness::new(3).over(Links::SharedMemory);
    let counts = [large(DataType::F32)];
    let plain = reduced(&world, DataType::F32, ReduceOp::Sum, &counts, |_| false);
    let world = world.cut(2, 0, ROUNDS);
    assert!(plain == reduced(&world, DataType::F32, ReduceOp::Sum, &counts, |_| true));
}

#[test]
fn memory_of_one_member_alone_makes_all_go_another_way() {
    for size in [2, 3, 4] {
        let counts = [large(DataType::F32)];
        let plain = reduced(&Harness::new(size), DataType::F32, ReduceOp::Sum, &counts, |_| false);
        for alone in 0..size {
            let shared = |rank: Rank| rank.index() != alone;
            let mixed = reduced(&Harness::new(size), DataType::F32, ReduceOp::Sum, &counts, shared);
            assert!(plain == mixed, "{alone} of {size}");
        }
        let cut = Harness::new(size).cut(0, 1, ROUNDS).run(|rank, mut communicator| {
            let tensors = Tensors::new(&inputs(DataType::F32, &counts, rank), 0, rank.0 != 1);
            complete(&mut communicator, tensors.operation(DataType::F32, ReduceOp::Sum))
                .and_then(|()| complete(&mut communicator, CollectiveOperation::Barrier))
        });
        assert!(cut.iter().all(Result::is_err), "the tensors went over links");
    }
}

/// Spoils what tells others that they have found the memory they looked for.
fn hide(memory: &HostMemory) {
    let address = memory.address().addr();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-'));
    let number = |text| usize::from_str_radix(text, 16).unwrap();
    let (start, _) = ranges
        .map(|(start, end)| (number(start), number(end)))
        .find(|(start, end)| (*start..*end).contains(&address))
        .unwrap();
    // SAFETY: the mapping that holds the memory begins with two words that are not written any
    // more.
    unsafe { memory.address().sub(address - start).cast::<[u64; 2]>().write_volatile([0; 2]) }
}

#[test]
fn memory_that_one_member_cannot_find_makes_all_go_another_way() {
    let counts = [large(DataType::F32)];
    let plain = reduced(&Harness::new(3), DataType::F32, ReduceOp::Sum, &counts, |_| false);
    Harness::new(3).run(|rank, mut communicator| {
        let input = inputs(DataType::F32, &counts, rank);
        let hidden = Tensors::new(&input, 0, true);
        if rank.0 == 1 {
            hide(&hidden.memories[0]);
        }
        // Judged once, remembered, and no judgement about other memory.
        for _ in 0..3 {
            fill(&hidden.memories[0], 0, &input[0]);
            complete(&mut communicator, hidden.operation(DataType::F32, ReduceOp::Sum)).unwrap();
            assert!(hidden.results() == plain[rank.index()]);
        }
        let found = Tensors::new(&input, 0, true);
        complete(&mut communicator, found.operation(DataType::F32, ReduceOp::Sum)).unwrap();
        assert!(found.results() == plain[rank.index()]);
    });
    let outcomes = Harness::new(3).cut(0, 1, ROUNDS).run(|rank, mut communicator| {
        let tensors = Tensors::new(&inputs(DataType::F32, &counts, rank), 0, true);
        if rank.0 == 2 {
            hide(&tensors.memories[0]);
        }
        complete(&mut communicator, tensors.operation(DataType::F32, ReduceOp::Sum))
            .and_then(|()| complete(&mut communicator, CollectiveOperation::Barrier))
    });
    assert!(outcomes.iter().all(Result::is_err), "the tensors went over links");
}

#[test]
fn both_ways_take_turns_and_an_output_elsewhere_is_no_place_to_work_in() {
    Harness::new(3).run(|rank, mut communicator| {
        let counts = [large(DataType::F32)];
        let input = inputs(DataType::F32, &counts, rank);
        let expected = {
            let plain = Tensors::new(&input, 0, false);
            complete(&mut communicator, plain.operation(DataType::F32, ReduceOp::Sum)).unwrap();
            plain.results()
        };
        let shared = Tensors::new(&input, 4, true);
        for round in 0..6 {
            fill(&shared.memories[0], 4, &input[0]);
            let plain = Tensors::new(&input, 4, false);
            let tensors = if round % 3 == rank.0 { &plain } else { &shared };
            let tensors = if round == 5 { &shared } else { tensors };
            complete(&mut communicator, tensors.operation(DataType::F32, ReduceOp::Sum)).unwrap();
            assert!(tensors.results() == expected, "round {round}");
        }
        let (from, to) = (Tensors::new(&input, 0, true), Tensors::new(&input, 0, true));
        let CollectiveOperation::Allreduce { segments: mut read, .. } =
            from.operation(DataType::F32, ReduceOp::Sum)
        else {
            return;
        };
        let CollectiveOperation::Allreduce { dtype, op, prescale, postscale, segments: write } =
            to.operation(DataType::F32, ReduceOp::Sum)
        else {
            return;
        };
        read[0].output = write[0].output.clone();
        let operation =
            CollectiveOperation::Allreduce { dtype, op, prescale, postscale, segments: read };
        complete(&mut communicator, operation).unwrap();
        assert!(from.results() == input && to.results() == expected);
    });
}

#[test]
fn a_member_that_dies_is_an_error_and_takes_nothing_with_it() {
    for size in [2, 3] {
        let counts = [large(DataType::F32)];
        let expected =
            reduced(&Harness::new(size), DataType::F32, ReduceOp::Sum, &counts, |_| false);
        // Within the greeting and every round, between them, in the operation after.
        for bytes in (0..420).step_by(20) {
            let outcomes = Harness::new(size).cut(0, 1, bytes).run(|rank, mut communicator| {
                let input = inputs(DataType::F32, &counts, rank);
                let tensors = Tensors::new(&input, 0, true);
                let mut outcome = Ok(());
                for _ in 0..3 {
                    fill(&tensors.memories[0], 0, &input[0]);
                    outcome = complete(
                        &mut communicator,
                        tensors.operation(DataType::F32, ReduceOp::Sum),
                    );
                    if outcome.is_err() {
                        break;
                    }
                    assert!(tensors.results() == expected[rank.index()]);
                }
                let memory = &tensors.memories[0];
                // Announced memory is not shared any more, and is like any other memory here.
                fill(memory, 0, &input[0]);
                std::thread::yield_now();
                assert!(outcome.is_ok() || contents(memory)[..input[0].len()] == input[0]);
                (
                    outcome
                        .and_then(|()| complete(&mut communicator, CollectiveOperation::Barrier)),
                    memory.is_shareable(),
                )
            });
            for (rank, (outcome, shareable)) in outcomes.iter().enumerate() {
                let lost = matches!(outcome, Err(Error::Transport(LinkError::PeerLost { .. })));
                assert!(lost, "rank {rank} of {size} after {bytes}: {outcome:?}");
                assert!(
                    bytes <= 64 || rank > 1 || !shareable,
                    "rank {rank} of {size} after {bytes}"
                );
            }
        }
    }
}

/// Drives until nothing moves, for long enough that peers had their turn.
fn drive(communicator: &mut HostCommunicator) {
    let mut completed = Vec::new();
    for _ in 0..2000 {
        communicator.make_progress(&mut completed).unwrap();
        std::thread::yield_now();
    }
    assert!(completed.is_empty());
}

#[test]
fn abandoned_memory_is_its_owners_alone() {
    let counts = [large(DataType::F32)];
    let mut links = farandole_transport::loopback::link_mesh(2, 64 << 10).unwrap();
    let silent = links.pop();
    let mut communicator = HostCommunicator::new(Rank(0), links.pop().unwrap()).unwrap();
    // Past the greeting, by a peer that says the same.
    let mut peer = HostCommunicator::new(Rank(1), silent.unwrap()).unwrap();
    let input = inputs(DataType::F32, &counts, Rank(0));
    let tensors = Tensors::new(&input, 0, true);
    communicator
        .submit_operation(OperationToken(1), tensors.operation(DataType::F32, ReduceOp::Sum))
        .unwrap();
    drive(&mut communicator);
    drive(&mut peer);
    drive(&mut communicator);
    assert!(tensors.memories[0].is_shareable());
    communicator.abandon_operations();
    assert!(!tensors.memories[0].is_shareable());
    assert!(tensors.results() == input);
    assert_eq!(communicator.pending_count(), 0);
    assert!(
        communicator.submit_operation(OperationToken(2), CollectiveOperation::Barrier).is_err()
    );
}
