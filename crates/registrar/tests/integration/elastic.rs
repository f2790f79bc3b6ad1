// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An elastic job over real connections: workers join, one dies, one is added, a host is removed,
//! and the job ends.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{
    ElasticOptions, Error, ExitKind, ExitReport, JobEvent, Registrar, RegistrarOptions, TaskClient,
    local_host_facts,
};
use farandole_world::{Generation, TaskId, World};

const PATIENCE: Duration = Duration::from_secs(20);

fn registrar(first: u32, max_workers: u32) -> Registrar {
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let options = RegistrarOptions {
        host: Some("127.0.0.1".to_owned()),
        ..RegistrarOptions::from_config(1, &config)
    };
    let second = Duration::from_secs(1);
    let elastic = ElasticOptions {
        first,
        min_workers: 1,
        max_workers,
        spares: 0,
        timeout: PATIENCE,
        reset_limit: None,
        cooldown: (second / 10, second),
    };
    Registrar::start_elastic(options, &elastic).unwrap()
}

/// The next event that `pick` wants.
fn event<T>(registrar: &Registrar, pick: impl Fn(&JobEvent) -> Option<T>) -> Vec<T> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let drained = registrar.drain_events(Instant::now() + Duration::from_millis(50)).unwrap();
        let picked: Vec<T> = drained.records.iter().filter_map(&pick).collect();
        if !picked.is_empty() {
            return picked;
        }
    }
    panic!("the event does not come");
}

fn started(registrar: &Registrar) -> Vec<TaskId> {
    event(registrar, |event| match event {
        JobEvent::Start { task, .. } => Some(*task),
        _ => None,
    })
}

/// An agent and its worker.
fn worker(registrar: &Registrar, task: TaskId) -> (TaskClient, TaskClient) {
    let deadline = Instant::now() + PATIENCE;
    let agent = TaskClient::connect(registrar.ticket(), task, None, deadline).unwrap();
    agent.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
    agent.start_heartbeats(PATIENCE, |_| {});
    (agent, TaskClient::connect(registrar.ticket(), task, None, deadline).unwrap())
}

/// All workers ask at once; the world of each.
fn join(workers: &[&TaskClient], after: u64, suspects: &[TaskId]) -> Vec<Result<World, Error>> {
    thread::scope(|scope| {
        let asking: Vec<_> = workers
            .iter()
            .map(|worker| {
                scope.spawn(|| {
                    worker.join_next_world(Generation(after), suspects, Instant::now() + PATIENCE)
                })
            })
            .collect();
        asking.into_iter().map(|asked| asked.join().unwrap()).collect()
    })
}

fn ranks(worlds: &[Result<World, Error>]) -> Vec<(u64, u32, usize)> {
    let place = |world: &Result<World, Error>| {
        let world = world.as_ref().unwrap();
        (world.generation.0, world.rank.0, world.size())
    };
    worlds.iter().map(place).collect()
}

fn exit(agent: &TaskClient, kind: ExitKind) {
    let exit = ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() };
    assert!(agent.report_exit(&exit, Instant::now() + PATIENCE).unwrap().is_none());
}

#[test]
fn workers_come_and_go_until_all_of_the_last_world_have_returned() {
    let registrar = registrar(3, 3);
    registrar.update_hosts(&[("a".to_owned(), 3)]).unwrap();
    let tasks = started(&registrar);
    assert_eq!(tasks.len(), 3);
    let crew: Vec<(TaskClient, TaskClient)> =
        tasks.iter().map(|task| worker(&registrar, *task)).collect();
    let [(_, first), (second_agent, second), (_, third)] = &crew[..] else { panic!() };
    let worlds = join(&[first, second, third], 0, &[]);
    assert_eq!(ranks(&worlds), [(1, 0, 3), (1, 1, 3), (1, 2, 3)]);

    // One dies; what it had put under its world is over, and the others continue.
    first.put_value("key", b"value").unwrap();
    let (told, change) = mpsc::channel();
    first.watch_host_changes(Generation(2), move |change| told.send(change).unwrap_or_default());
    exit(second_agent, ExitKind::Signal(9));
    let over = third.await_value("another", Instant::now() + PATIENCE).unwrap_err();
    assert!(matches!(over, Error::Aborted { retry: true, .. }), "{over}");
    let worlds = join(&[first, third], 1, &[tasks[1]]);
    assert_eq!(ranks(&worlds), [(2, 0, 2), (2, 1, 2)]);
    assert!(
        second.join_next_world(Generation(1), &[], Instant::now() + PATIENCE).is_err(),
        "the dead stay dead"
    );

    // Its successor is announced when it is ready, and taken in at the next chance.
    let [task] = started(&registrar)[..] else { panic!() };
    let (fourth_agent, fourth) = worker(&registrar, task);
    thread::scope(|scope| {
        let waits =
            scope.spawn(|| fourth.join_next_world(Generation(0), &[], Instant::now() + PATIENCE));
        let change = change.recv_timeout(PATIENCE).unwrap();
        assert!(change.added && !change.removed);
        let worlds = join(&[first, third], 2, &[]);
        assert_eq!(ranks(&worlds), [(3, 0, 3), (3, 1, 3)]);
        assert_eq!(waits.join().unwrap().unwrap().rank.0, 2);
    });

    // Fewer slots: the last one may go.
    registrar.update_hosts(&[("a".to_owned(), 2)]).unwrap();
    let worlds = join(&[first, third, &fourth], 3, &[]);
    assert_eq!(ranks(&worlds[..2]), [(4, 0, 2), (4, 1, 2)]);
    assert!(matches!(&worlds[2], Err(Error::Dismissed { .. })), "{:?}", worlds[2]);
    exit(&fourth_agent, ExitKind::Code(0));

    exit(&crew[0].0, ExitKind::Code(0));
    exit(&crew[2].0, ExitKind::Code(0));
    let finished = event(&registrar, |event| match event {
        JobEvent::Finished { generation } => Some(generation.0),
        _ => None,
    });
    assert_eq!(finished, [4]);
}

#[test]
fn numbers_of_workers_that_contradict_each_other_are_refused() {
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let second = Duration::from_secs(1);
    for (min_workers, first, max_workers) in [(0, 1, 1), (3, 2, 4), (1, 5, 4)] {
        let elastic = ElasticOptions {
            first,
            min_workers,
            max_workers,
            spares: 0,
            timeout: second,
            reset_limit: None,
            cooldown: (second, second),
        };
        let refused = Registrar::start_elastic(RegistrarOptions::from_config(1, &config), &elastic)
            .err()
            .unwrap();
        assert!(matches!(refused, Error::Options { .. }), "{refused}");
    }
}

#[test]
fn a_job_without_a_largest_number_of_workers_starts_and_takes_them_in() {
    let registrar = registrar(1, u32::MAX);
    registrar.update_hosts(&[("a".to_owned(), 2)]).unwrap();
    let tasks = started(&registrar);
    let crew: Vec<(TaskClient, TaskClient)> =
        tasks.iter().map(|task| worker(&registrar, *task)).collect();
    let workers: Vec<&TaskClient> = crew.iter().map(|(_, worker)| worker).collect();
    assert_eq!(ranks(&join(&workers, 0, &[])), [(1, 0, 2), (1, 1, 2)]);
}
