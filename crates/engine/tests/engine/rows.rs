// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Operations that deal out rows.

use farandole_engine::{CollectiveRequest, Error, RequestKind};
use farandole_kernels::ReduceOp;
use farandole_testkit::contents;
use farandole_world::{FaultOrigin, ProcessSetId};

use crate::cluster::{Cluster, call, call_sum, floats, memory, request, values};

/// Rows that `from` sends to `to`.
fn rows(from: u32, to: u32, round: u32) -> u64 {
    ((from * 3 + to * 5 + round) % 4).into()
}

fn exchange(rank: u32, size: u32, round: u32) -> CollectiveRequest {
    let splits: Vec<u64> = (0..size).map(|to| rows(rank, to, round)).collect();
    let input: Vec<f32> = (0..size)
        .flat_map(|to| vec![(rank * 10 + to) as f32; 2 * rows(rank, to, round) as usize])
        .collect();
    let total = splits.iter().sum();
    request("t", RequestKind::Alltoall { splits: Some(splits) }, &[total, 2], &input)
}

#[test]
fn every_member_gets_what_the_others_dealt_to_it_whether_known_or_new() {
    for hosts in [&[1][..], &[2], &[1, 2, 1]] {
        let size: u32 = hosts.iter().sum();
        Cluster::new(hosts).run(|rank, engine| {
            for round in [0, 1, 1, 1, 2, 0] {
                let result = call(&engine, exchange(rank, size, round)).unwrap();
                let received: Vec<u64> = (0..size).map(|from| rows(from, rank, round)).collect();
                let expected: Vec<f32> = (0..size)
                    .flat_map(|from| {
                        vec![(from * 10 + rank) as f32; 2 * rows(from, rank, round) as usize]
                    })
                    .collect();
                assert_eq!(result.rows, received);
                assert_eq!(floats(&contents(&result.output.unwrap())), expected);
            }
            assert_eq!(engine.statistics().cache_hits, 2);
        });
    }
}

#[test]
fn without_splits_every_member_gets_as_many_rows() {
    Cluster::new(&[2]).run(|rank, engine| {
        let even = request("t", RequestKind::Alltoall { splits: None }, &[4], &[rank as f32; 4]);
        let result = call(&engine, even).unwrap();
        assert_eq!(result.rows, [2, 2]);
        assert_eq!(floats(&contents(&result.output.unwrap())), [0.0, 0.0, 1.0, 1.0]);
    });
}

#[test]
fn splits_that_do_not_fit_are_refused_at_once() {
    Cluster::new(&[2]).run(|_, engine| {
        let of = |splits: Option<Vec<u64>>, shape: &[u64]| {
            let values = vec![0.0; shape.iter().product::<u64>() as usize];
            engine
                .submit(request("t", RequestKind::Alltoall { splits }, shape, &values))
                .unwrap_err()
        };
        for (splits, shape, message) in [
            (None, &[3][..], "splits of t: 3 rows cannot be split evenly among 2 ranks"),
            (Some(vec![3]), &[3], "splits of t: one number for each of 2 ranks: [3]"),
            (
                Some(vec![1, 1]),
                &[3],
                "splits of t: they must add up to the 3 rows of the tensor: [1, 1]",
            ),
            (
                Some(vec![4, 1]),
                &[3],
                "splits of t: they must add up to the 3 rows of the tensor: [4, 1]",
            ),
            (None, &[], "alltoall needs at least one dimension: t"),
        ] {
            let error = of(splits, shape);
            assert_eq!((error.to_string().as_str(), error.fault()), (message, FaultOrigin::Usage));
        }
        call(&engine, CollectiveRequest::barrier("end", ProcessSetId::GLOBAL)).unwrap();
    });
}

#[test]
fn trailing_dimensions_must_agree() {
    Cluster::new(&[2]).run(|rank, engine| {
        let columns = u64::from(rank) + 1;
        let odd = request(
            "t",
            RequestKind::Alltoall { splits: None },
            &[2, columns],
            &vec![0.0; 2 * columns as usize],
        );
        let error = call(&engine, odd).unwrap_err();
        assert!(error.to_string().starts_with("Mismatched ALLTOALL tensor shapes: "), "{error}");
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

fn scatter(name: &str, op: ReduceOp, rows: u64, value: f32) -> CollectiveRequest {
    let kind = RequestKind::Reducescatter { op, prescale: 1.0, postscale: 0.5 };
    let input: Vec<f32> = (0..2 * rows).map(|k| k as f32 + value).collect();
    request(name, kind, &[rows, 2], &input)
}

#[test]
fn every_member_gets_its_own_rows_of_the_sum_and_the_first_those_left_over() {
    for hosts in [&[1][..], &[2], &[2, 1]] {
        let size: u64 = hosts.iter().map(|ranks| u64::from(*ranks)).sum();
        Cluster::new(hosts).run(|rank, engine| {
            for rows in [0, 1, 2, 7, 7] {
                let result =
                    call(&engine, scatter("t", ReduceOp::Average, rows, rank as f32)).unwrap();
                let own = |member: u64| rows / size + u64::from(member < rows % size);
                let first: u64 = (0..rank.into()).map(own).sum();
                let mean = (size - 1) as f32 / 2.0;
                let expected: Vec<f32> = (2 * first..2 * (first + own(rank.into())))
                    .map(|k| (k as f32 + mean) / 2.0)
                    .collect();
                assert_eq!(
                    floats(&contents(&result.output.unwrap())),
                    expected,
                    "{rows} rows on {rank}"
                );
                assert_eq!(
                    engine.own_reducescatter_rows(rows, ProcessSetId::GLOBAL).unwrap(),
                    own(rank.into())
                );
            }
            assert_eq!(engine.statistics().cache_hits, 1);
        });
    }
}

#[test]
fn reduce_scatters_of_a_group_are_one_operation() {
    Cluster::new(&[2]).run(|rank, engine| {
        let group = vec![scatter("a", ReduceOp::Sum, 2, 0.0), scatter("b", ReduceOp::Sum, 3, 1.0)];
        let handles = engine.submit_group(group).unwrap();
        let results: Vec<Vec<f32>> =
            handles.into_iter().map(|handle| values(&engine, handle)).collect();
        match rank {
            0 => assert_eq!(results, [vec![0.0, 1.0], vec![1.0, 2.0, 3.0, 4.0]]),
            _ => assert_eq!(results, [vec![2.0, 3.0], vec![5.0, 6.0]]),
        }
        assert_eq!(engine.statistics().operations, 1);
    });
}

#[test]
fn a_reduce_scatter_that_cannot_be_is_refused_at_once() {
    Cluster::new(&[2]).run(|rank, engine| {
        let max = engine.submit(scatter("t", ReduceOp::Max, 2, 0.0)).unwrap_err();
        assert_eq!(max.to_string(), "reducescatter of t takes Average or Sum: Max");
        let base = scatter("t", ReduceOp::Sum, 1, 0.0);
        let scalar =
            CollectiveRequest { shape: Vec::new(), input: memory(&[1.0]).as_buffer(), ..base };
        assert!(matches!(
            engine.submit(scalar),
            Err(Error::Scalar { operation: "reducescatter", .. })
        ));
        let output = memory(&[0.0; 4]);
        let long = CollectiveRequest {
            output: Some(output.as_buffer()),
            ..scatter("t", ReduceOp::Sum, 3, 0.0)
        };
        match rank {
            0 => assert!(engine.submit(long).is_ok()),
            _ => assert!(matches!(engine.submit(long), Err(Error::BufferSize { expected: 8, .. }))),
        }
    });
}
