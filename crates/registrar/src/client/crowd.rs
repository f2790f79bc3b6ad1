// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A crowd of tasks against one registrar, in one process: they share a few connections and do not
//! look into the world that each of them is sent, as that is every task's own work and here there
//! is one machine for all.

use std::sync::atomic::AtomicUsize;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::server::{Options, Registrar};

/// Connections that the crowd shares; each carries less than a thousand streams.
const CONNECTIONS: u32 = 32;
const HOST: u32 = 8;
/// The limits for ten thousand tasks and their registrar, all in one process.
const MEMORY: u64 = 500 << 20;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Returns the most memory this process has had, in bytes.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

async fn join(caller: Caller, ended: Arc<AtomicUsize>) -> std::result::Result<bool, Status> {
    let TaskId(task) = caller.task;
    let facts = HostFacts { hostname: format!("host-{:05}", task / HOST), ..HostFacts::default() };
    let register = wire::RegisterRequest {
        protocol_version: PROTOCOL_VERSION,
        attempt: 1,
        session: u64::from(task),
        host: Some(facts.into()),
    };
    let reply = caller.stub().register(caller.request(register)).await?.into_inner();
    caller.generation.store(reply.generation, Ordering::Release);
    let on_end = Box::new(move |_| {
        ended.fetch_add(1, Ordering::Relaxed);
    });
    let watch = heartbeat::Watch {
        caller: caller.clone(),
        address: String::new(),
        fingerprint: Default::default(),
        session: u64::from(task),
        offer: Arc::default(),
        patience: Duration::from_secs(60),
        lost: Cancel::new(),
    };
    tokio::spawn(watch.beat(on_end));
    let wait = wire::AwaitAssignmentRequest { timeout_ms: 50_000, session: Some(u64::from(task)) };
    let mut pieces = caller.stub().await_assignment(caller.request(wait)).await?.into_inner();
    let mut bytes = 0;
    while let Some(piece) = pieces.message().await? {
        bytes += piece.world.map_or(0, |piece| piece.len());
    }
    Ok(bytes > 0)
}

/// Returns the largest crowd of at most this size for which a registrar has enough open files: it
/// needs two for each task. Raises the limit, also the hard one where the system allows that.
fn allowed(tasks: u32) -> u32 {
    const OTHERS: u64 = 1_000;
    let count = u64::from(tasks) * 2 + OTHERS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = |limit: Option<u64>| limit.map(|limit| limit.max(count));
    let limits = Rlimit { current: raised(current), maximum: raised(maximum) };
    if setrlimit(Resource::Nofile, limits).is_ok() {
        return tasks;
    }
    let most = maximum.map_or(u64::MAX, |hard| hard.saturating_sub(OTHERS) / 2);
    let fits = tasks.min(u32::try_from(most).unwrap_or(u32::MAX));
    println!("a crowd of {fits}, not {tasks}: this process may open {maximum:?} files");
    fits
}

#[test]
fn a_crowd_registers_is_assigned_and_beats_in_ten_seconds_and_little_memory() {
    let tasks: u32 = farandole_config::environment("FARANDOLE_CROWD")
        .map_or(1_000, |text| text.parse().unwrap());
    let tasks = allowed(tasks);
    assert!(tasks >= 1_000, "the limit of open files is too low for a crowd");
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    // One thread plays all of them: where they are many, it may be late with a beat.
    let silence = Duration::from_secs(if tasks > 1_000 { 15 } else { 5 });
    let host = Some("127.0.0.1".to_owned());
    let options = Options { host, peer_timeout: silence, ..Options::from_config(tasks, &config) };
    let registrar = Registrar::start(options).unwrap();
    let started = Instant::now();
    let doors: Vec<Client> = (0..CONNECTIONS.min(tasks))
        .map(|task| Client::connect(registrar.ticket(), TaskId(task), None, soon()).unwrap())
        .collect();
    let handle = doors[0].inner.handle.clone();
    let ended = Arc::new(AtomicUsize::new(0));
    let joins: Vec<_> = (0..tasks)
        .map(|task| {
            let door = &doors[task as usize % doors.len()].inner.caller;
            let caller = Caller { task: TaskId(task), generation: Arc::default(), ..door.clone() };
            let ended = Arc::clone(&ended);
            handle.spawn(join(caller, ended))
        })
        .collect();
    for join in joins {
        assert!(handle.block_on(join).unwrap().unwrap());
    }
    let assigned = started.elapsed();
    assert_eq!(registrar.assignment().unwrap().size(), tasks as usize);
    // Longer than an agent may be silent: an agent without heartbeats is lost by the end of it.
    let deadline = Instant::now() + silence + Duration::from_secs(1);
    while Instant::now() < deadline {
        for event in registrar.events(deadline).unwrap().records {
            assert!(
                !matches!(event, crate::Event::Lost { .. } | crate::Event::Aborted { .. }),
                "{event:?}"
            );
        }
    }
    assert_eq!(ended.load(Ordering::Relaxed), 0);
    let memory = most_memory();
    println!("{tasks} tasks: assigned after {assigned:.2?}, {} MB at most", memory >> 20);
    assert!(assigned < Duration::from_secs(10), "{assigned:?}");
    assert!(memory < MEMORY, "{} of {} MB", memory >> 20, MEMORY >> 20);
}
