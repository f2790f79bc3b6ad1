// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole worlds in one thread: wide trees, every interleaving of polls, messages counted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use farandole_collectives::{CollectiveOperation, Communicator, OperationToken};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_negotiation::{MemorySite, control_peers};
use farandole_testkit::counted;
use farandole_transport::{Link, LinkKind, loopback};
use farandole_world::{
    Generation, HostHash, ProcessSetId, Rank, TaskId, TaskPlacement, World, assign_ranks,
};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::{AutotuneOptions, EngineSettings, RequestHandle, RequestKind, SilentObserver};

/// Returns the signature of an allreduce in host memory.
pub(super) fn plain(shape: &[u64]) -> RequestSignature {
    let one = 1f64.to_bits();
    let call = CollectiveCall::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one };
    let (dtype, site) = (DataType::F32, MemorySite::Host);
    RequestSignature { call, dtype, shape: shape.to_vec(), site, group: 0, group_size: 0 }
}

/// Returns an allreduce as the submission table holds it.
pub(crate) fn allreduce_request(
    name: &Arc<str>,
    input: &HostMemory,
    since: Instant,
) -> (PendingEntry, RequestSignature) {
    let entry = PendingEntry {
        handle: RequestHandle(1),
        name: Arc::clone(name),
        operation: RequestKind::Barrier.operation_name(),
        change_text: None,
        group: 0,
        rows: Vec::new(),
        input: input.as_buffer(),
        output: None,
        ready: None,
        priority: 0,
        since,
        missing: None,
    };
    (entry, plain(&[1]))
}

/// Returns a world with this many ranks on each host.
fn world(hosts: &[u32]) -> World {
    let hosts_of_ranks =
        hosts.iter().enumerate().flat_map(|(host, ranks)| (0..*ranks).map(move |_| host));
    let places: Vec<TaskPlacement> = (0..)
        .map(TaskId)
        .zip(hosts_of_ranks)
        .map(|(task, host)| TaskPlacement { task, host: HostHash(format!("host{host}")) })
        .collect();
    assign_ranks(Generation(0), &places).unwrap()
}

/// Operations by number: what was submitted, and by how many. Moves no data.
#[derive(Default)]
struct Log(Vec<(String, usize)>);

/// Completes an operation when all members submitted it, and insists that they submit the same ones
/// (EN-2).
struct Meeting {
    member: usize,
    size: usize,
    log: Arc<Mutex<Log>>,
    flying: VecDeque<(OperationToken, usize)>,
    submitted: usize,
}

impl Communicator for Meeting {
    fn member_count(&self) -> usize {
        self.size
    }

    fn member_index(&self) -> usize {
        self.member
    }

    fn submit_operation(
        &mut self,
        token: OperationToken,
        operation: CollectiveOperation,
    ) -> farandole_collectives::Result<()> {
        let text = match &operation {
            CollectiveOperation::Allreduce { segments, .. }
            | CollectiveOperation::Broadcast { segments, .. } => segments
                .iter()
                .map(|segment| segment.input.len().to_string())
                .collect::<Vec<_>>()
                .join("+"),
            CollectiveOperation::Allgather { bytes, .. } => format!("{bytes:?}"),
            CollectiveOperation::Alltoall { sends, .. } => format!("alltoall of {}", sends.len()),
            CollectiveOperation::Reducescatter { bytes, .. } => format!("reducescatter {bytes:?}"),
            CollectiveOperation::Barrier => "barrier".to_owned(),
        };
        let mut log = self.log.lock();
        if log.0.len() == self.submitted {
            log.0.push((text.clone(), 0));
        }
        let (first, count) = &mut log.0[self.submitted];
        assert_eq!(*first, text, "member {} executes something else", self.member);
        *count += 1;
        self.flying.push_back((token, self.submitted));
        self.submitted += 1;
        Ok(())
    }

    fn make_progress(
        &mut self,
        completed: &mut Vec<OperationToken>,
    ) -> farandole_collectives::Result<bool> {
        let log = self.log.lock();
        let before = completed.len();
        while let Some((token, number)) = self.flying.front() {
            if log.0[*number].1 < self.size {
                break;
            }
            completed.push(*token);
            self.flying.pop_front();
        }
        Ok(completed.len() > before)
    }

    fn pending_count(&self) -> usize {
        self.flying.len()
    }
}

struct Simulation {
    sets: Vec<ProcessSet>,
    log: Arc<Mutex<Log>>,
    finished: Vec<Vec<FinishedRequest>>,
    /// Bytes that went over control links.
    sent: Arc<AtomicUsize>,
    now: Instant,
}

impl Simulation {
    fn new(hosts: &[u32], settings: EngineSettings) -> Self {
        Self::of(&world(hosts), LinkKind::Loopback, settings)
    }

    fn of(world: &World, kind: LinkKind, settings: EngineSettings) -> Self {
        let size = world.size();
        let members: Vec<Rank> = (0..).map(Rank).take(size).collect();
        let log = Arc::new(Mutex::new(Log::default()));
        let sent = Arc::new(AtomicUsize::new(0));
        let mut links: Vec<Vec<Link>> = (0..size).map(|_| Vec::new()).collect();
        for rank in &members {
            let seen = world.seen_from(*rank).unwrap();
            for peer in control_peers(&seen, &members).into_iter().filter(|peer| peer > rank) {
                let (low, high) = loopback::link_pair(*rank, peer, 1 << 16).unwrap();
                for (end, link) in [(rank, low), (&peer, high)] {
                    links[end.index()].push(Link { kind, ..counted(link, &sent) });
                }
            }
        }
        let settings = Arc::new(settings);
        let set = |(member, control): (usize, Vec<Link>)| {
            let meeting = Meeting {
                member,
                size,
                log: Arc::clone(&log),
                flying: VecDeque::new(),
                submitted: 0,
            };
            let options = ProcessSetOptions {
                id: ProcessSetId::GLOBAL,
                members: members.clone(),
                control,
                communicator: Box::new(meeting),
            };
            let shared = ProcessSetContext {
                world: Arc::new(world.seen_from(members[member]).unwrap()),
                settings: Arc::clone(&settings),
                devices: Arc::default(),
                observer: Arc::new(SilentObserver),
                tracer: Arc::new(crate::timeline::OperationTracer::new(false)),
            };
            ProcessSet::new(0, options, shared).unwrap()
        };
        let sets = links.into_iter().enumerate().map(set).collect();
        let finished = (0..size).map(|_| Vec::new()).collect();
        Self { sets, log, finished, sent, now: Instant::now() }
    }

    fn submit(&mut self, rank: usize, name: &str, signature: RequestSignature, rows: u64) {
        let rows =
            if signature.call == CollectiveCall::Allgather { vec![rows] } else { Vec::new() };
        self.submit_rows(rank, name, signature, rows);
    }

    /// Like `submit`, with the rows of an alltoall.
    fn submit_rows(
        &mut self,
        rank: usize,
        name: &str,
        signature: RequestSignature,
        rows: Vec<u64>,
    ) {
        let count = if signature.call.has_variable_rows() { rows.iter().sum() } else { 1 };
        let bytes = signature.row_or_tensor_bytes() * count;
        let input = HostMemory::new(usize::try_from(bytes).unwrap());
        let (entry, _) = allreduce_request(&name.into(), &input, self.now);
        let entry = PendingEntry { group: signature.group, rows, ..entry };
        self.sets[rank].enqueue_entry(entry, signature, &mut self.finished[rank]).unwrap();
    }

    fn poll(&mut self, rank: usize) -> bool {
        self.sets[rank].poll(self.now, &mut self.finished[rank]).unwrap()
    }

    /// Polls all members until nothing moves.
    fn settle(&mut self) {
        while (0..self.sets.len()).fold(false, |moved, rank| self.poll(rank) | moved) {}
    }

    fn frames(&self) -> Vec<u64> {
        self.sets
            .iter()
            .map(ProcessSet::statistics)
            .map(|statistics| statistics.frames_sent + statistics.frames_received)
            .collect()
    }

    fn take(&mut self) -> Vec<Vec<FinishedRequest>> {
        self.finished.iter_mut().map(std::mem::take).collect()
    }
}

fn settings(capacity: usize) -> EngineSettings {
    EngineSettings {
        collective_timeout: std::time::Duration::from_secs(60),
        fusion_threshold: 1 << 20,
        group_fusion: true,
        cache_capacity: capacity,
        loss_report_allowance: std::time::Duration::from_millis(500),
        spin: std::time::Duration::ZERO,
        stall_check: None,
        stall_shutdown: None,
        barrier_deadlock_timeout: None,
        nvtx: false,
        timeline_limit: 0,
        tune: None,
    }
}

#[test]
fn sixteen_hosts_of_four_agree_with_few_messages_at_the_coordinator() {
    let mut world = Simulation::new(&[4; 16], settings(64));
    for round in 0..3 {
        let before = world.frames();
        for rank in 0..64 {
            for name in 0..10 {
                world.submit(rank, &format!("t{name}"), plain(&[name]), 0);
            }
        }
        world.settle();
        assert!(
            world
                .take()
                .iter()
                .all(|finished| finished.len() == 10 && finished.iter().all(|f| f.result.is_ok()))
        );
        let frames: Vec<u64> =
            world.frames().iter().zip(before).map(|(now, before)| now - before).collect();
        // Three local ranks and four hosts: a message up and a list down for each child, for ten
        // tensors at once.
        assert_eq!(frames[0], 2 * (3 + 4), "round {round}");
        assert!(frames.iter().all(|frames| *frames <= 14), "{frames:?}");
        assert_eq!(frames[63], 2);
    }
    assert_eq!(world.sets[5].statistics().cache_hits, 20);
    assert_eq!(world.log.lock().0.len(), 3, "ten tensors are one operation");
}

#[test]
fn messages_per_rank_grow_with_the_logarithm_of_the_hosts_up_to_512_ranks() {
    for hosts in [1, 8, 64] {
        let mut world = Simulation::new(&vec![8; hosts], settings(64));
        (0..8 * hosts).for_each(|rank| world.submit(rank, "t", plain(&[1]), 0));
        world.settle();
        assert!(world.take().iter().all(|finished| finished.len() == 1));
        // One up and one down for every other rank of the host, and for every child host.
        let expected = 2 * u64::from(7 + hosts.ilog2());
        let frames = world.frames();
        assert_eq!((frames[0], frames.iter().max()), (expected, Some(&expected)), "{hosts} hosts");
        assert_eq!(frames.iter().sum::<u64>(), 4 * (8 * hosts as u64 - 1));
    }
}

/// Each rank needs what it sends and what it receives: `2 P` numbers of the `P * P`.
#[test]
fn alltoalls_with_changing_splits_tell_no_rank_what_others_exchange() {
    let mut world = Simulation::new(&[8; 8], settings(64));
    let ranks = world.sets.len() as u64;
    let call = CollectiveCall::Alltoall { members: 64 };
    for round in 0..4 {
        let before = world.sent.load(Ordering::Relaxed);
        // The splits of the first two rounds are the same.
        let splits = |rank: u64| (0..ranks).map(|to| (rank + to + round.max(1)) % 300).collect();
        for rank in 0..64 {
            let signature = RequestSignature { call, ..plain(&[0, 1]) };
            world.submit_rows(rank, "t", signature, splits(rank as u64));
        }
        world.settle();
        assert!(
            world.take().iter().all(|finished| finished.len() == 1 && finished[0].result.is_ok())
        );
        let bytes = (world.sent.load(Ordering::Relaxed) - before) as u64 / ranks;
        assert!(
            bytes < 2 * ranks,
            "{bytes} bytes of control frames for each rank in round {round}"
        );
        let exchanges = world.log.lock().0.len();
        assert_eq!(exchanges, [2, 3, 5, 7][usize::try_from(round).unwrap()], "in round {round}");
    }
    assert_eq!(world.sets[9].statistics().cache_hits, 1);
}

#[test]
fn a_rank_that_lags_behind_many_evictions_is_still_understood() {
    // Rank 3 announced by number before the entry fell out everywhere else.
    let mut world = Simulation::new(&[2, 2], settings(2));
    for rank in 0..4 {
        world.submit(rank, "old", plain(&[1]), 0);
    }
    world.settle();
    world.submit(3, "old", plain(&[1]), 0);
    for name in 0..5 {
        for rank in 0..4 {
            world.submit(rank, &format!("new{name}"), plain(&[1]), 0);
        }
        world.settle();
    }
    (0..3).for_each(|rank| world.submit(rank, "old", plain(&[1]), 0));
    world.settle();
    assert!(world.take().iter().all(|finished| finished.len() == 7));
}

#[test]
fn a_forbidden_message_of_a_peer_stops_the_set_and_names_its_rank() {
    let mut world = Simulation::new(&[2], settings(2));
    world.sets[1].links.send_frame(0, frame_kinds::TENSOR_ANNOUNCEMENT, &[0, 0, 99, 0]).unwrap();
    let error = world.sets[0].poll(world.now, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "bad control message from rank 1: an unknown cache entry: 99");
    world.sets[0].links.send_frame(0, frame_kinds::RESPONSE_LIST, &[9]).unwrap();
    let error = world.sets[1].poll(world.now, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "bad control message from rank 0: a list out of order: 9");
}

#[test]
fn only_the_coordinator_of_all_ranks_writes_the_log_of_autotune() {
    let path = std::env::temp_dir().join(format!("farandole-tunes-{}.csv", std::process::id()));
    let log = path.to_str().unwrap().to_owned();
    let tune = AutotuneOptions { warmup_samples: 0, steps_per_score: 1, max_samples: 1, log };
    let world = Simulation::new(&[2], EngineSettings { tune: Some(tune), ..settings(64) });
    std::fs::remove_file(&path).unwrap();
    drop(coordinator_decisions::SetCoordinator::new(&world.sets[1].scope));
    assert!(!path.exists(), "another rank's log would be overwritten");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// EN-1, EN-2, EN-4: whatever the order of submissions and polls.
    #[test]
    fn every_interleaving_completes_everything_in_one_order(
        hosts in prop::collection::vec(1u32..4, 1..5),
        capacity in 0usize..5,
        seed: u64,
    ) {
        let mut world = Simulation::new(&hosts, settings(capacity));
        let size = world.sets.len();
        let mut state = seed | 1;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % below
        };
        for round in 0..4u64 {
            // What every rank still has to submit, in an order of its own.
            let mut left: Vec<Vec<u64>> = (0..size).map(|_| (0..6).collect()).collect();
            while left.iter().any(|left| !left.is_empty()) {
                let rank = random(size);
                if random(2) == 0 && !left[rank].is_empty() {
                    let name = left[rank].len();
                    let name = left[rank].swap_remove(random(name));
                    let signature = match name {
                        5 => RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0]) },
                        4 => plain(&[round]),
                        // One rank differs in the third round.
                        3 => plain(&[if round == 2 && rank == 0 { 7 } else { 1 }]),
                        _ => plain(&[name]),
                    };
                    world.submit(rank, &format!("t{name}"), signature, round * 3 % 5 + rank as u64);
                } else {
                    world.poll(rank);
                }
            }
            world.settle();
            for finished in world.take() {
                prop_assert_eq!(finished.len(), 6);
                for FinishedRequest { name, result, .. } in finished {
                    let refused = round == 2 && &*name == "t3" && size > 1;
                    prop_assert_eq!(result.is_err(), refused, "{} in round {}", name, round);
                }
            }
            prop_assert!(world.sets.iter().all(|set| !set.is_busy() && set.negotiation.pending.is_empty()));
        }
    }

    /// EN-2, EN-4: ranks that run out of work join, in the middle of everything, twice.
    #[test]
    fn ranks_that_join_keep_no_rank_waiting(
        hosts in prop::collection::vec(1u32..4, 1..5),
        capacity in 0usize..5,
        seed: u64,
    ) {
        let mut world = Simulation::new(&hosts, settings(capacity));
        let size = world.sets.len();
        let mut state = seed | 1;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % below
        };
        for _ in 0..3 {
            let work: Vec<u64> = (0..size).map(|_| random(7) as u64).collect();
            let mut left: Vec<Vec<u64>> = work.iter().map(|work| (0..*work).collect()).collect();
            let mut joined = vec![false; size];
            while joined.contains(&false) {
                let rank = random(size);
                if random(2) == 0 || joined[rank] {
                    world.poll(rank);
                } else if left[rank].is_empty() {
                    let call = CollectiveCall::Join { gather: true };
                    world.submit(rank, "join", RequestSignature { call, ..plain(&[0]) }, 0);
                    joined[rank] = true;
                } else {
                    let at = random(left[rank].len());
                    let name = left[rank].swap_remove(at);
                    let signature = match name {
                        5 => RequestSignature { call: CollectiveCall::Allgather, ..plain(&[0]) },
                        _ => plain(&[usize::try_from(name).unwrap() as u64]),
                    };
                    world.submit(rank, &format!("t{name}"), signature, 1 + rank as u64);
                }
            }
            world.settle();
            let mut lasts = Vec::new();
            for (finished, work) in world.take().into_iter().zip(work) {
                prop_assert_eq!(finished.len() as u64, work + 1);
                for FinishedRequest { name, result, .. } in finished {
                    let last = result.unwrap().last;
                    prop_assert_eq!(last.is_some(), &*name == "join");
                    lasts.extend(last);
                }
            }
            prop_assert!(lasts.windows(2).all(|pair| pair[0] == pair[1]));
            prop_assert!(world.sets.iter().all(|set| !set.is_busy() && set.negotiation.pending.is_empty() && !set.negotiation.joins.has_joined_members()));
        }
    }
}

#[test]
fn a_rank_that_hears_only_that_a_link_ended_waits_for_the_reason_for_so_long_and_no_longer() {
    let hearsay = std::time::Duration::from_millis(200);
    let mut world =
        Simulation::new(&[1, 1], EngineSettings { loss_report_allowance: hearsay, ..settings(64) });
    world.submit(1, "t", plain(&[1]), 0);
    world.settle();
    // Rank 0 is gone without a word.
    drop(world.sets.remove(0));
    let mut finished = Vec::new();
    let mut look = |now: Instant| world.sets[0].poll(now, &mut finished);
    assert!(look(world.now).is_ok());
    assert!(look(world.now + hearsay / 2).is_ok());
    let cause = look(world.now + hearsay).unwrap_err();
    assert!(cause.to_string().contains("rank 0"), "{cause}");
}

#[test]
fn the_loss_of_a_rank_is_judged_at_once_where_its_last_words_lie_in_shared_memory() {
    for (container, kind, near) in [
        ("m", LinkKind::SharedMemory, true),
        ("m/1", LinkKind::SharedMemory, true),
        ("m/1", LinkKind::Tcp, false),
        ("m", LinkKind::Tcp, false),
        ("n", LinkKind::Tcp, false),
    ] {
        let places = [(0, "m"), (1, container)].map(|(task, host)| TaskPlacement {
            task: TaskId(task),
            host: HostHash(host.to_owned()),
        });
        for (rank, other) in [(0, 1), (1, 0)] {
            let mut world =
                Simulation::of(&assign_ranks(Generation(1), &places).unwrap(), kind, settings(64));
            world.submit(rank, "t", plain(&[1]), 0);
            let lost = farandole_transport::Error::PeerLost {
                rank: Rank(other),
                host: container.to_owned(),
                reason: "its process ended".to_owned(),
            };
            world.sets[rank].suspect_peer(lost, world.now);
            let mut finished = Vec::new();
            let outcome = world.sets[rank].poll(world.now, &mut finished);
            assert_eq!(outcome.is_err(), near, "rank {rank} on {container}, {kind:?}");
            let late = world.now + std::time::Duration::from_millis(25);
            assert!(near || world.sets[rank].poll(late, &mut finished).is_err());
        }
    }
}
