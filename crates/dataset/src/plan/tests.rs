// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::manifest::{DataFile, Manifest, RowGroup};
use crate::rng::random_permutation;

type Row = (usize, usize, u64);

fn manifest(files: &[Vec<u64>], row_bytes: u64) -> Manifest {
    let file = |(number, groups): (usize, &Vec<u64>)| {
        let groups =
            groups.iter().map(|rows| RowGroup { rows: *rows, bytes: rows * row_bytes }).collect();
        DataFile::new(format!("{number}"), 0, groups)
    };
    Manifest::new(String::new(), Vec::new(), files.iter().enumerate().map(file).collect())
}

fn request(rank: u32, size: u32, batch_size: u64) -> EpochRequest {
    let rank = Rank(rank);
    EpochRequest {
        seed: 5,
        epoch: 1,
        shuffle: true,
        rank,
        size,
        batch_size,
        tail: TailPolicy::Keep,
        start_row: 0,
        max_steps: None,
    }
}

/// Returns the rows of a step, without padding.
fn rows(plan: &EpochPlan, step: u64) -> Vec<Row> {
    let step = plan.plan_batch(step);
    let mut rows = vec![None; step.valid];
    for piece in &step.pieces {
        let part = &plan.parts()[piece.part];
        let length = u32::try_from(part.rows.end - part.rows.start).unwrap();
        let order = part
            .shuffle
            .map_or_else(|| (0..length).collect(), |seed| random_permutation(seed, length));
        for turn in 0..piece.count {
            let row = order[piece.first + turn * piece.stride];
            let place = &mut rows[piece.batch_start + turn * piece.batch_stride];
            assert_eq!(
                place.replace((part.file, part.group, part.rows.start + u64::from(row))),
                None
            );
        }
    }
    rows.into_iter().map(Option::unwrap).collect()
}

/// Returns all batches of all ranks, by step and rank.
fn world(
    lanes: &LaneLayout,
    size: u32,
    batch_size: u64,
    change: impl Fn(&mut EpochRequest),
) -> Vec<Vec<Vec<Row>>> {
    let plans: Vec<EpochPlan> = (0..size)
        .map(|rank| {
            let mut request = request(rank, size, batch_size);
            change(&mut request);
            EpochPlan::new(lanes, &request).unwrap()
        })
        .collect();
    assert!(plans.windows(2).all(|pair| pair[0].step_count() == pair[1].step_count()), "RD-3");
    (0..plans[0].step_count())
        .map(|step| plans.iter().map(|plan| rows(plan, step)).collect())
        .collect()
}

/// Returns global batches as sets.
fn global(steps: &[Vec<Vec<Row>>]) -> Vec<BTreeSet<Row>> {
    steps.iter().map(|ranks| ranks.iter().flatten().copied().collect()).collect()
}

fn files() -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(prop::collection::vec(0_u64..60, 0..6), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn rd_1_every_row_comes_once(files in files(), row_bytes in 1_u64..(2 << 20), size in 1_u32..9, batch in 1_u64..20, shuffle: bool) {
        let manifest = manifest(&files, row_bytes);
        let lanes = LaneLayout::new(&manifest);
        let mut seen = BTreeMap::<Row, u32>::new();
        for row in world(&lanes, size, batch, |r| r.shuffle = shuffle).into_iter().flatten().flatten() {
            *seen.entry(row).or_default() += 1;
        }
        prop_assert_eq!(seen.len() as u64, manifest.rows);
        prop_assert!(seen.values().all(|count| *count == 1));
    }

    #[test]
    fn rd_1_drop_leaves_out_less_than_a_global_batch_and_all_batches_are_full(files in files(), size in 1_u32..9, batch in 1_u64..20) {
        let lanes = LaneLayout::new(&manifest(&files, 100));
        let steps = world(&lanes, size, batch, |r| r.tail = TailPolicy::Drop);
        prop_assert!(steps.iter().flatten().all(|rows| rows.len() as u64 == batch));
        let taken: u64 = steps.len() as u64 * u64::from(size) * batch;
        prop_assert!(lanes.total_rows() - taken < u64::from(size) * batch);
    }

    #[test]
    fn rd_1_ranks_that_join_have_no_empty_batch_and_miss_nothing(files in files(), size in 1_u32..9, batch in 1_u64..20) {
        let lanes = LaneLayout::new(&manifest(&files, 100));
        let plans: Vec<EpochPlan> = (0..size)
            .map(|rank| EpochPlan::new(&lanes, &EpochRequest { tail: TailPolicy::Join, ..request(rank, size, batch) }).unwrap())
            .collect();
        let mut seen = BTreeSet::new();
        for plan in &plans {
            for step in 0..plan.step_count() {
                let rows = rows(plan, step);
                prop_assert!(!rows.is_empty());
                prop_assert!(rows.into_iter().all(|row| seen.insert(row)));
            }
        }
        prop_assert_eq!(seen.len() as u64, lanes.total_rows());
        let steps = || plans.iter().map(EpochPlan::step_count);
        prop_assert!(steps().max().unwrap() - steps().min().unwrap() <= 1);
    }

    #[test]
    fn rd_2_global_batches_are_the_same_at_every_size(files in files(), row_bytes in 1_u64..(2 << 20), batch in 1_u64..5, shuffle: bool) {
        let lanes = LaneLayout::new(&manifest(&files, row_bytes));
        let alone = global(&world(&lanes, 1, batch * 12, |r| r.shuffle = shuffle));
        for size in [2, 3, 4, 6, 12] {
            prop_assert_eq!(&alone, &global(&world(&lanes, size, batch * 12 / u64::from(size), |r| r.shuffle = shuffle)));
        }
    }

    #[test]
    fn rd_2_ranks_take_the_sequence_in_turn(files in files(), row_bytes in 1_u64..(2 << 20), size in 1_u32..9, batch in 1_u64..20, start in 0_u64..50, shuffle: bool) {
        let lanes = LaneLayout::new(&manifest(&files, row_bytes));
        let sequence: Vec<Row> = world(&lanes, 1, 7, |r| r.shuffle = shuffle).into_iter().flatten().flatten().collect();
        let mut position = start.min(lanes.total_rows());
        for step in world(&lanes, size, batch, |r| (r.shuffle, r.start_row) = (shuffle, start.min(lanes.total_rows()))) {
            let width = u64::from(size);
            for (rank, rows) in (0_u64..).zip(&step) {
                for (row, found) in (0_u64..).zip(rows) {
                    prop_assert_eq!(&sequence[to_index(position + row * width + rank)], found);
                }
            }
            position += batch * width;
        }
    }

    #[test]
    fn rd_7_a_batch_has_rows_of_all_that_is_open(groups in 8_usize..80, rows in 8_u64..40, done in 0_u64..4) {
        let lanes = LaneLayout::new(&manifest(&[vec![rows; groups]], 100));
        let open = lanes.blocks_per_batch().min(groups as u64);
        prop_assert!(lanes.blocks_per_batch() <= 64 && open * 2 > groups.min(64) as u64, "{open} of {groups}");
        // From anywhere in the first half of the epoch.
        let start_row = lanes.total_rows() * done / 8;
        let plan = EpochPlan::new(&lanes, &EpochRequest { start_row, ..request(0, 1, lanes.blocks_per_batch()) }).unwrap();
        let blocks: BTreeSet<(usize, usize)> = super::tests::rows(&plan, 0).into_iter().map(|(file, group, _)| (file, group)).collect();
        prop_assert!(blocks.len() as u64 * 10 >= open * 7, "{} of {open}", blocks.len());
    }

    #[test]
    fn rd_3_ranks_differ_by_one_row_at_most(files in files(), size in 1_u32..9, batch in 1_u64..20) {
        let lanes = LaneLayout::new(&manifest(&files, 100));
        let counts: Vec<u64> = (0..size).map(|rank| EpochPlan::new(&lanes, &request(rank, size, batch)).unwrap().row_count()).collect();
        prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
    }

    #[test]
    fn rd_4_ranks_that_divide_the_lanes_share_no_row(files in files(), row_bytes in 1_u64..(1 << 20), size in 1_u32..9) {
        let lanes = LaneLayout::new(&manifest(&files, row_bytes));
        prop_assume!(lanes.lane_count().is_multiple_of(u64::from(size)));
        let mut decoded = 0;
        for rank in 0..size {
            let plan = EpochPlan::new(&lanes, &request(rank, size, 4)).unwrap();
            decoded += plan.parts().iter().map(|part| part.rows.end - part.rows.start).sum::<u64>();
        }
        prop_assert_eq!(decoded, lanes.total_rows());
    }

    #[test]
    fn rd_5_an_epoch_continues_anywhere_on_any_size(files in files(), size in 1_u32..6, batch in 1_u64..10, done in 0_u64..10, next in 1_u32..6) {
        let lanes = LaneLayout::new(&manifest(&files, 100));
        let whole = world(&lanes, size, batch, |_| {});
        let done = done.min(whole.len() as u64);
        let start_row = (done * u64::from(size) * batch).min(lanes.total_rows());
        let mut before: BTreeSet<Row> = whole.iter().take(to_index(done)).flatten().flatten().copied().collect();
        for row in world(&lanes, next, batch, |r| r.start_row = start_row).into_iter().flatten().flatten() {
            prop_assert!(before.insert(row), "repeated {:?}", row);
        }
        prop_assert_eq!(before.len() as u64, lanes.total_rows());
    }

    #[test]
    fn rows_that_are_taken_equal_the_announced_parts(files in files(), size in 1_u32..9, batch in 1_u64..20, pad: bool) {
        let lanes = LaneLayout::new(&manifest(&files, 1 << 20));
        for rank in 0..size {
            let mut request = request(rank, size, batch);
            if pad { request.tail = TailPolicy::Pad; }
            let plan = EpochPlan::new(&lanes, &request).unwrap();
            let mut taken = vec![0; plan.parts().len()];
            for number in 0..plan.step_count() {
                let step = plan.plan_batch(number);
                if pad { prop_assert_eq!(step.rows as u64, batch); }
                prop_assert!(step.rows == step.valid || step.valid > 0 || step.padding.is_some());
                for piece in step.pieces.iter().copied().chain(step.padding.map(|part| PartSlice { part, first: 0, count: 1, stride: 1, batch_start: 0, batch_stride: 1 })) {
                    let part = &plan.parts()[piece.part];
                    prop_assert!((part.first_step..=part.last_step).contains(&number));
                    taken[piece.part] += piece.count as u64;
                }
            }
            prop_assert!(plan.parts().iter().map(|part| part.taken_rows).eq(taken));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn all_of_this_holds_where_lanes_begin_one_after_the_other(
        groups in prop::collection::vec(1_u64..6, 2400..5000),
        size in prop::sample::select(vec![2_u32, 3, 5, 16, 36, 48, 96, 100, 192]),
        batch in 1_u64..40,
        tail in prop::sample::select(vec![TailPolicy::Keep, TailPolicy::Drop]),
        share in 0_u64..1000,
    ) {
        let lanes = LaneLayout::new(&manifest(&[groups], 80));
        prop_assert!(lanes.lane_count() > 48);
        let sequence: Vec<Row> = world(&lanes, 1, 57, |_| {}).into_iter().flatten().flatten().collect();
        prop_assert_eq!(sequence.iter().copied().collect::<BTreeSet<Row>>().len() as u64, lanes.total_rows());
        prop_assert_eq!(sequence.len() as u64, lanes.total_rows());
        // From the start, from within the first lanes' own rows, from anywhere.
        for start in [0, share, lanes.total_rows() * share / 1000] {
            let (mut position, width) = (start, u64::from(size));
            for step in world(&lanes, size, batch, |r| (r.start_row, r.tail) = (start, tail)) {
                for (rank, rows) in (0_u64..).zip(&step) {
                    for (row, found) in (0_u64..).zip(rows) {
                        prop_assert_eq!(&sequence[to_index(position + row * width + rank)], found);
                    }
                }
                position += batch * width;
            }
            prop_assert!(position + batch * width > lanes.total_rows());
        }
    }
}

#[test]
fn rd_6_unshuffled_alone_is_file_order() {
    let lanes = LaneLayout::new(&manifest(&[vec![3, 2], vec![0], vec![4]], 100));
    let flat: Vec<Row> =
        world(&lanes, 1, 4, |r| r.shuffle = false).into_iter().flatten().flatten().collect();
    let expected: Vec<Row> = [(0, 0, 3), (0, 1, 2), (2, 0, 4)]
        .into_iter()
        .flat_map(|(file, group, rows)| (0..rows).map(move |row| (file, group, row)))
        .collect();
    assert_eq!(flat, expected);
}

#[test]
fn rd_7_neighbours_are_as_far_apart_as_in_a_full_shuffle_however_large_row_groups_are() {
    for (groups, mib) in [(3, 1), (100, 1), (100, 4), (100, 64), (9, 200), (3000, 1)] {
        let lanes = LaneLayout::new(&manifest(&[vec![256; groups]], (mib << 20) / 256));
        let sequence: Vec<i64> = world(&lanes, 1, 1024, |_| {})
            .into_iter()
            .flatten()
            .flatten()
            .map(|(_, group, row)| {
                i64::try_from(group).unwrap() * 256 + i64::try_from(row).unwrap()
            })
            .collect();
        let apart: i64 = sequence.windows(2).map(|pair| (pair[1] - pair[0]).abs()).sum();
        let whole = i64::try_from(lanes.total_rows()).unwrap();
        // In thousandths of the mean of a full shuffle, which is a third of the rows.
        let told = apart * 3000 / (whole * whole);
        assert!(
            (800..1200).contains(&told),
            "{told} for {groups} row groups of {mib} MiB in {} lanes",
            lanes.lane_count()
        );
    }
}

#[test]
fn epochs_and_seeds_differ() {
    let lanes = LaneLayout::new(&manifest(&[vec![50; 10]], 100));
    let first = world(&lanes, 1, 10, |_| {});
    assert_eq!(first, world(&lanes, 1, 10, |_| {}));
    assert_ne!(first, world(&lanes, 1, 10, |r| r.epoch = 2));
    assert_ne!(first, world(&lanes, 1, 10, |r| r.seed = 6));
}

#[test]
fn lanes_grow_with_the_data_but_not_past_open_memory() {
    let count = |groups: usize, mib: u64| {
        LaneLayout::new(&manifest(&[vec![1 << 10; groups]], mib << 10)).lane_count()
    };
    assert_eq!(
        [count(0, 1), count(1, 1), count(3, 1), count(8, 1), count(100, 1), count(1000, 1)],
        [1, 1, 2, 8, 8, 48]
    );
    assert_eq!(
        [count(2500, 1), count(10_000, 1), count(20_000, 1)],
        [96, 192, 192],
        "no more than fit"
    );
    assert_eq!(count(1000, 16), 16);
    assert_eq!(count(20, 100), 8, "large groups are cut into blocks");
}

#[test]
fn large_row_groups_are_cut_at_powers_of_two() {
    let lanes = LaneLayout::new(&Manifest::new(
        String::new(),
        Vec::new(),
        vec![DataFile::new("0".into(), 0, vec![RowGroup { rows: 1_000_000, bytes: 84_000_000 }])],
    ));
    let edges: Vec<u64> = lanes.block_ranges().map(|(_, _, rows)| rows.end).collect();
    assert_eq!(edges, [262_144, 524_288, 786_432, 1_000_000]);
}

#[test]
fn a_rank_without_rows_still_has_something_to_repeat() {
    let lanes = LaneLayout::new(&manifest(&[vec![1]], 8));
    let plan = EpochPlan::new(&lanes, &EpochRequest { tail: TailPolicy::Pad, ..request(2, 4, 3) })
        .unwrap();
    let step = plan.plan_batch(0);
    assert_eq!((plan.step_count(), step.rows, step.valid), (1, 3, 0));
    assert_eq!(plan.parts()[step.padding.unwrap()].rows, 0..1);
}

#[test]
fn a_limit_of_steps_leaves_out_the_parts_of_later_rows() {
    let lanes = LaneLayout::new(&manifest(&[vec![10, 7], vec![5]], 8));
    let read = |batch_size, start_row, max_steps| {
        let limited = EpochRequest {
            shuffle: false,
            start_row,
            max_steps: Some(max_steps),
            ..request(0, 1, batch_size)
        };
        let plan = EpochPlan::new(&lanes, &limited).unwrap();
        let parts: Vec<_> = plan.parts().iter().map(|part| (part.file, part.group)).collect();
        (parts, plan.row_count(), plan.step_count())
    };
    assert_eq!(read(10, 0, 1), (vec![(0, 0)], 10, 1));
    assert_eq!(read(7, 10, 1), (vec![(0, 1)], 7, 1));
    assert_eq!(read(5, 17, 9), (vec![(1, 0)], 5, 1));
    assert_eq!(read(10, 0, 0), (vec![], 0, 0));
}

#[test]
fn blocks_that_are_held_at_once_are_counted() {
    let lanes = LaneLayout::new(&manifest(&[vec![10; 4]], 100));
    let held = |batch_size| {
        let plan =
            EpochPlan::new(&lanes, &EpochRequest { shuffle: false, ..request(0, 1, batch_size) })
                .unwrap();
        plan.min_resident_bytes(|part| part.rows.end - part.rows.start)
    };
    // One after the other; in the last case a step takes two parts and the half of a third.
    assert_eq!([held(5), held(10), held(15), held(25)], [10, 10, 10, 10]);
    let plan = EpochPlan::new(&lanes, &request(0, 1, 8)).unwrap();
    assert_eq!(
        plan.min_resident_bytes(|part| part.rows.end - part.rows.start),
        40,
        "all four in turn"
    );
}

#[test]
fn lanes_that_continue_with_their_next_blocks_at_once_need_no_room_for_both() {
    let lanes = LaneLayout::new(&manifest(&[vec![64; 480]], 16 << 10));
    assert_eq!((lanes.lane_count(), lanes.blocks_per_batch()), (48, 48));
    let plan = EpochPlan::new(&lanes, &request(0, 1, 1000)).unwrap();
    let largest = |steps: u64| {
        let open = |step: u64| {
            plan.parts().iter().filter(move |p| (p.first_step..=p.last_step).contains(&step))
        };
        (0..steps)
            .map(|step| open(step).map(|part| part.rows.end - part.rows.start).sum::<u64>())
            .max()
            .unwrap()
    };
    let least = plan.min_resident_bytes(|part| part.rows.end - part.rows.start);
    assert!(least <= 50 * 64, "{least}: what is open");
    assert!(
        largest(plan.step_count()) > 90 * 64,
        "steps that end blocks and begin others see both"
    );
}

#[test]
fn the_first_batch_of_any_number_of_files_needs_about_as_many_of_them() {
    for files in [100, 1000, 3000, 10_000, 50_000] {
        let lanes = LaneLayout::new(&manifest(&vec![vec![1000]; files], 80));
        let plan = EpochPlan::new(&lanes, &request(0, 1, 4096)).unwrap();
        let needed = plan.parts().iter().filter(|part| part.first_step == 0).count();
        assert!((48..=64).contains(&needed), "{needed} of {files}, {} lanes", lanes.lane_count());
        let later = plan.step_count() / 2;
        let open =
            plan.parts().iter().filter(|part| (part.first_step..=part.last_step).contains(&later));
        assert!(open.count() as u64 >= lanes.blocks_per_batch() * 9 / 10);
    }
}

#[test]
fn rd_4_ranks_that_divide_many_lanes_read_a_tenth_twice_at_most() {
    for (blocks, count) in [(2400, 96), (4800, 192), (9600, 384), (19_200, 768)] {
        let lanes = LaneLayout::new(&manifest(&[vec![100; blocks]], 80));
        assert_eq!(lanes.lane_count(), count);
        for size in
            [16, 48, 64, 96, 128, 192, 384, 768].into_iter().filter(|size| count % size == 0)
        {
            let mut decoded = 0;
            for rank in 0..size {
                let plan = EpochPlan::new(
                    &lanes,
                    &request(u32::try_from(rank).unwrap(), u32::try_from(size).unwrap(), 4),
                )
                .unwrap();
                // A block on the border of two lanes is read by rows; count it as a whole.
                decoded += plan.parts().len();
            }
            assert!(
                decoded * 10 <= blocks * 11,
                "{decoded} of {blocks} for {size} ranks of {count} lanes"
            );
        }
    }
}

#[test]
fn impossible_requests_are_refused() {
    let lanes = LaneLayout::new(&manifest(&[vec![10]], 1));
    for (rank, size, batch) in [(2, 2, 1), (0, 0, 1), (0, 1, 0)] {
        assert!(EpochPlan::new(&lanes, &request(rank, size, batch)).is_err());
    }
}
