// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use farandole_engine::{CollectiveRequest, EngineObserver, Error, StallReport, StopCause};
use farandole_testkit::cut_after;
use farandole_world::{FaultOrigin, ProcessSetId, Rank};

use crate::cluster::{Cluster, LIMIT, call, call_sum, sum, wait};

#[test]
fn a_shutdown_with_nothing_pending_is_quiet_everywhere() {
    for real in [false, true] {
        let cluster = Cluster { real, ..Cluster::new(&[2, 2]) };
        for _ in 0..10 {
            cluster.run(|_, engine| {
                for k in 0..5 {
                    assert_eq!(call_sum(&engine, &format!("t{k}"), &[1.0]), [4.0]);
                }
                engine.shutdown();
                assert!(matches!(*engine.stop_cause().unwrap(), StopCause::ShutDown));
            });
        }
    }
}

#[test]
fn an_operation_of_all_ranks_completes_although_some_leave_right_after() {
    for real in [false, true] {
        let cluster = Cluster { real, ..Cluster::new(&[2, 1]) };
        for last in 0..20 {
            cluster.run(|rank, engine| {
                let length = 1 + 1000 * last;
                assert_eq!(call_sum(&engine, "t", &vec![1.0; length]), vec![3.0; length]);
                if rank == last as u32 % 3 {
                    drop(engine);
                }
            });
        }
    }
}

#[test]
fn a_wait_for_a_rank_that_shuts_down_fails_with_its_name_and_the_tensor() {
    let submitted = Barrier::new(4);
    Cluster::new(&[2, 2]).run(|rank, engine| {
        if rank == 2 {
            submitted.wait();
            return;
        }
        let handle = engine.submit(sum("weights", &[1.0])).unwrap();
        submitted.wait();
        let error = wait(&engine, handle).unwrap_err();
        assert_eq!(error.to_string(), "allreduce of weights failed: rank 2 on host1 shut down");
        assert_eq!(error.fault(), FaultOrigin::Membership);
        let again = engine.submit(sum("weights", &[1.0])).unwrap_err();
        assert_eq!(again.to_string(), "the engine has stopped: rank 2 on host1 shut down");
    });
}

#[test]
fn a_shutdown_fails_what_is_pending_here_and_at_the_peers() {
    Cluster::new(&[2]).run(|rank, engine| {
        let handle = engine.submit(sum(if rank == 0 { "a" } else { "b" }, &[1.0])).unwrap();
        if rank == 0 {
            engine.shutdown();
        }
        let error = wait(&engine, handle).unwrap_err();
        let reason =
            ["the engine was shut down on this rank", "rank 0 on host0 shut down"][rank as usize];
        assert!(error.to_string().ends_with(reason), "{error}");
    });
}

#[test]
fn submissions_after_the_own_shutdown_are_refused() {
    Cluster::new(&[1]).run(|_, engine| {
        engine.shutdown();
        engine.shutdown();
        let error = engine.submit(sum("t", &[1.0])).unwrap_err();
        assert_eq!(error.fault(), FaultOrigin::Usage);
        assert!(matches!(error, Error::Stopped { .. }));
    });
}

#[test]
fn a_shutdown_interrupts_threads_that_wait() {
    Cluster::new(&[2]).run(|rank, engine| {
        if rank == 1 {
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            return;
        }
        let handle = engine.submit_before_wait(sum("t", &[1.0])).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| wait(&engine, handle).unwrap_err());
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            engine.shutdown();
            drop(waiter.join().unwrap());
        });
    });
}

#[test]
fn a_cut_link_fails_all_ranks_naming_a_rank_the_operation_and_the_tensor() {
    // EN-6. The data link from rank 1 to rank 2 breaks: rank 0 hears of it.
    let cut = |rank, link: farandole_transport::Link| match (rank, link.peer) {
        (Rank(1), Rank(2)) => cut_after(link, 10_000),
        _ => link,
    };
    let cluster = Cluster { cut, ..Cluster::new(&[2, 1]) };
    let start = Instant::now();
    cluster.run(|_, engine| {
        let error = (0..1000)
            .find_map(|k| call(&engine, sum(&format!("t{k}"), &[1.0; 100])).err())
            .unwrap();
        let text = error.to_string();
        assert!(text.contains("lost rank 1") || text.contains("lost rank 2"), "{text}");
        assert!(text.starts_with("allreduce of t"), "{text}");
        assert_eq!(error.fault(), FaultOrigin::Peer);
        let later = engine.submit(sum("later", &[1.0])).unwrap_err();
        assert!(later.to_string().starts_with("the engine has stopped: "), "{later}");
    });
    assert!(start.elapsed() < LIMIT / 4);
}

#[test]
fn a_rank_that_vanishes_while_others_wait_is_named() {
    // The engine of rank 1 goes without a word: its links close, no farewell is read.
    let gone = Barrier::new(2);
    let cut = |rank, link: farandole_transport::Link| match (rank, link.peer) {
        (Rank(0), Rank(1)) => cut_after(link, 1),
        _ => link,
    };
    Cluster { cut, ..Cluster::new(&[2]) }.run(|_, engine| {
        let error = call(&engine, sum("t", &[1.0])).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error}");
        gone.wait();
    });
}

/// A listener to stalls that panics.
struct Panics;

impl EngineObserver for Panics {
    fn on_stall(&self, _: &StallReport) {
        panic!("this is part of a test");
    }
}

#[test]
fn a_panic_of_the_engines_own_thread_ends_operations_without_waiters_on_all_ranks() {
    let cluster = Cluster { observer: Arc::new(Panics), ..Cluster::new(&[2]) };
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(50)));
    cluster.run(|rank, engine| {
        let end = Instant::now() + LIMIT;
        if rank == 1 {
            while engine.stop_cause().is_none() {
                assert!(Instant::now() < end, "nobody told this rank");
                std::thread::yield_now();
            }
            return;
        }
        let handle = engine.submit(sum("t", &[1.0])).unwrap();
        while !engine.poll(handle).unwrap() {
            assert!(Instant::now() < end, "nobody ends it");
            std::thread::yield_now();
        }
        let error = engine.wait(handle, LIMIT).unwrap_err();
        assert!(
            error.to_string().contains("the engine panicked (see stderr for the location)"),
            "{error}"
        );
        assert_eq!(error.fault(), FaultOrigin::Bug);
    });
}
