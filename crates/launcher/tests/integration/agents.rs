// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Agents, their registrar and real worker processes (shells).

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::PortRange;
use farandole_launcher::{Agent, AgentTask, Error, OutputTarget, WorkerOutcome};
use farandole_registrar::{ExitKind, Registrar, RegistrarOptions, TaskClient, local_host_facts};
use farandole_telemetry::{RecordSink, WorkerRecord};
use farandole_world::{Rank, TaskId};
use parking_lot::Mutex;

const LIMIT: Duration = Duration::from_secs(30);

fn registrar(tasks: u32) -> Registrar {
    Registrar::start_job(RegistrarOptions {
        tasks,
        job_id: None,
        host: Some("127.0.0.1".into()),
        bind: String::new(),
        port_range: PortRange { first: 0, last: 0 },
        start_timeout: LIMIT,
        peer_timeout: Duration::from_secs(5),
        relays: false,
    })
    .unwrap()
}

/// Lines by rank.
struct Lines(Mutex<mpsc::Sender<(u32, String)>>);

impl RecordSink for Lines {
    fn accept_record(&self, record: WorkerRecord) {
        if let WorkerRecord::Log(line) = record {
            // A test that does not look at lines has dropped the other end.
            drop(self.0.lock().send((line.rank.unwrap(), line.text)));
        }
    }
}

fn task(
    registrar: &Registrar,
    number: u32,
    script: &str,
) -> (AgentTask, mpsc::Receiver<(u32, String)>) {
    let (sender, lines) = mpsc::channel();
    let task = AgentTask {
        ticket: registrar.ticket().clone(),
        task: TaskId(number),
        host: None,
        attempt: 0,
        command: vec!["/bin/sh".into(), "-c".into(), script.into()],
        environment: BTreeMap::new(),
        payload: None,
        collect_result: false,
        elastic: false,
        wait_for_peers: false,
        output: OutputTarget::Sink(Arc::new(Lines(Mutex::new(sender)))),
        start_timeout: LIMIT,
        peer_timeout: Duration::from_secs(5),
        outage: Duration::ZERO,
    };
    (task, lines)
}

fn outcome(agent: &Agent) -> WorkerOutcome {
    agent.wait_for_outcome(LIMIT).unwrap_or_else(|| panic!("the agent hangs")).unwrap()
}

fn is_alive(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
}

/// Waits for a process, which is not our child, to end.
fn ends(pid: &str) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while is_alive(pid) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[test]
fn a_worker_knows_its_rank_reads_its_payload_and_returns_a_result() {
    let registrar = registrar(2);
    let script = r#"printf 'rank %s of %s at %s:%s\n' "$RANK" "$HOROVOD_SIZE" "$MASTER_ADDR" "$MASTER_PORT"
        cat "/proc/self/fd/$FARANDOLE_PAYLOAD_FD" >"/proc/self/fd/$FARANDOLE_RESULT_FD""#;
    let started: Vec<(Agent, mpsc::Receiver<(u32, String)>)> = (0..2)
        .map(|number| {
            let (mut task, lines) = task(&registrar, number, script);
            // A stale rank in the user's environment has no effect.
            task.environment.insert("RANK".into(), Some("17".into()));
            task.payload = Some(vec![b'x'; 300_000]);
            task.collect_result = true;
            (Agent::spawn_thread(task).unwrap(), lines)
        })
        .collect();
    let mut greetings = Vec::new();
    for (agent, lines) in &started {
        let outcome = outcome(agent);
        assert!(outcome.is_success(), "{outcome:?}");
        assert_eq!(outcome.result.unwrap().len(), 300_000);
        greetings.push(lines.recv().unwrap().1);
    }
    assert!(greetings[0].starts_with("rank 0 of 2 at 127.0.0.1:"), "{greetings:?}");
    assert_eq!(greetings[0].replace("rank 0", "rank 1"), greetings[1]);
}

#[test]
fn the_first_failure_ends_the_others_and_is_the_only_one_blamed() {
    let registrar = registrar(2);
    let (failing, _) = task(&registrar, 0, "echo before >&2; exit 7");
    let (waiting, _) = task(&registrar, 1, "sleep 600");
    let agents = [Agent::spawn_thread(failing).unwrap(), Agent::spawn_thread(waiting).unwrap()];
    let [failed, stopped] = [outcome(&agents[0]), outcome(&agents[1])];
    assert_eq!((failed.aborted, failed.exit_kind), (false, Some(ExitKind::Code(7))));
    assert_eq!(failed.stderr_tail, ["before"]);
    assert_eq!((stopped.aborted, stopped.exit_kind), (true, Some(ExitKind::Signal(15))));
    let reason = stopped.reason.unwrap();
    assert!(reason.starts_with("rank 0 on ") && reason.ends_with("exited with code 7"), "{reason}");
    assert_eq!(failed.reason.unwrap(), reason);
}

#[test]
fn a_worker_deaf_to_sigterm_is_killed_with_its_children() {
    // LN-2.
    let registrar = registrar(1);
    let (task, lines) = task(&registrar, 0, "trap '' TERM; sleep 600 & echo $$ $!; wait");
    let agent = Agent::spawn_thread(task).unwrap();
    let (_, pids) = lines.recv_timeout(LIMIT).unwrap();
    registrar.abort_job("enough").unwrap();
    let outcome = outcome(&agent);
    assert_eq!(outcome.exit_kind, Some(ExitKind::Signal(9)));
    assert_eq!(outcome.reason.as_deref(), Some("enough"));
    for pid in pids.split(' ') {
        assert!(ends(pid), "process {pid} is left over");
    }
}

#[test]
fn children_of_a_worker_that_ended_well_end_too() {
    // LN-2.
    let registrar = registrar(1);
    let (task, lines) = task(&registrar, 0, "sleep 600 & echo $!");
    let agent = Agent::spawn_thread(task).unwrap();
    assert!(outcome(&agent).is_success());
    let (_, pid) = lines.recv_timeout(LIMIT).unwrap();
    assert!(ends(&pid), "process {pid} is left over");
}

#[test]
fn a_killed_worker_is_reported_with_its_signal_and_last_words() {
    let registrar = registrar(1);
    let (task, _) =
        task(&registrar, 0, "for i in $(seq 80); do echo line $i >&2; done; kill -9 $$");
    let outcome = outcome(&Agent::spawn_thread(task).unwrap());
    assert_eq!((outcome.rank, outcome.exit_kind), (Some(Rank(0)), Some(ExitKind::Signal(9))));
    assert_eq!(outcome.stderr_tail.len(), 50);
    assert_eq!(outcome.stderr_tail.last().unwrap(), "line 80");
    assert!(outcome.reason.unwrap().ends_with("was ended by SIGKILL"));
}

#[test]
fn a_cancelled_agent_answers_before_and_after_there_is_a_worker() {
    let registrar = registrar(2);
    let (waiting, _) = task(&registrar, 0, "true");
    let early = Agent::spawn_thread(waiting).unwrap();
    early.cancel_worker("changed my mind");
    let outcome_early = outcome(&early);
    assert_eq!(
        (outcome_early.rank, outcome_early.reason.as_deref()),
        (None, Some("changed my mind"))
    );

    let registrar = self::registrar(1);
    let (sleeping, lines) = task(&registrar, 0, "echo up; sleep 600");
    let late = Agent::spawn_thread(sleeping).unwrap();
    lines.recv_timeout(LIMIT).unwrap();
    late.cancel_worker("changed my mind");
    let outcome_late = outcome(&late);
    assert!(outcome_late.aborted);
    assert_eq!(outcome_late.exit_kind, Some(ExitKind::Signal(15)));
}

#[test]
fn a_missing_program_is_named_and_ends_the_others() {
    let registrar = registrar(2);
    let (mut missing, _) = task(&registrar, 0, "");
    missing.command = vec!["/no/such/program".into()];
    let (waiting, _) = task(&registrar, 1, "sleep 600");
    let agents = [Agent::spawn_thread(missing).unwrap(), Agent::spawn_thread(waiting).unwrap()];
    let error = agents[0].wait_for_outcome(LIMIT).unwrap().unwrap_err();
    assert!(
        matches!(&error, Error::Spawn { program, .. } if program == "/no/such/program"),
        "{error}"
    );
    assert!(outcome(&agents[1]).reason.unwrap().contains("could not be started"));
}

#[test]
fn a_worker_ends_when_the_registrar_is_gone() {
    let registrar = registrar(1);
    let (mut task, lines) = task(&registrar, 0, "echo up; sleep 600");
    task.peer_timeout = Duration::from_millis(200);
    let agent = Agent::spawn_thread(task).unwrap();
    lines.recv_timeout(LIMIT).unwrap();
    drop(registrar);
    let outcome = outcome(&agent);
    assert!(outcome.aborted);
    assert_eq!(outcome.reason.as_deref(), Some("the driver closed the job"));
}

/// Hands connections on to a registrar until it is dropped: then they break, and nothing listens
/// any more.
struct Bridge {
    address: String,
    end: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Bridge {
    fn to(registrar: &Registrar) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let target = registrar.ticket().registrar_addresses()[0].clone();
        let (end, streams) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (ends, all) = (Arc::clone(&end), Arc::clone(&streams));
        let thread = thread::spawn(move || {
            for near in listener
                .incoming()
                .map(Result::unwrap)
                .take_while(|_| !ends.load(Ordering::Acquire))
            {
                let far = TcpStream::connect(&target).unwrap();
                for (mut from, mut to) in [
                    (near.try_clone().unwrap(), far.try_clone().unwrap()),
                    (far.try_clone().unwrap(), near.try_clone().unwrap()),
                ] {
                    thread::spawn(move || io::copy(&mut from, &mut to));
                }
                all.lock().extend([near, far]);
            }
        });
        Self { address, end, streams, thread: Some(thread) }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
        drop(TcpStream::connect(&self.address));
        self.thread.take().unwrap().join().unwrap();
        for stream in self.streams.lock().iter() {
            drop(stream.shutdown(Shutdown::Both));
        }
    }
}

#[test]
fn a_cancelled_agent_does_not_wait_for_a_registrar_that_is_gone() {
    let registrar = registrar(1);
    let bridge = Bridge::to(&registrar);
    let (mut task, lines) = task(&registrar, 0, "echo up; sleep 600");
    task.ticket = task.ticket.with_addresses(std::slice::from_ref(&bridge.address));
    task.peer_timeout = LIMIT;
    let agent = Agent::spawn_thread(task).unwrap();
    lines.recv_timeout(LIMIT).unwrap();
    drop(bridge);
    let cancelled = Instant::now();
    agent.cancel_worker("changed my mind");
    let outcome = outcome(&agent);
    assert!(cancelled.elapsed() < Duration::from_secs(8), "{:?}", cancelled.elapsed());
    assert_eq!(
        (outcome.reason.as_deref(), outcome.exit_kind),
        (Some("changed my mind"), Some(ExitKind::Signal(15)))
    );
}

#[test]
fn an_agent_cancelled_while_it_waits_for_rank_0_says_why() {
    let registrar = registrar(2);
    let (task, _) = task(&registrar, 1, "true");
    let agent = Agent::spawn_thread(task).unwrap();
    // Takes a rank, and never says where to meet.
    let deadline = Instant::now() + LIMIT;
    let first = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    first.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
    first.await_assignment(deadline).unwrap();
    agent.cancel_worker("changed my mind");
    let outcome = outcome(&agent);
    assert_eq!((outcome.aborted, outcome.reason.as_deref()), (true, Some("changed my mind")));
}

/// Holds up the worker's reader until the line is taken.
struct Slow(Mutex<mpsc::SyncSender<String>>);

impl RecordSink for Slow {
    fn accept_record(&self, record: WorkerRecord) {
        if let WorkerRecord::Log(line) = record {
            // The rest is not taken once the test is over.
            drop(self.0.lock().send(line.text));
        }
    }
}

/// An agent whose worker has ended while its output waits to be taken.
fn with_untaken_output(registrar: &Registrar) -> (Agent, mpsc::Receiver<String>) {
    let (mut task, _) = task(registrar, 0, "seq 5000");
    let (sender, lines) = mpsc::sync_channel(0);
    task.output = OutputTarget::Sink(Arc::new(Slow(Mutex::new(sender))));
    (Agent::spawn_thread(task).unwrap(), lines)
}

#[test]
fn output_is_not_lost_however_late_it_is_taken() {
    // LN-4.
    let registrar = registrar(1);
    let (agent, lines) = with_untaken_output(&registrar);
    assert!(
        agent.wait_for_outcome(Duration::from_secs(4)).is_none(),
        "the agent did not wait for the reader"
    );
    let taken: Vec<String> = lines.iter().take(5000).collect();
    assert_eq!(taken.last().unwrap(), "5000");
    assert!(outcome(&agent).is_success());
}

#[test]
fn an_agent_that_is_cancelled_does_not_wait_for_the_reader_of_the_output() {
    let registrar = registrar(1);
    let (agent, lines) = with_untaken_output(&registrar);
    lines.recv_timeout(LIMIT).unwrap();
    let cancelled = Instant::now();
    agent.cancel_worker("interrupted");
    outcome(&agent);
    assert!(cancelled.elapsed() < Duration::from_secs(8), "{:?}", cancelled.elapsed());
}

#[test]
fn endless_and_missing_patience_are_bounded() {
    let registrar = Registrar::start_job(RegistrarOptions {
        tasks: 1,
        job_id: None,
        host: Some("127.0.0.1".into()),
        bind: String::new(),
        port_range: PortRange { first: 0, last: 0 },
        start_timeout: Duration::MAX,
        peer_timeout: Duration::ZERO,
        relays: false,
    })
    .unwrap();
    let (mut task, _) = task(&registrar, 0, "true");
    (task.start_timeout, task.peer_timeout) = (Duration::MAX, Duration::MAX);
    assert!(outcome(&Agent::spawn_thread(task).unwrap()).is_success());
}
