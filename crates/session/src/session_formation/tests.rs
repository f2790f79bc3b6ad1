// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole worlds in one process: a registrar, and for each rank a thread with its client, mesh and
//! engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;

use farandole_engine::{CollectiveRequest, RequestKind};
use farandole_kernels::{DataType, ReduceOp};
use farandole_registrar::{Registrar, RegistrarOptions};
use farandole_testkit::{contents, filled};
use farandole_world::{HostFacts, ProcessSetId, Rank, TaskId};

use super::linked_session::join_mesh;
use super::*;
use crate::Error;
use crate::registrar_rendezvous::RegistrarRendezvous;

const LIMIT: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap()
}

fn registrar(tasks: u32) -> Registrar {
    let host = Some("127.0.0.1".to_owned());
    Registrar::start_job(RegistrarOptions {
        host,
        ..RegistrarOptions::from_config(tasks, &config())
    })
    .unwrap()
}

/// Runs `body` on one thread per task, each registered on the host that `place` gives it.
fn world<T: Send>(
    tasks: u32,
    place: impl Fn(u32) -> String + Sync,
    body: impl Fn(TaskClient, Instant) -> T + Sync,
) -> Vec<T> {
    with(&registrar(tasks), tasks, place, body)
}

/// As [`world`], of tasks that register at this registrar.
fn with<T: Send>(
    registrar: &Registrar,
    tasks: u32,
    place: impl Fn(u32) -> String + Sync,
    body: impl Fn(TaskClient, Instant) -> T + Sync,
) -> Vec<T> {
    let deadline = Instant::now() + LIMIT;
    thread::scope(|scope| {
        let (place, body, ticket) = (&place, &body, registrar.ticket());
        let run = move |task| {
            let client = TaskClient::connect(ticket, TaskId(task), None, deadline).unwrap();
            let facts = HostFacts { hostname: place(task), ..local_host_facts::host_facts() };
            client.register_task(0, &facts, deadline).unwrap();
            body(client, deadline)
        };
        let threads: Vec<_> = (0..tasks).map(|task| scope.spawn(move || run(task))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn sum(session: &Session, values: &[f32]) -> Vec<f32> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let memory = filled(&bytes);
    let request = CollectiveRequest {
        name: "sum".to_owned(),
        kind: RequestKind::Allreduce { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 },
        dtype: DataType::F32,
        shape: vec![values.len() as u64],
        input: memory.as_buffer(),
        output: None,
        process_set: ProcessSetId::GLOBAL,
        ready: None,
        priority: 0,
    };
    let handle = session.engine().submit(request).unwrap();
    let completion = session.engine().wait(handle, LIMIT).unwrap().unwrap();
    let output = contents(&completion.output.unwrap());
    output.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn ranks_of_one_host_form_a_world_and_reduce() {
    let sums = world(
        3,
        |_| "a".to_owned(),
        |client, deadline| {
            let session = form_launched_session(
                &config(),
                client,
                &InitOptions::default(),
                deadline,
                &mut || false,
            )
            .unwrap();
            sum(&session, &[session.world().rank.0 as f32, 1.0])
        },
    );
    assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
}

#[test]
fn ranks_of_several_hosts_form_a_world_over_tcp() {
    let sums = world(
        4,
        |task| (task % 2).to_string(),
        |client, deadline| {
            let session = form_launched_session(
                &config(),
                client,
                &InitOptions::default(),
                deadline,
                &mut || false,
            )
            .unwrap();
            assert_eq!(
                (
                    session.world().own_placement().local_size,
                    session.world().own_placement().cross_size
                ),
                (2, 2)
            );
            sum(&session, &vec![1.0; 100_000]).iter().sum::<f32>()
        },
    );
    assert_eq!(sums, vec![400_000.0; 4]);
}

/// W-4: as mpirun deals ranks out by node, in every way of reducing.
#[test]
fn ranks_that_go_round_the_hosts_keep_their_numbers_and_reduce() {
    for algorithm in ["auto", "direct", "doubling", "pipeline", "hierarchy", "halving"] {
        let host = Some("127.0.0.1".to_owned());
        let options = RegistrarOptions { host, ..RegistrarOptions::from_config(5, &config()) };
        let registrar = Registrar::start_with_ranked_tasks(options, None).unwrap();
        let config = Config { allreduce_algorithm: algorithm.to_owned(), ..config() };
        let seats = with(
            &registrar,
            5,
            |task| (task % 2).to_string(),
            |client, deadline| {
                let task = client.task_id().0;
                let options = InitOptions::default();
                let session =
                    form_launched_session(&config, client, &options, deadline, &mut || false)
                        .unwrap();
                let (world, seat) = (session.world(), session.world().own_placement());
                assert_eq!(
                    (world.rank.0, seat.local_rank.0, seat.cross_rank.0),
                    (task, task / 2, task % 2)
                );
                let bits = f32::from(1u8 << task);
                assert_eq!(sum(&session, &vec![bits; 50_000]), vec![31.0; 50_000], "{algorithm}");
                (seat.local_size, seat.cross_size)
            },
        );
        assert_eq!(seats, [(3, 2), (2, 2), (3, 2), (2, 2), (3, 1)]);
    }
}

/// Uses every algorithm, in the world and in process sets. The first operation opens the links.
#[test]
fn ranks_whose_links_open_at_their_first_use_reduce_in_the_world_and_in_sets() {
    for algorithm in ["auto", "direct", "doubling", "pipeline", "hierarchy", "halving"] {
        let config =
            Config { allreduce_algorithm: algorithm.to_owned(), links_at_start: 0, ..config() };
        let options = InitOptions {
            process_sets: vec![vec![0, 2, 3, 5, 6, 7], vec![1, 4]],
            ..InitOptions::default()
        };
        world(
            8,
            |task| (task % 6).to_string(),
            |client, deadline| {
                let session =
                    form_launched_session(&config, client, &options, deadline, &mut || false)
                        .unwrap();
                let (set, members) =
                    if [1, 4].contains(&session.world().rank.0) { (2, 2.0) } else { (1, 6.0) };
                assert_eq!(sum_in(&session, ProcessSetId(set)), members, "{algorithm}");
                assert_eq!(sum(&session, &vec![1.0; 50_000]), vec![8.0; 50_000], "{algorithm}");
            },
        );
    }
}

#[test]
fn a_world_can_form_again_after_all_have_left() {
    let sums = world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            (0..3)
                .map(|_| {
                    let client = client.clone();
                    let session = form_launched_session(
                        &config(),
                        client,
                        &InitOptions::default(),
                        deadline,
                        &mut || false,
                    )
                    .unwrap();
                    let sum = sum(&session, &[1.0])[0];
                    session.shutdown();
                    sum
                })
                .collect::<Vec<f32>>()
        },
    );
    assert_eq!(sums, vec![vec![2.0; 3]; 2]);
}

/// SE-3.
#[test]
fn a_wait_for_other_ranks_ends_when_it_is_cancelled() {
    let registrar = registrar(2);
    let deadline = Instant::now() + LIMIT;
    let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    client.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
    let mut questions = 0;
    let outcome =
        form_launched_session(&config(), client, &InitOptions::default(), deadline, &mut || {
            questions += 1;
            questions == 2
        });
    assert!(matches!(outcome, Err(Error::Interrupted)));
    assert!(Instant::now() < deadline - LIMIT / 2, "gave up too late");
}

/// SE-3.
#[test]
fn a_wait_for_the_links_of_a_living_peer_ends_when_it_is_cancelled() {
    let started = Instant::now();
    let (joined, end) = (AtomicBool::new(false), Barrier::new(2));
    world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            let world = await_assignment(&client, deadline, &mut || false).unwrap();
            if world.rank == Rank(1) {
                // Joins, and never opens its end of a link.
                let mut never = || false;
                let rendezvous = RegistrarRendezvous::new(&client, &world, None, &mut never);
                let mesh = join_mesh(&config(), &client, &world, rendezvous, deadline);
                joined.store(true, Ordering::Release);
                end.wait();
                drop(mesh.unwrap());
            } else {
                let outcome = form_launched_session(
                    &config(),
                    client,
                    &InitOptions::default(),
                    deadline,
                    &mut || joined.load(Ordering::Acquire),
                );
                end.wait();
                assert!(matches!(outcome, Err(Error::Interrupted)));
            }
        },
    );
    assert!(started.elapsed() < LIMIT / 2, "gave up too late");
}

fn session(client: TaskClient, deadline: Instant, options: &InitOptions) -> Result<Session> {
    form_launched_session(
        &Config { dynamic_process_sets: options.dynamic, ..config() },
        client,
        options,
        deadline,
        &mut || false,
    )
}

fn sum_in(session: &Session, set: ProcessSetId) -> f32 {
    let memory = filled(&1f32.to_ne_bytes());
    let request = CollectiveRequest {
        name: "sum".to_owned(),
        kind: RequestKind::Allreduce { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 },
        dtype: DataType::F32,
        shape: vec![1],
        input: memory.as_buffer(),
        output: None,
        process_set: set,
        ready: None,
        priority: 0,
    };
    let handle = session.engine().submit(request).unwrap();
    let completion = session.engine().wait(handle, LIMIT).unwrap().unwrap();
    f32::from_ne_bytes(contents(&completion.output.unwrap()).try_into().unwrap())
}

/// SE-5.
#[test]
fn process_sets_from_the_start_are_the_same_everywhere_and_work() {
    let options = InitOptions { process_sets: vec![vec![2, 0], vec![1]], ..InitOptions::default() };
    world(
        3,
        |task| (task % 2).to_string(),
        |client, deadline| {
            let session = session(client, deadline, &options).unwrap();
            let sets = session.process_sets();
            let sets: Vec<(u32, usize)> =
                sets.iter().map(|(set, ranks)| (set.0, ranks.len())).collect();
            assert_eq!(sets, [(0, 3), (1, 2), (2, 1)]);
            match session.world().rank.0 {
                1 => assert_eq!(sum_in(&session, ProcessSetId(2)), 1.0),
                _ => assert_eq!(sum_in(&session, ProcessSetId(1)), 2.0),
            }
            assert!(matches!(
                session.add_process_set(&[0, 1], &mut || false),
                Err(Error::FixedProcessSets)
            ));
            assert_eq!(sum_in(&session, ProcessSetId::GLOBAL), 3.0);
        },
    );
}

/// SE-5.
#[test]
fn member_sets_need_their_members_only_and_no_order() {
    let (sender_01, receiver_01) = std::sync::mpsc::channel();
    let (sender_12, receiver_12) = std::sync::mpsc::channel();
    let channels = Mutex::new((receiver_01, receiver_12));
    world(
        3,
        |_| "a".to_owned(),
        |client, deadline| {
            let session = session(client, deadline, &InitOptions::default()).unwrap();
            let add = |ranks: &[u32], channel| {
                session.add_member_set(ranks, channel, deadline, &mut || false).unwrap()
            };
            // Rank 1 links its two sets at the same time: no order of theirs can be wrong.
            let sums = match session.world().rank.0 {
                0 => {
                    let channel = session.reserve_set_channel().unwrap();
                    sender_01.send(channel).unwrap();
                    vec![sum_in(&session, add(&[0, 1], channel))]
                }
                1 => {
                    let channels = channels.lock().unwrap();
                    let (first, second) = (channels.0.recv().unwrap(), channels.1.recv().unwrap());
                    assert_ne!(first, second);
                    std::thread::scope(|scope| {
                        let other = scope.spawn(|| add(&[2, 1], second));
                        let own = add(&[1, 0], first);
                        [own, other.join().unwrap()].map(|set| sum_in(&session, set)).to_vec()
                    })
                }
                _ => {
                    let channel = session.reserve_set_channel().unwrap();
                    sender_12.send(channel).unwrap();
                    vec![sum_in(&session, add(&[1, 2], channel))]
                }
            };
            assert!(sums.iter().all(|sum| *sum == 2.0), "{sums:?}");
            assert_eq!(session.process_sets().len(), 1, "no other rank knows them");
            assert_eq!(sum_in(&session, ProcessSetId::GLOBAL), 3.0);
        },
    );
}

/// SE-5.
#[test]
fn process_sets_come_and_go_and_their_numbers_are_used_again_in_order() {
    let options = InitOptions { dynamic: true, ..InitOptions::default() };
    world(
        3,
        |_| "a".to_owned(),
        |client, deadline| {
            let session = session(client, deadline, &options).unwrap();
            let mut never = || false;
            let rank = session.world().rank.0;
            let add = |ranks: &[u32], never: &mut InterruptCheck<'_>| {
                session.add_process_set(ranks, never)
            };
            for round in 0..3 {
                let first = add(&[0, 1], &mut never).unwrap();
                let second = add(&[2, 1], &mut never).unwrap();
                assert_eq!([first.0, second.0], [[1, 2], [2, 1], [1, 2]][round]);
                if rank != 2 {
                    assert_eq!(sum_in(&session, first), 2.0);
                }
                if rank != 0 {
                    assert_eq!(sum_in(&session, second), 2.0);
                }
                assert!(matches!(add(&[1, 0], &mut never), Err(Error::SetExists { .. })));
                session.remove_process_set(second, &mut never).unwrap();
                session.remove_process_set(first, &mut never).unwrap();
                let gone = session.remove_process_set(first, &mut never);
                assert!(matches!(gone, Err(Error::NoSuchSet(_))));
                assert_eq!(sum_in(&session, ProcessSetId::GLOBAL), 3.0);
            }
            assert_eq!(session.process_sets().len(), 1);
        },
    );
}

#[test]
fn ranks_that_ask_for_different_sets_all_get_the_requests_of_all() {
    let texts = world(
        3,
        |_| "a".to_owned(),
        |client, deadline| {
            let options = InitOptions { dynamic: true, ..InitOptions::default() };
            let session = session(client, deadline, &options).unwrap();
            let ranks: &[u32] = if session.world().rank == Rank(2) { &[1, 2] } else { &[0, 1] };
            let error = session.add_process_set(ranks, &mut || false).unwrap_err();
            assert_eq!(session.add_process_set(&[0, 2], &mut || false).unwrap(), ProcessSetId(1));
            error.to_string()
        },
    );
    for text in texts {
        assert!(text.contains("ranks 0-1 submitted an addition of process set [0, 1]"), "{text}");
        assert!(text.contains("rank 2 submitted an addition of process set [1, 2]"), "{text}");
    }
}

#[test]
fn ranks_that_begin_with_different_sets_get_an_error_that_names_the_entry() {
    let texts = world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            let world = await_assignment(&client, deadline, &mut || false).unwrap();
            let options = InitOptions {
                process_sets: vec![vec![0], vec![world.rank.0]],
                ..InitOptions::default()
            };
            session(client, deadline, &options).err().unwrap().to_string()
        },
    );
    assert!(
        texts.iter().all(|text| text.contains("process_sets[1]: rank 0 submitted")),
        "{texts:?}"
    );
}

#[test]
fn parts_of_the_launched_world_form_worlds_of_their_own() {
    world(
        4,
        |_| "a".to_owned(),
        |client, deadline| {
            let whole = await_assignment(&client, deadline, &mut || false).unwrap();
            let odd = whole.rank.0 % 2;
            let options = InitOptions { ranks: Some(vec![2 + odd, odd]), ..InitOptions::default() };
            let session = session(client, deadline, &options).unwrap();
            assert_eq!((session.world().size(), session.world().rank.0), (2, whole.rank.0 / 2));
            assert_eq!(sum_in(&session, ProcessSetId::GLOBAL), 2.0);
        },
    );
}

#[test]
fn ranks_that_ask_for_different_worlds_get_an_error_at_once() {
    let texts = world(
        3,
        |_| "a".to_owned(),
        |client, deadline| {
            let whole = await_assignment(&client, deadline, &mut || false).unwrap();
            let ranks = [Some(vec![0, 1]), Some(vec![0, 1, 2]), None];
            let ranks = ranks[whole.rank.index()].clone();
            session(client, deadline, &InitOptions { ranks, ..InitOptions::default() })
                .err()
                .unwrap()
                .to_string()
        },
    );
    let wrong = "ranks must ask init for the same world: rank ";
    assert!(texts.iter().all(|text| text.starts_with(wrong)), "{texts:?}");
    assert!(texts[0].contains("rank 1 asked for all ranks, rank 0 for ranks 0, 1"), "{texts:?}");
    assert!(texts[2].contains("rank 0 asked for ranks 0, 1, rank 2 for all ranks"), "{texts:?}");
}

#[test]
fn ranks_whose_init_failed_on_one_of_them_meet_when_they_try_again() {
    let sums = world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            let try_with = |config: &Config| {
                form_launched_session(
                    config,
                    client.clone(),
                    &InitOptions::default(),
                    deadline,
                    &mut || false,
                )
            };
            let rank = await_assignment(&client, deadline, &mut || false).unwrap().rank;
            let algorithm = if rank == Rank(1) { "none" } else { "auto" };
            let first = try_with(&Config { allreduce_algorithm: algorithm.to_owned(), ..config() });
            let error = first.err().unwrap().to_string();
            assert!(rank == Rank(0) || error.contains("FARANDOLE_ALLREDUCE_ALGORITHM"), "{error}");
            // Rank 1 fails once more before it joins rank 0 again.
            if rank == Rank(1) {
                let mut asked = false;
                let given_up = form_launched_session(
                    &config(),
                    client.clone(),
                    &InitOptions::default(),
                    deadline,
                    &mut || std::mem::replace(&mut asked, true),
                );
                drop(given_up);
            }
            let second = loop {
                match try_with(&config()) {
                    Ok(session) => break session,
                    // Rank 0 may have joined the attempt that was given up.
                    Err(error) => assert!(Instant::now() < deadline, "{error}"),
                }
            };
            sum(&second, &[1.0])[0]
        },
    );
    assert_eq!(sums, [2.0, 2.0]);
}

/// SE-5.
#[test]
fn a_second_process_cannot_take_a_rank() {
    let registrar = registrar(1);
    let deadline = Instant::now() + LIMIT;
    let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    client.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
    client.await_assignment(deadline).unwrap();
    client.form_world(None, "process 7 (00)", b"", deadline, &mut || false).unwrap();
    let error =
        form_launched_session(&config(), client, &InitOptions::default(), deadline, &mut || false)
            .err()
            .unwrap();
    assert!(error.to_string().starts_with("rank 0 is already process 7 (00): "), "{error}");
}
