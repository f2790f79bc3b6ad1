// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar that is gone, and one that continues from its journal: the workers notice nothing
//! but a pause.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{
    ElasticOptions, FormationOutcome, JobEvent, MembershipJournal, Registrar, RegistrarOptions,
    TaskClient, local_host_facts,
};
use farandole_world::{Generation, TaskId, World};

const PATIENCE: Duration = Duration::from_secs(30);

fn registrar(journal: &Path) -> Registrar {
    let config = Config::read(|_| None, &BTreeMap::new()).unwrap();
    let options = RegistrarOptions {
        host: Some("127.0.0.1".to_owned()),
        ..RegistrarOptions::from_config(1, &config)
    };
    let second = Duration::from_secs(1);
    let elastic = ElasticOptions {
        first: 2,
        min_workers: 1,
        max_workers: 2,
        spares: 0,
        timeout: PATIENCE,
        reset_limit: None,
        cooldown: (second / 10, second),
    };
    let journal = MembershipJournal::open_or_create(journal, "a test").unwrap();
    Registrar::start_with_journal(options, &elastic, Some(journal)).unwrap()
}

fn started(registrar: &Registrar) -> Vec<TaskId> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let drained = registrar.drain_events(Instant::now() + Duration::from_millis(50)).unwrap();
        let start = |event: &JobEvent| match event {
            JobEvent::Start { task, .. } => Some(*task),
            _ => None,
        };
        let tasks: Vec<TaskId> = drained.records.iter().filter_map(start).collect();
        if !tasks.is_empty() {
            return tasks;
        }
    }
    panic!("nothing is started");
}

/// An agent and its worker.
fn worker(registrar: &Registrar, task: TaskId) -> (TaskClient, TaskClient) {
    let deadline = Instant::now() + PATIENCE;
    let agent = TaskClient::connect(registrar.ticket(), task, None, deadline).unwrap();
    agent.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
    // The first registrar says farewell, which one that is killed does not.
    agent.start_heartbeats(PATIENCE, |_| {});
    let worker = TaskClient::connect(registrar.ticket(), task, None, deadline).unwrap();
    worker.tolerate_outage(PATIENCE);
    (agent, worker)
}

/// Calls all workers at once.
fn all<T: Send>(
    workers: &[(TaskClient, TaskClient)],
    act: impl Fn(&TaskClient) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let acting: Vec<_> =
            workers.iter().map(|(_, worker)| scope.spawn(|| act(worker))).collect();
        acting.into_iter().map(|acted| acted.join().unwrap()).collect()
    })
}

fn join(workers: &[(TaskClient, TaskClient)], after: u64) -> Vec<World> {
    all(workers, |worker| {
        worker.join_next_world(Generation(after), &[], Instant::now() + PATIENCE).unwrap()
    })
}

fn ranks(worlds: &[World]) -> Vec<(u64, u32, usize)> {
    worlds.iter().map(|world| (world.generation.0, world.rank.0, world.size())).collect()
}

fn meet(worker: &TaskClient) -> FormationOutcome {
    let holder = format!("process {}", worker.task_id());
    worker.form_world(None, &holder, b"card", Instant::now() + PATIENCE, &mut || false).unwrap()
}

#[test]
fn a_registrar_that_starts_again_from_its_journal_has_the_same_world_and_all_values() {
    let folder = tempfile::tempdir().unwrap();
    let [left, path] = ["left", "journal"].map(|name| folder.path().join(name));
    let first = registrar(&path);
    first.update_hosts(&[("a".to_owned(), 2)]).unwrap();
    let crew: Vec<(TaskClient, TaskClient)> =
        started(&first).iter().map(|task| worker(&first, *task)).collect();
    assert_eq!(ranks(&join(&crew, 0)), [(1, 0, 2), (1, 1, 2)]);
    crew[0].1.put_value("key", b"value").unwrap();
    assert_eq!(crew[0].1.put_if_absent("claim", b"first").unwrap(), b"first");
    assert!(all(&crew, meet).iter().all(|met| matches!(met, FormationOutcome::Formed(_))));
    // What a killed process leaves.
    std::fs::copy(&path, &left).unwrap();
    let ticket = first.ticket().encode_text();
    drop(first);

    let second = registrar(&left);
    assert_eq!(second.ticket().encode_text(), ticket, "the same token, certificate and port");
    let resumed = second.resumed_job().unwrap();
    assert_eq!(resumed.workers.values().collect::<Vec<_>>(), ["a", "a"]);
    assert_eq!(resumed.world.as_ref().map(|world| world.generation), Some(Generation(1)));
    assert_eq!(crew[1].1.await_value("key", Instant::now() + PATIENCE).unwrap(), b"value");
    assert_eq!(crew[1].1.put_if_absent("claim", b"second").unwrap(), b"first");
    assert_eq!(
        ranks(&join(&crew, 0)),
        [(1, 0, 2), (1, 1, 2)],
        "who has not heard of the world hears of it"
    );
    // And the job continues.
    assert_eq!(ranks(&join(&crew, 1)), [(2, 0, 2), (2, 1, 2)]);
    assert!(all(&crew, meet).iter().all(|met| matches!(met, FormationOutcome::Formed(_))));
    drop(second);
    assert!(!left.exists(), "a job that was closed is over");
}

#[test]
fn a_journal_that_is_shortened_while_workers_put_values_has_the_last_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let [left, path] = ["left", "journal"].map(|name| folder.path().join(name));
    let first = registrar(&path);
    first.update_hosts(&[("a".to_owned(), 2)]).unwrap();
    let crew: Vec<(TaskClient, TaskClient)> =
        started(&first).iter().map(|task| worker(&first, *task)).collect();
    join(&crew, 0);
    let length = || std::fs::metadata(&path).unwrap().len();
    let (mut longest, mut puts) = (0, 0_u32);
    let deadline = Instant::now() + PATIENCE;
    // Each is longer in the file than here.
    while length() >= longest || puts < 20 {
        assert!(Instant::now() < deadline, "it only grows: {longest} bytes");
        longest = length();
        puts += 1;
        let key = format!("key {}", puts % 2);
        crew[0]
            .1
            .put_value(&key, &[puts.to_le_bytes().repeat(1 << 16), vec![0; 7]].concat())
            .unwrap();
    }
    std::fs::copy(&path, &left).unwrap();
    drop(first);
    let second = registrar(&left);
    for put in [puts - 1, puts] {
        let value =
            crew[1].1.await_value(&format!("key {}", put % 2), Instant::now() + PATIENCE).unwrap();
        assert_eq!(value[..4], put.to_le_bytes(), "{puts}");
    }
    assert_eq!(ranks(&join(&crew, 1)), [(2, 0, 2), (2, 1, 2)]);
    drop(second);
}
