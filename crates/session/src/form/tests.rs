// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Whole worlds in one process: a registrar, and per rank a thread with client, mesh and engine of its own.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use farandole_collectives::{DataType, ReduceOp};
use farandole_engine::Kind;
use farandole_registrar::{Options, Registrar};
use farandole_testkit::{contents, filled};
use farandole_world::{HostFacts, TaskId};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap()
}

fn registrar(tasks: u32) -> Registrar {
    let host = Some("127.0.0.1".to_owned());
    Registrar::start(Options { host, ..Options::from_config(tasks, &config()) }).unwrap()
}

/// Runs `body` on one thread per task, each registered on the host that `place` gives it.
fn world<T: Send>(
    tasks: u32,
    place: impl Fn(u32) -> String + Sync,
    body: impl Fn(Client, Instant) -> T + Sync,
) -> Vec<T> {
    let registrar = registrar(tasks);
    let deadline = Instant::now() + LIMIT;
    thread::scope(|scope| {
        let (place, body, ticket) = (&place, &body, registrar.ticket());
        let run = move |task| {
            let client = Client::connect(ticket, TaskId(task), None, deadline).unwrap();
            let facts = HostFacts { hostname: place(task), ..host::facts() };
            client.register(0, &facts, deadline).unwrap();
            body(client, deadline)
        };
        let threads: Vec<_> = (0..tasks).map(|task| scope.spawn(move || run(task))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn sum(session: &Session, values: &[f32]) -> Vec<f32> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    let memory = filled(&bytes);
    let request = Request {
        name: "sum".to_owned(),
        kind: Kind::Allreduce { op: ReduceOp::Sum, prescale: 1.0, postscale: 1.0 },
        dtype: DataType::F32,
        shape: vec![values.len() as u64],
        input: memory.buffer(),
        output: None,
        process_set: ProcessSetId::GLOBAL,
        ready: None,
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
            let session = launched(&config(), client, 0, deadline, &mut || false).unwrap();
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
            let session = launched(&config(), client, 0, deadline, &mut || false).unwrap();
            assert_eq!((session.world().seat().local_size, session.world().seat().cross_size), (2, 2));
            sum(&session, &vec![1.0; 100_000]).iter().sum::<f32>()
        },
    );
    assert_eq!(sums, vec![400_000.0; 4]);
}

#[test]
fn a_world_can_form_again_after_all_have_left() {
    let sums = world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            (0..3)
                .map(|number| {
                    let session =
                        launched(&config(), client.clone(), number, deadline, &mut || false).unwrap();
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
fn whoever_waits_for_others_gives_up_when_asked_to() {
    let registrar = registrar(2);
    let deadline = Instant::now() + LIMIT;
    let client = Client::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    client.register(0, &host::facts(), deadline).unwrap();
    let mut questions = 0;
    let outcome = launched(&config(), client, 0, deadline, &mut || {
        questions += 1;
        questions == 2
    });
    assert!(matches!(outcome, Err(Error::Interrupted)));
    assert!(Instant::now() < deadline - LIMIT / 2, "gave up too late");
}

/// SE-3.
#[test]
fn whoever_waits_for_the_links_of_a_living_peer_gives_up_when_asked_to() {
    let started = Instant::now();
    let (joined, end) = (AtomicBool::new(false), Barrier::new(2));
    world(
        2,
        |_| "a".to_owned(),
        |client, deadline| {
            let world = await_assignment(&client, deadline, &mut || false).unwrap();
            if world.rank == Rank(1) {
                // Joins, and never opens its end of a link.
                let mesh = join(&config(), &client, &world, 0, deadline, &mut || false);
                joined.store(true, Ordering::Release);
                end.wait();
                drop(mesh.unwrap());
            } else {
                let outcome =
                    launched(&config(), client, 0, deadline, &mut || joined.load(Ordering::Acquire));
                end.wait();
                assert!(matches!(outcome, Err(Error::Interrupted)));
            }
        },
    );
    assert!(started.elapsed() < LIMIT / 2, "gave up too late");
}
