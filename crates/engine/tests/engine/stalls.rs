// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use farandole_collectives::DeviceEvent;
use farandole_engine::{
    CollectiveRequest, EngineObserver, Error, ProcessSetChange, StackAnswer, StallReport,
    ThreadStacks,
};
use farandole_kernels::DeviceStream;
use farandole_world::{FaultOrigin, ProcessSetId, Rank};

use crate::cluster::{Cluster, LIMIT, call, call_sum, sum, values, wait};

struct Hears(Sender<StallReport>);

impl EngineObserver for Hears {
    fn on_stall(&self, report: &StallReport) {
        self.0.send(report.clone()).unwrap();
    }

    fn request_thread_stacks(&self, answer: StackAnswer) {
        answer.send_stacks("in f\n".to_owned());
    }
}

fn heard(hosts: &[u32]) -> (Cluster, Receiver<StallReport>) {
    let (sender, stalls) = channel();
    (Cluster { observer: Arc::new(Hears(sender)), ..Cluster::new(hosts) }, stalls)
}

#[test]
fn a_stall_is_reported_with_present_and_missing_ranks_and_may_still_end_well() {
    let (cluster, stalls) = heard(&[2, 2, 1]);
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(100)));
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        if rank == 3 {
            let report = stalls.lock().recv_timeout(LIMIT).unwrap();
            let [stall] = &*report.stalls else { panic!("{report:?}") };
            assert_eq!((&*stall.tensor, &*stall.missing), ("late", &[Rank(3)][..]));
            assert_eq!(stall.submitters, [Rank(0), Rank(1), Rank(2), Rank(4)]);
            assert!(!stall.fatal && stall.waiting >= Duration::from_millis(100));
        }
        let handle = engine.submit(sum("late", &[1.0])).unwrap();
        assert_eq!(values(&engine, handle), [5.0]);
    });
}

#[test]
fn the_coordinator_reports_also_what_it_did_not_submit_itself() {
    let (cluster, stalls) = heard(&[1, 2]);
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(50)));
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        if rank == 0 {
            let report = stalls.lock().recv_timeout(LIMIT).unwrap();
            assert_eq!(report.stalls[0].missing, [Rank(0)]);
            assert_eq!(report.absentees[0].waits.as_deref(), Some(&[][..]));
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [3.0]);
    });
}

#[test]
fn a_deadline_names_the_operation_the_tensor_and_the_ranks_that_did_not_come() {
    let cluster = Cluster::new(&[2, 2])
        .with(|settings| settings.collective_timeout = Duration::from_millis(600));
    cluster.run(|rank, engine| {
        if rank == 1 {
            // Hears of it at its next call.
            while engine.stop_cause().is_none() {
                std::thread::yield_now();
            }
            let error = engine.submit(sum("t", &[1.0])).unwrap_err();
            assert!(error.to_string().contains("ranks that did not come: 1"), "{error}");
            return;
        }
        let error = call(&engine, sum("t", &[1.0])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("allreduce of t timed out after "), "{text}");
        assert!(text.contains("the limit being 600ms: ranks that did not come: 1"), "{text}");
        assert_eq!(error.fault(), FaultOrigin::Peer);
    });
}

#[test]
fn a_stall_beyond_the_shutdown_time_stops_all_ranks() {
    let (cluster, stalls) = heard(&[2, 1]);
    let cluster = cluster.with(|settings| {
        settings.stall_check = Some(Duration::from_millis(50));
        settings.stall_shutdown = Some(Duration::from_millis(200));
    });
    cluster.run(|rank, engine| {
        let name = if rank == 2 { "other" } else { "t" };
        let error = call(&engine, sum(name, &[1.0])).unwrap_err();
        assert!(error.to_string().contains("timed out after "), "{error}");
    });
    assert!(stalls.iter().any(|report| report.is_fatal()));
}

#[test]
fn missing_ranks_report_the_operation_and_the_place_in_which_they_wait() {
    let (cluster, stalls) = heard(&[1, 2, 1]);
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(100)));
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        let mine = if rank == 2 { "his" } else { "theirs" };
        let first = engine.submit(sum(mine, &[1.0])).unwrap();
        if rank == 0 {
            let report = std::iter::repeat_with(|| stalls.lock().recv_timeout(LIMIT).unwrap());
            let has = |report: &StallReport, name| {
                report.stalls.iter().any(|stall| &*stall.tensor == name)
            };
            let report =
                report.take(9).find(|report| has(report, "his") && has(report, "theirs")).unwrap();
            let asked = report.absentees.iter().find(|asked| asked.rank == Rank(2)).unwrap();
            assert_eq!(&*asked.host, "host1");
            assert_eq!(asked.waits.as_ref().unwrap()[0].operation, "allreduce of his");
            assert_eq!(asked.stack, ThreadStacks::Text("in f\n".to_owned()));
            assert!(report.to_string().contains("\n2: [theirs"), "{report}");
        }
        call(&engine, CollectiveRequest::barrier("told", ProcessSetId::GLOBAL)).unwrap();
        let second = engine.submit(sum(if rank == 2 { "theirs" } else { "his" }, &[1.0])).unwrap();
        assert_eq!(values(&engine, first), [4.0]);
        assert_eq!(values(&engine, second), [4.0]);
    });
}

/// Rank 0 waits in a barrier, the others in a change of process sets.
fn one_of_two_meetings(rank: u32) -> CollectiveRequest {
    match rank {
        0 => CollectiveRequest::barrier("meet", ProcessSetId::GLOBAL),
        _ => CollectiveRequest::process_set_change("set", ProcessSetChange::Add(vec![Rank(0)])),
    }
}

#[test]
fn ranks_that_wait_in_different_meetings_get_a_report_and_may_still_meet() {
    for hosts in [&[2][..], &[1, 2], &[2, 2]] {
        let (cluster, stalls) = heard(hosts);
        let cluster = cluster.with(|settings| {
            settings.stall_check = Some(Duration::from_millis(100));
            settings.barrier_deadlock_timeout = Some(LIMIT);
        });
        let stalls = parking_lot::Mutex::new(stalls);
        cluster.run(|rank, engine| {
            let first = engine.submit(one_of_two_meetings(rank)).unwrap();
            if rank == 0 {
                let reports = std::iter::repeat_with(|| stalls.lock().recv_timeout(LIMIT).unwrap());
                let both = |report: &StallReport| {
                    report.deadlocked_for.is_some() && report.stalls.len() == 2
                };
                let report = reports.take(20).find(both).unwrap();
                let whats: Vec<&str> =
                    report.stalls.iter().map(|stall| &*stall.operation).collect();
                assert!(whats.contains(&"barrier of meet"), "{whats:?}");
                assert!(whats.contains(&"an addition of process set [0]"), "{whats:?}");
                assert!(
                    !report.is_fatal() && report.to_string().contains("have parted ways"),
                    "{report}"
                );
            }
            let other = one_of_two_meetings(u32::from(rank == 0));
            if rank == 0 {
                call(&engine, other).unwrap();
                wait(&engine, first).unwrap();
            } else {
                wait(&engine, first).unwrap();
                call(&engine, other).unwrap();
            }
        });
    }
}

#[test]
fn ranks_that_stay_in_different_meetings_all_get_the_meeting_of_each_rank() {
    for hosts in [&[3][..], &[1, 2], &[2, 1, 2]] {
        let cluster = Cluster::new(hosts).with(|settings| {
            settings.stall_check = Some(Duration::from_millis(50));
            settings.barrier_deadlock_timeout = Some(Duration::from_millis(300));
        });
        let last = hosts.iter().sum::<u32>() - 1;
        cluster.run(|rank, engine| {
            let error = call(&engine, one_of_two_meetings(rank)).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("have parted ways"), "{text}");
            assert!(text.contains("rank 0 in barrier of meet"), "{text}");
            assert!(
                text.contains(&format!("ranks 1-{last} in an addition of process set [0]")),
                "{text}"
            );
            assert_eq!(error.fault(), FaultOrigin::Usage);
        });
    }
}

#[test]
fn a_meeting_that_some_are_late_for_or_compute_before_is_no_parting_of_ways() {
    let (cluster, stalls) = heard(&[2]);
    let cluster = cluster.with(|settings| {
        settings.stall_check = Some(Duration::from_millis(50));
        settings.barrier_deadlock_timeout = Some(Duration::from_millis(100));
    });
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        let early = (rank == 1).then(|| engine.submit(sum("early", &[1.0])).unwrap());
        if rank == 1 {
            for report in (0..4).map(|_| stalls.lock().recv_timeout(LIMIT).unwrap()) {
                assert!(report.deadlocked_for.is_none(), "{report}");
            }
        }
        call(&engine, CollectiveRequest::barrier("meet", ProcessSetId::GLOBAL)).unwrap();
        let early = early.unwrap_or_else(|| engine.submit(sum("early", &[1.0])).unwrap());
        assert_eq!(values(&engine, early), [2.0]);
    });
}

#[test]
fn joined_ranks_wait_for_the_others_and_the_report_says_so() {
    for hosts in [&[2][..], &[1, 2]] {
        let (cluster, stalls) = heard(hosts);
        let cluster =
            cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(100)));
        let stalls = parking_lot::Mutex::new(stalls);
        cluster.run(|rank, engine| {
            if rank == 0 {
                let report = stalls.lock().recv_timeout(LIMIT).unwrap();
                let [stall] = &*report.stalls else { panic!("{report:?}") };
                assert_eq!((&*stall.operation, &*stall.missing), ("join", &[Rank(0)][..]));
                assert!(report.deadlocked_for.is_none(), "{report}");
                assert_eq!(call_sum(&engine, "meanwhile", &[1.0]), [1.0]);
                stalls.lock().try_iter().for_each(drop);
            }
            call(&engine, CollectiveRequest::join("join.noname", false)).unwrap();
            call(&engine, CollectiveRequest::barrier("over", ProcessSetId::GLOBAL)).unwrap();
        });
    }
}

/// Ready when the flag says so.
struct Gate(Arc<AtomicBool>);

impl DeviceEvent for Gate {
    fn is_ready(&self) -> farandole_collectives::Result<bool> {
        Ok(self.0.load(Ordering::Relaxed))
    }

    fn device_ordinal(&self) -> u32 {
        0
    }

    fn make_stream_wait(&self, _: DeviceStream) -> farandole_collectives::Result<()> {
        Ok(())
    }
}

#[test]
fn an_operation_that_all_have_submitted_is_no_stall_although_it_waits_long() {
    let (cluster, stalls) = heard(&[3]);
    let cluster = cluster.with(|settings| {
        settings.stall_check = Some(Duration::from_millis(50));
        settings.stall_shutdown = Some(Duration::from_millis(300));
    });
    let (stalls, open) = (parking_lot::Mutex::new(stalls), Arc::new(AtomicBool::new(false)));
    cluster.run(|rank, engine| {
        call(&engine, CollectiveRequest::barrier("all are here", ProcessSetId::GLOBAL)).unwrap();
        let ready: Option<Arc<dyn DeviceEvent>> = Some(Arc::new(Gate(Arc::clone(&open))));
        let slow = engine.submit(CollectiveRequest { ready, ..sum("slow", &[1.0]) }).unwrap();
        let end = Instant::now() + LIMIT;
        while engine.statistics().lists < 2 {
            assert!(Instant::now() < end, "it is not executed");
            std::thread::yield_now();
        }
        let next = engine.submit(sum("next", &[1.0])).unwrap();
        if rank == 0 {
            // A rank may be late by a moment at first; what is reported after that is wrong.
            std::thread::sleep(Duration::from_millis(200));
            stalls.lock().try_iter().for_each(drop);
            let report = stalls.lock().recv_timeout(Duration::from_secs(2));
            assert!(report.is_err(), "{report:?}");
            open.store(true, Ordering::Relaxed);
        }
        assert_eq!(values(&engine, slow), [3.0]);
        assert_eq!(values(&engine, next), [3.0]);
    });
}

#[test]
fn the_rest_of_a_refused_group_is_not_waited_for_any_more() {
    let (cluster, stalls) = heard(&[2]);
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(50)));
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        if rank == 1 {
            let report = stalls.lock().recv_timeout(LIMIT).unwrap();
            assert_eq!(report.stalls.len(), 2, "{report:?}");
        }
        let first = vec![1.0; 1 + rank as usize];
        for handle in engine.submit_group(vec![sum("first", &first), sum("rest", &[1.0])]).unwrap()
        {
            assert!(matches!(wait(&engine, handle), Err(Error::Mismatch { .. })));
        }
        call(&engine, CollectiveRequest::barrier("told", ProcessSetId::GLOBAL)).unwrap();
        if rank == 1 {
            let stalls = stalls.lock();
            stalls.try_iter().for_each(drop);
            std::thread::sleep(Duration::from_millis(700));
            let mut named = stalls.try_iter().flat_map(|report| report.stalls);
            assert!(!named.any(|stall| &*stall.tensor == "rest"));
        }
        call(&engine, CollectiveRequest::barrier("over", ProcessSetId::GLOBAL)).unwrap();
    });
}

#[test]
fn a_rank_without_an_answer_does_not_delay_the_report() {
    struct Mute(Sender<StallReport>);
    impl EngineObserver for Mute {
        fn on_stall(&self, report: &StallReport) {
            self.0.send(report.clone()).unwrap();
        }
    }
    let (sender, stalls) = channel();
    let cluster = Cluster { observer: Arc::new(Mute(sender)), ..Cluster::new(&[2]) };
    let cluster = cluster.with(|settings| settings.stall_check = Some(Duration::from_millis(50)));
    let stalls = parking_lot::Mutex::new(stalls);
    cluster.run(|rank, engine| {
        if rank == 1 {
            let report = stalls.lock().recv_timeout(LIMIT).unwrap();
            assert_eq!(report.absentees[0].stack, ThreadStacks::Unknown);
        }
        assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
    });
}

#[test]
fn a_wait_that_times_out_leaves_the_handle_valid() {
    Cluster::new(&[2]).run(|rank, engine| {
        if rank == 1 {
            call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
            assert_eq!(call_sum(&engine, "t", &[1.0]), [2.0]);
            return;
        }
        let handle = engine.submit_before_wait(sum("t", &[1.0])).unwrap();
        for _ in 0..3 {
            assert!(engine.wait(handle, Duration::from_millis(5)).unwrap().is_none());
        }
        call(&engine, CollectiveRequest::barrier("b", ProcessSetId::GLOBAL)).unwrap();
        assert!(wait(&engine, handle).is_ok());
    });
}
