// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use farandole_engine::{CollectiveRequest, Error, RequestHandle, RequestKind};
use farandole_kernels::{DataType, ReduceOp};
use farandole_testkit::contents;
use farandole_world::{FaultOrigin, ProcessSetId, Rank};

use crate::cluster::{
    Cluster, LIMIT, SUM, bytes, call, call_sum, floats, memory, request, sum, values, wait,
};

#[test]
fn synchronous_and_asynchronous_sums_agree_on_every_rank() {
    for hosts in [&[1][..], &[2], &[3], &[2, 2], &[1, 3, 2, 2]] {
        let size: u32 = hosts.iter().sum();
        Cluster::new(hosts).run(|rank, engine| {
            for length in [0usize, 1, 7, 1000] {
                let input: Vec<f32> = (0..length).map(|k| (k as u32 + rank) as f32).collect();
                let expected: Vec<f32> = (0..length as u32)
                    .map(|k| (0..size).map(|rank| (k + rank) as f32).sum())
                    .collect();
                assert_eq!(call_sum(&engine, &format!("sync{length}"), &input), expected);
                let handle = engine.submit(sum(&format!("async{length}"), &input)).unwrap();
                assert_eq!(values(&engine, handle), expected);
            }
        });
    }
}

#[test]
fn a_hundred_asynchronous_operations_are_fused_and_all_complete() {
    let statistics = Cluster::new(&[2]).run(|rank, engine| {
        let submit =
            |k: usize| engine.submit(sum(&format!("t{k}"), &[rank as f32, k as f32])).unwrap();
        let handles: Vec<RequestHandle> = (0..100).map(submit).collect();
        for (k, handle) in handles.into_iter().enumerate() {
            assert_eq!(values(&engine, handle), [1.0, 2.0 * k as f32]);
        }
        engine.statistics()
    });
    assert_eq!(statistics[0].tensors, 100);
    assert_eq!(statistics[0].operations, statistics[1].operations);
}

#[test]
fn ranks_may_submit_in_different_orders() {
    // EN-2.
    Cluster::new(&[2, 2]).run(|rank, engine| {
        for round in 0..20 {
            let order = |k: u32| (k * (2 * rank + 1) + rank + round) % 16;
            let submit = |k| {
                (
                    order(k),
                    engine.submit(sum(&format!("t{}", order(k)), &[order(k) as f32])).unwrap(),
                )
            };
            let handles: Vec<(u32, RequestHandle)> = (0..16).map(submit).collect();
            for (k, handle) in handles {
                assert_eq!(values(&engine, handle), [4.0 * k as f32]);
            }
        }
    });
}

#[test]
fn factors_and_operations_reach_the_communicator() {
    Cluster::new(&[2]).run(|rank, engine| {
        let of = |op, prescale, postscale| {
            let kind = RequestKind::Allreduce { op, prescale, postscale };
            let result =
                call(&engine, request("t", kind, &[2], &[1.0 + rank as f32, 4.0])).unwrap();
            floats(&contents(&result.output.unwrap()))
        };
        assert_eq!(of(ReduceOp::Average, 1.0, 1.0), [1.5, 4.0]);
        assert_eq!(of(ReduceOp::Max, 1.0, 10.0), [20.0, 40.0]);
        assert_eq!(of(ReduceOp::Sum, 0.5, 1.0), [1.5, 4.0]);
    });
}

#[test]
fn results_are_written_where_the_caller_wants_them() {
    Cluster::new(&[3]).run(|rank, engine| {
        let (input, output) = (memory(&[rank as f32; 5]), memory(&[0.0; 5]));
        let base = sum("t", &[0.0; 5]);
        let apart = CollectiveRequest {
            input: input.as_buffer(),
            output: Some(output.as_buffer()),
            ..base
        };
        assert!(call(&engine, apart).unwrap().output.is_none());
        assert_eq!(contents(&output), bytes(&[3.0; 5]));
        let base = sum("t", &[0.0; 5]);
        call(
            &engine,
            CollectiveRequest { input: input.as_buffer(), output: Some(input.as_buffer()), ..base },
        )
        .unwrap();
        assert_eq!(contents(&input), bytes(&[3.0; 5]));
    });
}

#[test]
fn allgather_takes_different_first_dimensions_also_none() {
    Cluster::new(&[1, 2, 1]).run(|rank, engine| {
        for round in 0..3u32 {
            let rows = |rank: u32| (rank + round) % 4;
            let input = vec![rank as f32; 2 * rows(rank) as usize];
            let result = call(
                &engine,
                request("t", RequestKind::Allgather, &[rows(rank).into(), 2], &input),
            )
            .unwrap();
            let expected: Vec<f32> =
                (0..4).flat_map(|rank| vec![rank as f32; 2 * rows(rank) as usize]).collect();
            assert_eq!(floats(&contents(&result.output.unwrap())), expected);
            assert_eq!(result.rows, (0..4).map(|rank| u64::from(rows(rank))).collect::<Vec<_>>());
        }
    });
}

#[test]
fn an_allgather_into_memory_of_another_size_fails_here_alone() {
    Cluster::new(&[2]).run(|rank, engine| {
        let output = memory(&[0.0; 3]);
        let request = request("t", RequestKind::Allgather, &[1], &[rank as f32]);
        let given = (rank == 1).then(|| output.as_buffer());
        let result = call(&engine, CollectiveRequest { output: given, ..request });
        match rank {
            0 => assert_eq!(floats(&contents(&result.unwrap().output.unwrap())), [0.0, 1.0]),
            _ => assert!(matches!(result, Err(Error::BufferSize { expected: 8, actual: 12, .. }))),
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn broadcast_sends_the_roots_values_to_all() {
    Cluster::new(&[2, 1]).run(|rank, engine| {
        for root in 0..3 {
            let kind = RequestKind::Broadcast { root: Rank(root) };
            let result = call(&engine, request("t", kind, &[2], &[rank as f32, 5.0])).unwrap();
            assert_eq!(floats(&contents(&result.output.unwrap())), [root as f32, 5.0]);
        }
    });
}

#[test]
fn a_barrier_holds_all_ranks_until_the_last_came() {
    let came = AtomicU32::new(0);
    Cluster::new(&[2, 2]).run(|_, engine| {
        for round in 1..=20 {
            came.fetch_add(1, Ordering::SeqCst);
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            assert!(came.load(Ordering::SeqCst) >= 4 * round);
        }
    });
}

#[test]
fn every_element_type_passes() {
    Cluster::new(&[2]).run(|rank, engine| {
        for dtype in DataType::ALL {
            let kind = RequestKind::Broadcast { root: Rank(1) };
            let base = request(dtype.name(), kind, &[4], &[]);
            let input =
                farandole_testkit::filled(&vec![rank as u8; 4 * dtype.element_size()]).as_buffer();
            let result = call(&engine, CollectiveRequest { dtype, input, ..base }).unwrap();
            assert_eq!(contents(&result.output.unwrap()), vec![1; 4 * dtype.element_size()]);
        }
    });
}

#[test]
fn an_operation_that_is_not_defined_fails_on_all_and_the_engine_continues() {
    Cluster::new(&[2]).run(|_, engine| {
        let base = request("t", SUM, &[4], &[1.0]);
        let kind = RequestKind::Allreduce { op: ReduceOp::Adasum, prescale: 1.0, postscale: 1.0 };
        let error =
            call(&engine, CollectiveRequest { kind, dtype: DataType::Bool, ..base }).unwrap_err();
        assert!(error.to_string().starts_with("allreduce of t failed: "), "{error}");
        assert_eq!(error.fault(), FaultOrigin::Usage);
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn booleans_with_scale_factors_are_refused_at_once_and_the_engine_continues() {
    Cluster::new(&[2]).run(|_, engine| {
        for (prescale, postscale) in [(2.0, 1.0), (1.0, 0.5)] {
            let kinds = [
                RequestKind::Allreduce { op: ReduceOp::Sum, prescale, postscale },
                RequestKind::Reducescatter { op: ReduceOp::Sum, prescale, postscale },
            ];
            for kind in kinds {
                let base = request("t", kind, &[4], &[1.0]);
                let error =
                    call(&engine, CollectiveRequest { dtype: DataType::Bool, ..base }).unwrap_err();
                assert!(
                    error.to_string().ends_with(" of t takes no scale factors: bool"),
                    "{error}"
                );
                assert_eq!(error.fault(), FaultOrigin::Usage);
            }
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn members_of_a_group_complete_together() {
    // EN-3: nothing of the group runs while one rank lacks it, though single tensors do.
    Cluster::new(&[2, 1]).run(|rank, engine| {
        let group = || vec![sum("a", &[1.0]), sum("b", &[2.0]), sum("c", &[3.0])];
        if rank == 2 {
            assert_eq!(call_sum(&engine, "single", &[1.0]), [3.0]);
        }
        let handles = engine.submit_group(group()).unwrap();
        if rank != 2 {
            assert!(!engine.poll(handles[0]).unwrap(), "rank 2 waits for the single tensor first");
            assert_eq!(call_sum(&engine, "single", &[1.0]), [3.0]);
        }
        let sums: Vec<f32> =
            handles.into_iter().flat_map(|handle| values(&engine, handle)).collect();
        assert_eq!(sums, [3.0, 6.0, 9.0]);
        let again = engine.submit_group(group()).unwrap();
        assert_eq!(again.len(), 3);
        again.into_iter().for_each(|handle| drop(wait(&engine, handle).unwrap()));
    });
}

#[test]
fn process_sets_work_by_themselves_and_names_are_theirs() {
    let cluster = Cluster { sets: vec![vec![1, 3], vec![0, 2, 3]], ..Cluster::new(&[2, 2]) };
    cluster.run(|rank, engine| {
        let of = |set: u32| CollectiveRequest {
            process_set: ProcessSetId(set),
            ..sum("t", &[rank as f32])
        };
        let mine: Vec<u32> =
            (1..3).filter(|set| engine.process_set_members(ProcessSetId(*set)).is_ok()).collect();
        let handles: Vec<(u32, RequestHandle)> =
            mine.iter().map(|set| (*set, engine.submit(of(*set)).unwrap())).collect();
        assert_eq!(call_sum(&engine, "t", &[rank as f32]), [6.0]);
        for (set, handle) in handles {
            assert_eq!(values(&engine, handle), [[0.0, 4.0, 5.0][set as usize]]);
        }
        if rank == 0 {
            let error = engine.submit(of(1)).unwrap_err();
            assert_eq!(error.to_string(), "rank 0 is not a member of process set 1");
            assert!(matches!(
                engine.submit(of(9)),
                Err(Error::UnknownSet { set: ProcessSetId(9) })
            ));
        }
        if rank == 3 {
            let kind = RequestKind::Broadcast { root: Rank(0) };
            let foreign = CollectiveRequest {
                process_set: ProcessSetId(1),
                ..request("b", kind, &[1], &[0.0])
            };
            let error = engine.submit(foreign).unwrap_err();
            assert_eq!(error.to_string(), "root rank 0 is not a member of process set 1");
        }
        if rank != 0 && rank != 2 {
            let kind = RequestKind::Broadcast { root: Rank(3) };
            let inside = CollectiveRequest {
                process_set: ProcessSetId(1),
                ..request("b", kind, &[1], &[rank as f32])
            };
            assert_eq!(floats(&contents(&call(&engine, inside).unwrap().output.unwrap())), [3.0]);
        }
        call(&engine, CollectiveRequest::barrier("end", ProcessSetId::GLOBAL)).unwrap();
    });
}

#[test]
fn wrong_requests_are_refused_at_once() {
    Cluster::new(&[1]).run(|_, engine| {
        let scalar = request("t", RequestKind::Allgather, &[], &[1.0]);
        assert!(matches!(engine.submit(scalar), Err(Error::Scalar { .. })));
        let short = CollectiveRequest { shape: vec![3], ..sum("t", &[1.0]) };
        let error = engine.submit(short).unwrap_err();
        assert_eq!(error.to_string(), "input of t must have 12 bytes: 4");
        assert!(matches!(engine.submit_group(Vec::new()), Err(Error::Group { members: 0, .. })));
        let twice = vec![sum("t", &[1.0]), sum("t", &[1.0])];
        assert!(matches!(engine.submit_group(twice), Err(Error::DuplicateName { .. })));
        assert!(matches!(
            engine.poll(RequestHandle(77)),
            Err(Error::UnknownHandle { handle: RequestHandle(77) })
        ));
        let handle = engine.submit(sum("t", &[1.0])).unwrap();
        wait(&engine, handle).unwrap();
        assert_eq!(engine.wait(handle, LIMIT).unwrap_err().fault(), FaultOrigin::Usage);
    });
}

#[test]
fn a_name_is_free_again_when_its_operation_has_completed() {
    Cluster::new(&[2]).run(|rank, engine| {
        if rank == 0 {
            let handle = engine.submit(sum("t", &[1.0])).unwrap();
            let error = engine.submit(sum("t", &[1.0])).unwrap_err();
            assert_eq!(
                error.to_string(),
                "a tensor of this name is still in flight in process set 0: t"
            );
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            assert_eq!(values(&engine, handle), [2.0]);
        } else {
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn callbacks_get_results_and_may_submit_again() {
    Cluster::new(&[2]).run(|_, engine| {
        let engine = std::sync::Arc::new(engine);
        let (sender, results) = channel();
        let inner = std::sync::Arc::downgrade(&engine);
        let done = move |result: Result<farandole_engine::RequestCompletion, Error>| {
            let engine = inner.upgrade().unwrap();
            let handle = engine.submit(sum("second", &[2.0])).unwrap();
            sender.send((result.unwrap(), handle)).unwrap();
        };
        engine
            .submit_group_with_callbacks(vec![sum("first", &[1.0])], vec![Box::new(done)])
            .unwrap();
        let (first, second) = results.recv_timeout(LIMIT).unwrap();
        assert_eq!(floats(&contents(&first.output.unwrap())), [2.0]);
        assert_eq!(values(&engine, second), [4.0]);
    });
}

#[test]
fn a_group_of_one_is_the_request_alone() {
    Cluster::new(&[2]).run(|rank, engine| {
        let request = sum("t", &[1.0]);
        let handle = match rank {
            0 => engine.submit(request).unwrap(),
            _ => engine.submit_group(vec![request]).unwrap()[0],
        };
        assert_eq!(values(&engine, handle), [2.0]);
    });
}

#[test]
fn a_driving_thread_gets_immediate_results_and_callbacks_get_the_others() {
    Cluster::new(&[2]).run(|rank, engine| {
        let error = engine
            .submit_and_drive_briefly(vec![sum("t", &[1.0]), sum("t", &[1.0])], Vec::new)
            .unwrap_err();
        assert!(matches!(error, Error::DuplicateName { .. }));
        assert!(engine.submit_and_drive_briefly(Vec::new(), Vec::new).is_err());
        // A lone request and groups, over and over: mostly the other rank is there in time, now and
        // then it cannot be.
        for round in 0..400 {
            let count = 1 + round % 3;
            let requests: Vec<CollectiveRequest> = (0..count)
                .map(|index| sum(&format!("{round}.{index}"), &[index as f32, rank as f32]))
                .collect();
            if round % 50 == 49 && rank == 1 {
                call(
                    &engine,
                    CollectiveRequest::barrier(format!("late {round}"), ProcessSetId::GLOBAL),
                )
                .unwrap();
            }
            let (sender, results) = channel();
            let callbacks = || {
                let callback = |index: usize| -> farandole_engine::CompletionCallback {
                    let sender = sender.clone();
                    Box::new(move |result| sender.send((index, result)).unwrap())
                };
                (0..count).map(callback).collect()
            };
            let helped = engine.submit_and_drive_briefly(requests, callbacks).unwrap();
            if round % 50 == 49 && rank == 0 {
                assert!(helped.is_none(), "the other rank waits for the barrier");
                call(
                    &engine,
                    CollectiveRequest::barrier(format!("late {round}"), ProcessSetId::GLOBAL),
                )
                .unwrap();
            }
            let mut all: Vec<_> = match helped {
                Some(results) => results.into_iter().enumerate().collect(),
                None => (0..count).map(|_| results.recv_timeout(LIMIT).unwrap()).collect(),
            };
            all.sort_by_key(|(index, _)| *index);
            assert_eq!(
                (all.len(), results.try_recv().ok().map(|(index, _)| index)),
                (count, None),
                "each once"
            );
            for (index, result) in all {
                assert_eq!(
                    floats(&contents(&result.unwrap().output.unwrap())),
                    [2.0 * index as f32, 1.0]
                );
            }
        }
    });
}
