// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Load test: thousands of tasks against one registrar, in one process. The tasks share a few
//! connections. They do not decode the world that they receive: in a real job each task decodes it
//! on its own machine, and here one machine would decode it for all tasks.

use std::sync::atomic::AtomicUsize;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::server::{Registrar, RegistrarOptions};

/// Connections that the tasks share; each carries fewer than a thousand streams.
const SHARED_CONNECTIONS: u32 = 32;
const TASKS_PER_HOST: u32 = 8;
/// The limits for ten thousand tasks and their registrar, all in one process.
const MAX_MEMORY_BYTES: u64 = 500 << 20;

fn deadline_in_one_minute() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Returns the peak memory of this process, in bytes.
fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

async fn join_job(
    caller: AuthenticatedChannel,
    ended: Arc<AtomicUsize>,
) -> std::result::Result<bool, Status> {
    let TaskId(task) = caller.task;
    let facts = HostFacts {
        hostname: format!("host-{:05}", task / TASKS_PER_HOST),
        ..HostFacts::default()
    };
    let register = wire::RegisterRequest {
        protocol_version: PROTOCOL_VERSION,
        attempt: 1,
        session: u64::from(task),
        host: Some(facts.into()),
    };
    let reply = caller.grpc_stub().register(caller.build_request(register)).await?.into_inner();
    caller.generation.store(reply.generation, Ordering::Release);
    let on_end = Box::new(move |_| {
        ended.fetch_add(1, Ordering::Relaxed);
    });
    let watch = heartbeat::RegistrarMonitor {
        caller: caller.clone(),
        address: String::new(),
        fingerprint: Default::default(),
        session: u64::from(task),
        offer: Arc::default(),
        outage_timeout: Duration::from_secs(60),
        lost: CancellationToken::new(),
    };
    tokio::spawn(watch.run_heartbeats(on_end));
    let wait = wire::AwaitAssignmentRequest { timeout_ms: 50_000, session: Some(u64::from(task)) };
    let mut pieces =
        caller.grpc_stub().await_assignment(caller.build_request(wait)).await?.into_inner();
    let mut bytes = 0;
    while let Some(piece) = pieces.message().await? {
        bytes += piece.world.map_or(0, |piece| piece.len());
    }
    Ok(bytes > 0)
}

/// Returns the largest number of tasks, at most `tasks`, for which this process may open enough
/// files: two for each task. Raises the limit, also the hard limit if the system allows that.
fn max_tasks_for_open_files(tasks: u32) -> u32 {
    const OTHER_DESCRIPTORS: u64 = 1_000;
    let count = u64::from(tasks) * 2 + OTHER_DESCRIPTORS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = |limit: Option<u64>| limit.map(|limit| limit.max(count));
    let limits = Rlimit { current: raised(current), maximum: raised(maximum) };
    if setrlimit(Resource::Nofile, limits).is_ok() {
        return tasks;
    }
    let max_tasks = maximum.map_or(u64::MAX, |hard| hard.saturating_sub(OTHER_DESCRIPTORS) / 2);
    let fits = tasks.min(u32::try_from(max_tasks).unwrap_or(u32::MAX));
    println!("a crowd of {fits}, not {tasks}: this process may open {maximum:?} files");
    fits
}

#[test]
fn a_crowd_registers_is_assigned_and_beats_in_ten_seconds_and_little_memory() {
    let tasks: u32 = farandole_config::environment_variable("FARANDOLE_CROWD")
        .map_or(1_000, |text| text.parse().unwrap());
    let tasks = max_tasks_for_open_files(tasks);
    assert!(tasks >= 1_000, "the limit of open files is too low for a crowd");
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    // One thread runs all tasks. If there are many, a heartbeat may be late.
    let silence = Duration::from_secs(if tasks > 1_000 { 15 } else { 5 });
    let host = Some("127.0.0.1".to_owned());
    let options = RegistrarOptions {
        host,
        peer_timeout: silence,
        ..RegistrarOptions::from_config(tasks, &config)
    };
    let registrar = Registrar::start_job(options).unwrap();
    let started = Instant::now();
    let connections: Vec<TaskClient> = (0..SHARED_CONNECTIONS.min(tasks))
        .map(|task| {
            TaskClient::connect(registrar.ticket(), TaskId(task), None, deadline_in_one_minute())
                .unwrap()
        })
        .collect();
    let handle = connections[0].inner.handle.clone();
    let ended = Arc::new(AtomicUsize::new(0));
    let joins: Vec<_> = (0..tasks)
        .map(|task| {
            let connection = &connections[task as usize % connections.len()].inner.caller;
            let caller = AuthenticatedChannel {
                task: TaskId(task),
                generation: Arc::default(),
                ..connection.clone()
            };
            let ended = Arc::clone(&ended);
            handle.spawn(join_job(caller, ended))
        })
        .collect();
    for join in joins {
        assert!(handle.block_on(join).unwrap().unwrap());
    }
    let assigned = started.elapsed();
    assert_eq!(registrar.current_world().unwrap().size(), tasks as usize);
    // Wait longer than an agent may be silent: an agent without heartbeats would be lost by then.
    let deadline = Instant::now() + silence + Duration::from_secs(1);
    while Instant::now() < deadline {
        for event in registrar.drain_events(deadline).unwrap().records {
            assert!(
                !matches!(event, crate::JobEvent::Lost { .. } | crate::JobEvent::Aborted { .. }),
                "{event:?}"
            );
        }
    }
    assert_eq!(ended.load(Ordering::Relaxed), 0);
    let memory = peak_memory_bytes();
    println!("{tasks} tasks: assigned after {assigned:.2?}, {} MB at most", memory >> 20);
    assert!(assigned < Duration::from_secs(10), "{assigned:?}");
    assert!(memory < MAX_MEMORY_BYTES, "{} of {} MB", memory >> 20, MAX_MEMORY_BYTES >> 20);
}
