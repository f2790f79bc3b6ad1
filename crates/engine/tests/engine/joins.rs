// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Ranks that end before others.

use std::sync::Arc;
use std::time::Duration;

use farandole_engine::{CollectiveRequest, Engine, Error, RequestKind};
use farandole_kernels::ReduceOp;
use farandole_testkit::contents;
use farandole_world::{FaultOrigin, Rank};

use crate::cluster::{Cluster, call, call_sum, floats, request, sum, values, wait};

fn join(engine: &Engine, gather: bool) -> Rank {
    call(engine, CollectiveRequest::join("join", gather)).unwrap().last.unwrap()
}

fn reduce(
    engine: &Engine,
    name: &str,
    op: ReduceOp,
    prescale: f64,
    value: f32,
) -> Result<f32, Error> {
    let kind = RequestKind::Allreduce { op, prescale, postscale: 1.0 };
    call(engine, request(name, kind, &[1], &[value]))
        .map(|done| floats(&contents(&done.output.unwrap()))[0])
}

#[test]
fn ranks_with_fewer_steps_leave_the_results_of_others_alone() {
    for hosts in [&[1][..], &[2], &[3], &[2, 1, 2], &[1, 2, 1, 1, 1]] {
        let size: u32 = hosts.iter().sum();
        // The higher the rank, the more steps; every step of known and of new tensors.
        let lasts = Cluster::new(hosts).run(|rank, engine| {
            for step in 0..=rank {
                let with = size - step;
                assert_eq!(
                    call_sum(&engine, "known", &[1.0]),
                    [with as f32],
                    "step {step} on {rank}"
                );
                assert_eq!(call_sum(&engine, &format!("new{step}"), &[1.0; 2]), [with as f32; 2]);
                let value = -1.0 - rank as f32;
                let max = reduce(&engine, "max", ReduceOp::Max, 1.0, value).unwrap();
                assert_eq!(max, -1.0 - step as f32);
                assert_eq!(
                    reduce(&engine, "min", ReduceOp::Min, -1.0, value).unwrap(),
                    1.0 + step as f32
                );
                assert_eq!(
                    reduce(&engine, "product", ReduceOp::Product, 1.0, 2.0).unwrap(),
                    2f32.powi(with as i32)
                );
                let average = reduce(&engine, "average", ReduceOp::Average, 1.0, 1.0).unwrap();
                assert_eq!(average, with as f32 / size as f32);
            }
            let last = join(&engine, false);
            // And again: nothing of it is left.
            for _ in 0..2 {
                assert_eq!(call_sum(&engine, "known", &[1.0]), [size as f32]);
            }
            join(&engine, true);
            last
        });
        assert!(lasts.iter().all(|last| *last == Rank(size - 1)), "{lasts:?}");
    }
}

#[test]
fn tensors_submitted_before_a_join_count() {
    Cluster::new(&[2, 2]).run(|rank, engine| {
        let handle = engine.submit(sum("t", &[1.0])).unwrap();
        if rank == 1 {
            let joined = engine.submit(CollectiveRequest::join("join", false)).unwrap();
            assert_eq!(values(&engine, handle), [4.0]);
            assert!(wait(&engine, joined).unwrap().last.is_some());
        } else {
            assert_eq!(values(&engine, handle), [4.0]);
            assert_eq!(call_sum(&engine, "u", &[1.0]), [3.0]);
            join(&engine, false);
        }
    });
}

#[test]
fn groups_and_fused_tensors_are_completed_without_those_that_joined() {
    Cluster::new(&[1, 2]).run(|rank, engine| {
        if rank > 0 {
            for _ in 0..3 {
                let group = vec![sum("a", &[1.0]), sum("b", &[2.0; 3])];
                let handles = engine.submit_group(group).unwrap();
                let single = engine.submit(sum("c", &[3.0])).unwrap();
                let sums: Vec<Vec<f32>> =
                    handles.into_iter().map(|handle| values(&engine, handle)).collect();
                assert_eq!(sums, [vec![2.0], vec![4.0; 3]]);
                assert_eq!(values(&engine, single), [6.0]);
            }
        }
        join(&engine, false);
    });
}

#[test]
fn gathers_and_broadcasts_need_the_consent_of_those_that_joined() {
    for consent in [false, true] {
        Cluster::new(&[2, 1]).run(|rank, engine| {
            let rows = |rank: u32| request("rows", RequestKind::Allgather, &[1], &[rank as f32]);
            assert_eq!(
                floats(&contents(&call(&engine, rows(rank)).unwrap().output.unwrap())),
                [0.0, 1.0, 2.0]
            );
            if rank == 1 {
                join(&engine, consent);
                return;
            }
            for _ in 0..2 {
                let gathered = call(&engine, rows(rank));
                let from = |root| {
                    request("b", RequestKind::Broadcast { root: Rank(root) }, &[1], &[rank as f32])
                };
                let sent = call(&engine, from(2));
                if consent {
                    let gathered = gathered.unwrap();
                    assert_eq!(gathered.rows, [1, 0, 1]);
                    assert_eq!(floats(&contents(&gathered.output.unwrap())), [0.0, 2.0]);
                    assert_eq!(floats(&contents(&sent.unwrap().output.unwrap())), [2.0]);
                } else {
                    let text = gathered.unwrap_err().to_string();
                    assert!(
                        text.ends_with("while ranks have joined: 1 did so without allow_gather"),
                        "{text}"
                    );
                    assert!(sent.is_err());
                }
                let text = call(&engine, from(1)).unwrap_err().to_string();
                assert!(text.contains("its root, rank 1, has joined"), "{text}");
            }
            assert_eq!(call_sum(&engine, "goes on", &[1.0]), [2.0]);
            join(&engine, false);
        });
    }
}

#[test]
fn an_operation_that_needs_all_ranks_fails_for_its_callers_and_the_engine_continues() {
    Cluster::new(&[1, 2]).run(|rank, engine| {
        if rank != 2 {
            let scatter =
                RequestKind::Reducescatter { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 };
            for (name, kind) in [
                ("barrier", RequestKind::Barrier),
                ("scatter", scatter),
                ("exchange", RequestKind::Alltoall { splits: Some(vec![1, 1, 1]) }),
            ] {
                let base = request(name, kind.clone(), &[3], &[0.0; 3]);
                let asked = if kind == RequestKind::Barrier {
                    CollectiveRequest::barrier(name, base.process_set)
                } else {
                    base
                };
                let error = call(&engine, asked).unwrap_err();
                let text = format!("of {name} is not possible while ranks have joined: 2");
                assert!(error.to_string().ends_with(&text), "{error}");
            }
            let error = reduce(&engine, "p", ReduceOp::Product, 3.0, 1.0).unwrap_err();
            assert!(
                error
                    .to_string()
                    .ends_with("a product with a prescale factor needs all ranks, 2 have joined")
            );
            let group = vec![sum("a", &[1.0]), request("b", RequestKind::Allgather, &[1], &[1.0])];
            let handles = engine.submit_group(group).unwrap();
            handles.into_iter().for_each(|handle| assert!(wait(&engine, handle).is_err()));
            assert_eq!(call_sum(&engine, "a", &[1.0]), [2.0]);
        }
        join(&engine, false);
    });
}

#[test]
fn a_joined_rank_submits_nothing_else() {
    Cluster::new(&[2]).run(|rank, engine| {
        if rank == 0 {
            let joined = engine.submit(CollectiveRequest::join("join", false)).unwrap();
            let error = engine.submit(sum("t", &[1.0])).unwrap_err();
            assert_eq!(
                error.to_string(),
                "this rank has joined in process set 0: t must wait until all ranks have"
            );
            assert_eq!(error.fault(), FaultOrigin::Usage);
            assert!(engine.submit_group(vec![sum("t", &[1.0])]).is_err());
            assert!(engine.submit(CollectiveRequest::join("again", false)).is_err());
            wait(&engine, joined).unwrap();
        } else {
            join(&engine, false);
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn the_end_of_a_rank_ends_the_joins_of_others() {
    let errors = Cluster::new(&[3]).run(|rank, engine| match rank {
        0 => {
            drop(engine);
            String::new()
        }
        _ => call(&engine, CollectiveRequest::join("join", false)).unwrap_err().to_string(),
    });
    assert!(
        errors[1..].iter().all(|text| text.ends_with("rank 0 on host0 shut down")),
        "{errors:?}"
    );
}

#[test]
fn a_join_that_nothing_comes_of_times_out() {
    let limit = Duration::from_millis(300);
    let cluster = Cluster::new(&[2]).with(|settings| settings.collective_timeout = limit);
    let barrier = Arc::new(std::sync::Barrier::new(2));
    let errors = cluster.run(|rank, engine| {
        let error = (rank == 0).then(|| {
            call(&engine, CollectiveRequest::join("join", false)).unwrap_err().to_string()
        });
        barrier.wait();
        error
    });
    let text = errors[0].as_deref().unwrap();
    assert!(text.starts_with("join of join failed: join of join timed out after "), "{text}");
}
