// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use farandole_engine::{EngineStatistics, Error, RequestKind};
use farandole_testkit::contents;

use crate::cluster::{Cluster, call, call_sum, floats, request, sum, values};

fn hits(cluster: &Cluster, rounds: usize, names: usize) -> Vec<EngineStatistics> {
    cluster.run(|_, engine| {
        for _ in 0..rounds {
            for name in 0..names {
                assert_eq!(call_sum(&engine, &format!("t{name}"), &[1.0]), [3.0]);
            }
        }
        engine.statistics()
    })
}

#[test]
fn requests_with_an_earlier_agreement_are_announced_by_number() {
    for statistics in hits(&Cluster::new(&[2, 1]), 5, 10) {
        assert_eq!(statistics.cache_hits, 40);
    }
}

#[test]
fn names_beyond_the_capacity_are_spelled_out_again() {
    let cluster = Cluster::new(&[2, 1]).with(|settings| settings.cache_capacity = 4);
    assert!(hits(&cluster, 5, 10).iter().all(|statistics| statistics.cache_hits == 0));
    assert!(hits(&cluster, 5, 4).iter().all(|statistics| statistics.cache_hits == 16));
}

#[test]
fn without_capacity_there_is_no_cache() {
    let cluster = Cluster::new(&[2, 1]).with(|settings| settings.cache_capacity = 0);
    assert!(hits(&cluster, 3, 2).iter().all(|statistics| statistics.cache_hits == 0));
}

#[test]
fn all_ranks_may_change_a_shape_and_one_alone_may_not() {
    // EN-4.
    Cluster::new(&[2, 1]).run(|rank, engine| {
        for length in [1usize, 2, 2, 1, 1] {
            assert_eq!(call_sum(&engine, "t", &vec![1.0; length]), vec![3.0; length]);
        }
        let error = call(&engine, sum("t", &vec![1.0; 1 + rank as usize / 2])).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }));
        for _ in 0..3 {
            assert_eq!(call_sum(&engine, "t", &[1.0]), [3.0]);
        }
    });
}

#[test]
fn an_allgather_is_known_only_with_the_same_rows_of_all() {
    Cluster::new(&[2, 1]).run(|rank, engine| {
        let gather = |rows: u64| {
            let input = vec![rank as f32; rows as usize];
            floats(&contents(
                &call(&engine, request("t", RequestKind::Allgather, &[rows], &input))
                    .unwrap()
                    .output
                    .unwrap(),
            ))
        };
        for _ in 0..2 {
            assert_eq!(gather(1), [0.0, 1.0, 2.0]);
            // Rank 1 alone changes its rows, twice: the others announce by number all the while.
            assert_eq!(gather(if rank == 1 { 2 } else { 1 }), [0.0, 1.0, 1.0, 2.0]);
            assert_eq!(gather(if rank == 1 { 0 } else { 1 }), [0.0, 2.0]);
        }
        assert!(engine.statistics().cache_hits >= if rank == 1 { 0 } else { 5 });
    });
}

#[test]
fn entries_that_fall_out_while_they_are_announced_are_still_understood() {
    let cluster = Cluster::new(&[2, 2, 1]).with(|settings| settings.cache_capacity = 3);
    cluster.run(|rank, engine| {
        for round in 0..40u32 {
            let name = |k: u32| (k * (rank + 1) + round) % 7;
            let submit = |k| engine.submit(sum(&format!("t{}", name(k)), &[1.0])).unwrap();
            // 7 is prime: every rank submits all names, in an order of its own.
            let handles: Vec<_> = (0..7).map(submit).collect();
            handles.into_iter().for_each(|handle| assert_eq!(values(&engine, handle), [5.0]));
        }
    });
}
