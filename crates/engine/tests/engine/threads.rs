// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use farandole_engine::CollectiveRequest;
use farandole_testkit::run_in_own_process;
use farandole_world::ProcessSetId;

use crate::cluster::{Cluster, LIMIT, call, call_sum, sum, values};

#[test]
fn several_threads_of_a_rank_wait_at_once() {
    for real in [false, true] {
        Cluster { real, ..Cluster::new(&[2]) }.run(|_, engine| {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let engine = &engine;
                    scope.spawn(move || {
                        for k in 0..200 {
                            assert_eq!(
                                call_sum(engine, &format!("{thread}.{}", k % 5), &[k as f32]),
                                [2.0 * k as f32]
                            );
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn threads_wait_for_each_others_handles_in_any_order() {
    Cluster::new(&[2]).run(|_, engine| {
        for round in 0..50 {
            let handles: Vec<_> = (0..8)
                .map(|k| engine.submit(sum(&format!("t{k}"), &[(k + round) as f32])).unwrap())
                .collect();
            std::thread::scope(|scope| {
                for (k, handle) in handles.into_iter().enumerate() {
                    let engine = &engine;
                    scope.spawn(move || {
                        assert_eq!(values(engine, handle), [2.0 * (k as i32 + round) as f32])
                    });
                }
            });
        }
    });
}

#[test]
fn asynchronous_operations_complete_without_a_waiter() {
    for real in [false, true] {
        Cluster { real, ..Cluster::new(&[2]) }.run(|_, engine| {
            for round in 0..50 {
                let (sender, done) = channel();
                for k in 0..10 {
                    let sender = sender.clone();
                    let done = move |result: farandole_engine::Result<_>| {
                        sender.send(result.is_ok()).unwrap()
                    };
                    engine
                        .submit_group_with_callbacks(
                            vec![sum(&format!("{round}.{k}"), &[1.0; 300])],
                            vec![Box::new(done)],
                        )
                        .unwrap();
                }
                assert!((0..10).all(|_| done.recv_timeout(LIMIT).unwrap()));
            }
        });
    }
}

#[test]
fn an_attended_request_is_taken_up_even_if_its_caller_forgets_it() {
    Cluster { real: true, ..Cluster::new(&[2]) }.run(|rank, engine| {
        if rank == 0 {
            let handle = engine.submit_before_wait(sum("t", &[1.0])).unwrap();
            // Rank 1 completes it together with the background thread.
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            assert_eq!(values(&engine, handle), [2.0]);
        } else {
            assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
        }
    });
}

#[test]
fn operations_after_a_long_pause_work_at_once() {
    // By then the background thread sleeps on behalf of peers, holding the progress lock.
    Cluster { real: true, ..Cluster::new(&[2]) }.run(|_, engine| {
        for _ in 0..3 {
            call_sum(&engine, "t", &[1.0]);
            let (_keep, never) = channel::<()>();
            never.recv_timeout(Duration::from_millis(700)).unwrap_err();
            let start = Instant::now();
            call_sum(&engine, "t", &[1.0]);
            assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
        }
    });
}

/// CPU time of this process's threads with this name.
fn cpu(name: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let named = tasks.filter(|task| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| name.starts_with(comm.trim()))
    });
    let spent = named.filter_map(|task| {
        let schedstat = std::fs::read_to_string(task.join("schedstat")).ok()?;
        schedstat.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(spent.sum())
}

/// EN-7. Runs alone: `cargo test -- --ignored`, or in a process of its own as below.
#[test]
#[ignore = "measures threads of the whole process; started by the next test"]
fn idle_child() {
    Cluster { real: true, ..Cluster::new(&[2]) }.run(|rank, engine| {
        for k in 0..10 {
            call_sum(&engine, &format!("t{k}"), &[1.0]);
        }
        call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
        let before = cpu("farandole-progress");
        let (_keep, never) = channel::<()>();
        never.recv_timeout(Duration::from_secs(2)).unwrap_err();
        let spent = cpu("farandole-progress") - before;
        assert!(
            spent < Duration::from_millis(8),
            "two idle background threads took {spent:?} in 2 s"
        );
        if rank == 0 {
            println!("two idle background threads took {spent:?} in 2 s");
        }
        call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
    });
}

#[test]
fn an_idle_engine_uses_no_cpu() {
    run_in_own_process("threads::idle_child");
}
