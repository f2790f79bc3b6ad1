// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar and its tasks in one process, over real sockets.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use farandole_config::PortRange;
use farandole_registrar::{
    Error, ExitKind, ExitReport, FormationOutcome, GenerationVerdict, JobEvent, Registrar,
    RegistrarOptions, RegistrarOrder, TaskClient, Ticket, local_host_facts,
};
use farandole_telemetry::{OutputStream, WorkerRecord};
use farandole_world::{Generation, HostFacts, Rank, TaskId};

fn options(tasks: u32) -> RegistrarOptions {
    RegistrarOptions {
        tasks,
        job_id: None,
        host: None,
        bind: String::new(),
        port_range: PortRange { first: 0, last: 0 },
        start_timeout: Duration::from_secs(60),
        peer_timeout: Duration::from_secs(5),
        relays: false,
    }
}

fn registrar(tasks: u32) -> Registrar {
    Registrar::start_job(options(tasks)).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn connect(ticket: &Ticket, task: u32) -> TaskClient {
    TaskClient::connect(ticket, TaskId(task), None, soon()).unwrap()
}

/// A registered and assigned agent for each task, all on this host.
fn agents(registrar: &Registrar, tasks: u32) -> Vec<TaskClient> {
    let agents: Vec<TaskClient> =
        (0..tasks).map(|task| connect(registrar.ticket(), task)).collect();
    for agent in &agents {
        agent.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
    }
    for agent in &agents {
        agent.await_assignment(soon()).unwrap();
    }
    agents
}

/// Events until one fits, which is returned with those before it.
fn until(registrar: &Registrar, fits: impl Fn(&JobEvent) -> bool) -> Vec<JobEvent> {
    let deadline = soon();
    let mut seen = Vec::new();
    while Instant::now() < deadline {
        for event in registrar.drain_events(deadline).unwrap().records {
            seen.push(event);
            if seen.last().is_some_and(&fits) {
                return seen;
            }
        }
    }
    panic!("no such event among {seen:?}");
}

fn failed(kind: ExitKind) -> ExitReport {
    ExitReport { kind, peer_error: false, stopped: false, stderr_tail: Vec::new() }
}

#[test]
fn a_world_can_be_requested_as_soon_as_it_is_announced() {
    const ROUNDS: usize = 100;
    for round in 0..ROUNDS {
        let registrar = registrar(1);
        thread::scope(|scope| {
            let driver = scope.spawn(|| {
                until(&registrar, |event| matches!(event, JobEvent::Assigned { .. }));
                registrar.current_world().is_some()
            });
            connect(registrar.ticket(), 0)
                .register_task(0, &local_host_facts::host_facts(), soon())
                .unwrap();
            assert!(driver.join().unwrap(), "round {round} of {ROUNDS}");
        });
    }
}

#[test]
fn tasks_of_two_hosts_get_ranks_by_host_and_task() {
    let registrar = registrar(4);
    let clients: Vec<TaskClient> = (0..4).map(|task| connect(registrar.ticket(), task)).collect();
    for (client, name) in clients.iter().zip(["a", "b", "a", "b"]) {
        let facts = HostFacts { hostname: name.into(), ..HostFacts::default() };
        assert_eq!(client.register_task(0, &facts, soon()).unwrap(), Generation(1));
    }
    let ranks: Vec<Rank> =
        clients.iter().map(|client| client.await_assignment(soon()).unwrap().rank).collect();
    assert_eq!(ranks, [Rank(0), Rank(2), Rank(1), Rank(3)]);
    assert_eq!(registrar.current_world().unwrap().size(), 4);
}

#[test]
fn a_worker_meets_its_agents_assignment_and_its_peers_keys() {
    let registrar = registrar(2);
    let agents = agents(&registrar, 2);
    let worker =
        TaskClient::connect(registrar.ticket(), TaskId(1), Some(Generation(1)), soon()).unwrap();
    assert_eq!(worker.await_assignment(soon()).unwrap().rank, Rank(1));
    let (ready, waiting) = mpsc::channel();
    let waiter = thread::spawn({
        let agent = agents[0].clone();
        move || {
            ready.send(()).unwrap();
            agent.await_value("address/1", soon())
        }
    });
    waiting.recv().unwrap();
    worker.put_value("address/1", b"here").unwrap();
    assert_eq!(waiter.join().unwrap().unwrap(), b"here");
    let error =
        worker.await_value("address/7", Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { what, .. } if what == "key address/7"), "{error}");
}

#[test]
fn the_first_claim_of_a_key_holds_and_every_later_one_sees_it() {
    let registrar = registrar(1);
    let agents = agents(&registrar, 1);
    let parent =
        TaskClient::connect(registrar.ticket(), TaskId(0), Some(Generation(1)), soon()).unwrap();
    assert_eq!(parent.put_if_absent("session/1/0", b"parent").unwrap(), b"parent");
    assert_eq!(agents[0].put_if_absent("session/1/0", b"child").unwrap(), b"parent");
    assert_eq!(parent.put_if_absent("session/1/0", b"parent").unwrap(), b"parent");
}

#[test]
fn a_wrong_token_an_unknown_task_and_a_foreign_certificate_are_refused() {
    // RG-1.
    let registrar = registrar(1);
    let other = Registrar::start_job(options(1)).unwrap();
    let unknown = connect(registrar.ticket(), 5)
        .register_task(0, &local_host_facts::host_facts(), soon())
        .unwrap_err();
    assert!(unknown.to_string().contains("unknown task 5: the job has tasks 0 to 0"), "{unknown}");

    let forged = registrar.ticket().with_forged_token();
    let wrong =
        connect(&forged, 0).register_task(0, &local_host_facts::host_facts(), soon()).unwrap_err();
    assert!(wrong.to_string().contains("the token is not this job's"), "{wrong}");

    let misled = other.ticket().with_addresses(registrar.ticket().registrar_addresses());
    let foreign = match TaskClient::connect(&misled, TaskId(0), None, soon()) {
        Ok(_) => panic!("connected to a foreign certificate"),
        Err(error) => error,
    };
    assert!(foreign.to_string().contains("another certificate"), "{foreign}");
    assert!(registrar.current_world().is_none());
}

#[test]
fn duplicates_and_stale_attempts_are_refused_and_a_newer_one_makes_a_new_generation() {
    let registrar = registrar(1);
    let first = connect(registrar.ticket(), 0);
    assert_eq!(
        first.register_task(3, &local_host_facts::host_facts(), soon()).unwrap(),
        Generation(1)
    );
    assert_eq!(
        first.register_task(3, &local_host_facts::host_facts(), soon()).unwrap(),
        Generation(1)
    );
    first.await_assignment(soon()).unwrap();
    first.put_value("key", b"old").unwrap();
    let duplicate = connect(registrar.ticket(), 0)
        .register_task(3, &local_host_facts::host_facts(), soon())
        .unwrap_err();
    assert!(duplicate.to_string().contains("from another process"), "{duplicate}");
    let stale = connect(registrar.ticket(), 0)
        .register_task(2, &local_host_facts::host_facts(), soon())
        .unwrap_err();
    assert!(stale.to_string().contains("attempt 2 is stale"), "{stale}");

    let second = connect(registrar.ticket(), 0);
    assert_eq!(
        second.register_task(4, &local_host_facts::host_facts(), soon()).unwrap(),
        Generation(2)
    );
    second.await_assignment(soon()).unwrap();
    // RG-3.
    let fenced = first.put_value("key", b"stale").unwrap_err();
    assert!(matches!(fenced, Error::Aborted { .. }), "{fenced}");
    assert!(matches!(
        second.await_value("key", Instant::now() + Duration::from_millis(20)),
        Err(Error::Timeout { .. })
    ));
}

#[test]
fn a_start_of_a_task_that_another_has_replaced_hears_so_and_gets_no_rank() {
    let registrar = registrar(2);
    let first = connect(registrar.ticket(), 0);
    first.register_task(1, &local_host_facts::host_facts(), soon()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.await_assignment(soon()));
        let second = connect(registrar.ticket(), 0);
        second.register_task(2, &local_host_facts::host_facts(), soon()).unwrap();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Aborted { retry: false, .. }), "{error}");
        assert!(error.to_string().contains("task 0 was started again"), "{error}");
        // Nor later, when the generation that it registered for has its world.
        connect(registrar.ticket(), 1)
            .register_task(1, &local_host_facts::host_facts(), soon())
            .unwrap();
        assert_eq!(second.await_assignment(soon()).unwrap().size(), 2);
        assert!(first.await_assignment(soon()).is_err());
    });
}

#[test]
fn oversized_values_and_keys_are_refused() {
    // RG-2.
    let registrar = registrar(1);
    let agent = agents(&registrar, 1).remove(0);
    let large = agent.put_value("key", &vec![0; (1 << 20) + 1]).unwrap_err();
    assert!(large.to_string().contains("a value has at most 1048576 bytes"), "{large}");
    let larger = agent.put_value("key", &vec![0; 8 << 20]).unwrap_err();
    assert!(matches!(larger, Error::Refused { .. }), "{larger}");
    let long = agent.await_value(&"k".repeat(2000), soon()).unwrap_err();
    assert!(long.to_string().contains("a key has at most 1024 bytes"), "{long}");
    assert!(agent.send_metric("kind", &vec![0; 2 << 20]).is_err());
}

#[test]
fn connections_beyond_the_limit_find_the_door_shut_and_leave_it_open_for_others() {
    // RG-2: one task has 68 places.
    let registrar = registrar(1);
    let address = registrar.ticket().registrar_addresses()[0].clone();
    let flood: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let shut = flood
        .iter()
        .filter(|stream| {
            stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            // Closed with or without a reset; an open one says nothing yet.
            let mut stream: &TcpStream = stream;
            !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
        })
        .count();
    assert_eq!(shut, 100 - 68);
    drop(flood);
    connect(registrar.ticket(), 0)
        .register_task(0, &local_host_facts::host_facts(), soon())
        .unwrap();
}

#[test]
fn strangers_that_fill_every_place_do_not_keep_an_agent_out() {
    // RG-2: one task has 68 places; TLS is within anybody's reach, the token is not.
    let registrar = registrar(1);
    let forged = registrar.ticket().with_forged_token();
    let strangers: Vec<TaskClient> = (0..68).map(|_| connect(&forged, 0)).collect();
    let agent = connect(registrar.ticket(), 0);
    agent
        .register_task(0, &local_host_facts::host_facts(), Instant::now() + Duration::from_secs(3))
        .unwrap();
    let later: Vec<TaskClient> = (0..68).map(|_| connect(&forged, 0)).collect();
    agent.await_assignment(soon()).unwrap();
    agent.put_value("key", b"value").unwrap();
    drop((strangers, later));
}

/// RG-2 under a flood: strangers that connect without end, also from the agents' hosts.
#[test]
fn agents_are_served_while_strangers_flood_the_registrar() {
    const AGENTS: u32 = 10;
    let register = |registrar: &Registrar| {
        let started = Instant::now();
        for task in 0..AGENTS {
            connect(registrar.ticket(), task)
                .register_task(0, &local_host_facts::host_facts(), soon())
                .unwrap();
        }
        started.elapsed()
    };
    let alone = register(&registrar(AGENTS));
    let registrar = registrar(AGENTS);
    let address = registrar.ticket().registrar_addresses()[0].clone();
    let (over, made) = (AtomicBool::new(false), AtomicU64::new(0));
    // The strangers leave in the end also if an agent is not served.
    let end = Instant::now() + Duration::from_secs(60);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut kept = VecDeque::new();
                while !over.load(Ordering::Relaxed) && Instant::now() < end {
                    if let Ok(stream) = TcpStream::connect(&address) {
                        kept.push_back(stream);
                        made.fetch_add(1, Ordering::Relaxed);
                    } else {
                        thread::sleep(Duration::from_millis(1));
                    }
                    if kept.len() > 100 {
                        drop(kept.pop_front());
                    }
                }
            });
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while made.load(Ordering::Relaxed) < 1000 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let flooded = register(&registrar);
        over.store(true, Ordering::Relaxed);
        let made = made.load(Ordering::Relaxed);
        assert!(made >= 1000, "only {made} strangers came");
        println!("{AGENTS} agents: {alone:?} alone, {flooded:?} beside {made} strangers");
        assert!(
            flooded < Duration::from_secs(15),
            "{alone:?} alone, {flooded:?} beside {made} strangers"
        );
    });
}

#[test]
fn a_connection_without_the_token_is_ended() {
    // RG-2.
    let registrar = registrar(1);
    let mut idle = TcpStream::connect(&registrar.ticket().registrar_addresses()[0]).unwrap();
    idle.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let started = Instant::now();
    assert!(matches!(idle.read(&mut [0]), Ok(0)));
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}

#[test]
fn an_end_and_a_result_that_are_sent_twice_are_one_event_each() {
    let registrar = registrar(1);
    let agent = agents(&registrar, 1).remove(0);
    let mut exit = failed(ExitKind::Code(0));
    exit.stderr_tail = vec!["last".into(), "words".into()];
    for _ in 0..2 {
        agent.send_result(b"result", soon()).unwrap();
        agent.report_exit(&exit, soon()).unwrap();
    }
    registrar.close();
    let events = registrar.drain_events(soon()).unwrap().records;
    let count = |fits: fn(&JobEvent) -> bool| events.iter().filter(|event| fits(event)).count();
    assert_eq!(count(|event| matches!(event, JobEvent::Result { .. })), 1);
    assert_eq!(
        count(
            |event| matches!(event, JobEvent::Exited { exit, .. } if exit.stderr_tail == ["last", "words"])
        ),
        1
    );
    assert_eq!(count(|event| matches!(event, JobEvent::Exited { .. })), 1);
}

/// As every rank of a world: asks for it once.
fn meet(client: &TaskClient, ranks: Option<&[u32]>) -> Result<FormationOutcome, Error> {
    let ranks: Option<Vec<Rank>> = ranks.map(|ranks| ranks.iter().copied().map(Rank).collect());
    let holder = format!("process of {}", client.task_id());
    client.form_world(
        ranks.as_deref(),
        &holder,
        format!("card {}", client.task_id()).as_bytes(),
        soon(),
        &mut || false,
    )
}

#[test]
fn ranks_that_ask_for_a_world_get_all_addresses_by_one_call_each() {
    let registrar = registrar(4);
    let agents = agents(&registrar, 4);
    let before = registrar.admitted_call_count();
    let all: Vec<Vec<Bytes>> = thread::scope(|scope| {
        let asking: Vec<_> = agents.iter().map(|agent| scope.spawn(|| meet(agent, None))).collect();
        let cards = |answer| match answer {
            Ok(FormationOutcome::Formed(cards)) => cards,
            other => panic!("{other:?}"),
        };
        asking.into_iter().map(|thread| cards(thread.join().unwrap())).collect()
    });
    assert_eq!(all, vec![["card 0", "card 1", "card 2", "card 3"].map(Bytes::from); 4]);
    assert_eq!(registrar.admitted_call_count() - before, 4);
}

#[test]
fn a_rank_that_has_ended_well_is_known_to_the_others() {
    let registrar = registrar(4);
    let agents = agents(&registrar, 4);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| meet(&agents[1], Some(&[1, 2])));
        agents[2].report_exit(&failed(ExitKind::Code(0)), soon()).unwrap();
        agents[3].report_own_success(soon()).unwrap();
        let host = local_host_facts::host_facts().host_hash().0;
        let ended = |rank| FormationOutcome::WorkerEnded { rank: Rank(rank), host: host.clone() };
        assert_eq!(waiting.join().unwrap().unwrap(), ended(2));
        assert_eq!(meet(&agents[0], None).unwrap(), ended(2));
        assert_eq!(meet(&agents[0], Some(&[0, 3])).unwrap(), ended(3));
    });
    assert!(registrar.current_world().is_some());
}

#[test]
fn a_task_that_gives_up_or_leaves_is_awaited_again_and_named() {
    let registrar = registrar(3);
    let agents = agents(&registrar, 3);
    let given_up = agents[0].form_world(None, "one", b"first", soon(), &mut || true).unwrap();
    assert_eq!(given_up, FormationOutcome::Interrupted);
    let short = Instant::now() + Duration::from_millis(300);
    let late = agents[1].form_world(None, "two", b"", short, &mut || false).unwrap_err();
    assert!(
        matches!(&late, Error::Timeout { what, .. } if what == "ranks 0, 2 to call init()"),
        "{late}"
    );
    let wrong = meet(&agents[1], Some(&[0, 2])).unwrap_err().to_string();
    assert!(wrong.contains("the members of a world are ranks of 0 to 2, ascending"), "{wrong}");
}

#[test]
fn a_missing_task_is_named_at_the_deadline() {
    let registrar = registrar(3);
    let client = connect(registrar.ticket(), 1);
    client.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
    let error = client.await_assignment(Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(error.to_string().contains("2 missing: [0, 2]"), "{error}");
}

#[test]
fn a_start_that_takes_too_long_aborts_the_job() {
    let registrar = Registrar::start_job(RegistrarOptions {
        start_timeout: Duration::from_millis(200),
        ..options(2)
    })
    .unwrap();
    let client = connect(registrar.ticket(), 1);
    client.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
    let error = client.await_assignment(soon()).unwrap_err();
    assert!(
        error.to_string().contains("only 1 of 2 tasks registered within 200.0ms, missing: [0]"),
        "{error}"
    );
}

#[test]
fn lines_metrics_and_results_reach_the_driver_in_order() {
    let registrar = registrar(1);
    let agent = agents(&registrar, 1).remove(0);
    for number in 0..1000 {
        agent.send_log_line(OutputStream::Stderr, &format!("line {number}")).unwrap();
    }
    agent.send_metric("progress", b"{}").unwrap();
    agent.flush_records(soon()).unwrap();
    agent.send_result(&vec![7; 3 << 20], soon()).unwrap();
    agent.send_log_line(OutputStream::Stdout, "after").unwrap();
    agent.flush_records(soon()).unwrap();
    assert!(agent.report_exit(&failed(ExitKind::Code(0)), soon()).unwrap().is_none());
    let events = until(&registrar, |event| matches!(event, JobEvent::Exited { .. }));
    let lines: Vec<&str> = events
        .iter()
        .filter_map(|event| match event {
            JobEvent::Record(WorkerRecord::Log(line)) => Some(line.text.as_str()),
            _ => None,
        })
        .collect();
    let expected: Vec<String> =
        (0..1000).map(|number| format!("line {number}")).chain(["after".to_owned()]).collect();
    assert_eq!(lines, expected);
    let metric = |event: &JobEvent| matches!(event, JobEvent::Record(WorkerRecord::Metric(metric)) if metric.kind == "progress" && metric.rank == Some(0));
    assert!(events.iter().any(metric));
    assert!(
        events
            .iter()
            .any(|event| matches!(event, JobEvent::Result { data, .. } if data.len() == 3 << 20))
    );
}

#[test]
fn a_flood_of_lines_that_the_driver_leaves_lying_does_not_hold_up_its_agents_signs_of_life() {
    let silence = Duration::from_secs(3);
    let registrar =
        Registrar::start_job(RegistrarOptions { peer_timeout: silence, ..options(1) }).unwrap();
    let agent = agents(&registrar, 1).remove(0);
    agent.start_heartbeats(Duration::from_secs(10), |_| ());
    let text = "x".repeat(64 << 10);
    let began = Instant::now();
    // More than the registrar keeps: then it takes nothing for a while, which is longer than an
    // agent may be silent.
    for _ in 0..1_000 {
        agent.send_log_line(OutputStream::Stdout, &text).unwrap();
    }
    assert!(began.elapsed() > silence, "the flood was never held up");
    agent.flush_records(soon()).unwrap();
    assert!(agent.report_exit(&failed(ExitKind::Code(0)), soon()).unwrap().is_none());
    let events = until(&registrar, |event| matches!(event, JobEvent::Exited { .. }));
    let lost = events
        .iter()
        .any(|event| matches!(event, JobEvent::Lost { .. } | JobEvent::Aborted { .. }));
    assert!(!lost, "an agent that went on beating was lost");
}

#[test]
fn a_failure_stops_all_tasks_with_one_verdict() {
    let registrar = registrar(3);
    let agents = agents(&registrar, 3);
    let (sender, ends) = mpsc::channel();
    for agent in &agents {
        let sender = sender.clone();
        agent.start_heartbeats(Duration::from_secs(10), move |order| sender.send(order).unwrap());
    }
    let peer = ExitReport { peer_error: true, ..failed(ExitKind::Code(1)) };
    let blamed = thread::scope(|scope| {
        let early = scope.spawn(|| agents[0].report_exit(&peer, soon()));
        let cause = scope.spawn(|| agents[2].report_exit(&failed(ExitKind::Signal(9)), soon()));
        [early.join().unwrap(), cause.join().unwrap()]
    });
    for verdict in blamed {
        let verdict = verdict.unwrap().unwrap();
        assert_eq!(verdict.cause, Some(TaskId(2)));
        assert!(verdict.reason.ends_with("was ended by SIGKILL"), "{}", verdict.reason);
    }
    let RegistrarOrder::Stop(stop) = ends.recv_timeout(Duration::from_secs(10)).unwrap() else {
        panic!("a stop was expected");
    };
    assert_eq!(stop.cause, Some(TaskId(2)));
    let events = until(&registrar, |event| matches!(event, JobEvent::Aborted { .. }));
    assert!(matches!(events.last(), Some(JobEvent::Aborted { rank: Some(Rank(2)), .. })));
    let waiting = agents[1].await_value("never", soon()).unwrap_err();
    assert!(matches!(waiting, Error::Aborted { .. }), "{waiting}");
}

#[test]
fn an_agent_that_vanishes_is_lost_within_two_seconds() {
    let registrar = registrar(2);
    let mut agents = agents(&registrar, 2);
    for agent in &agents {
        agent.start_heartbeats(Duration::from_secs(10), |_| ());
    }
    // Both are heard before one goes: a registration alone leaves five seconds.
    agents[0].put_value("heard", b"").unwrap();
    thread::scope(|scope| {
        let beating = scope.spawn(|| thread::park_timeout(Duration::from_millis(300)));
        beating.join().unwrap();
    });
    let gone = Instant::now();
    drop(agents.remove(1));
    let events = until(&registrar, |event| matches!(event, JobEvent::Aborted { .. }));
    assert!(gone.elapsed() < Duration::from_secs(3), "{:?}", gone.elapsed());
    assert!(
        events.iter().any(|event| matches!(
            event,
            JobEvent::Lost { task: TaskId(1), rank: Some(Rank(1)), .. }
        ))
    );
}

#[test]
fn an_interrupt_and_then_an_abort_reach_agents_and_a_close_frees_the_port() {
    let registrar = registrar(1);
    let agent = agents(&registrar, 1).remove(0);
    let (sender, ends) = mpsc::channel();
    agent.start_heartbeats(Duration::from_secs(10), move |order| sender.send(order).unwrap());
    let next_order = || ends.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(agent.is_registrar_answering(soon()).unwrap());
    registrar.interrupt_workers().unwrap();
    assert_eq!(next_order(), RegistrarOrder::Interrupt);
    assert!(agent.is_registrar_answering(soon()).unwrap(), "an interrupt does not end the job");
    registrar.abort_job("enough").unwrap();
    let enough = GenerationVerdict { reason: "enough".to_owned(), cause: None, retry: false };
    assert_eq!(next_order(), RegistrarOrder::Stop(enough));
    assert!(agent.is_registrar_answering(soon()).unwrap(), "it answers that the job is over");
    let closing = Instant::now();
    registrar.close();
    assert!(!agent.is_registrar_answering(soon()).unwrap());
    assert!(closing.elapsed() < Duration::from_secs(3), "{:?}", closing.elapsed());
    let ticket = registrar.ticket().clone();
    let error = match TaskClient::connect(
        &ticket,
        TaskId(0),
        None,
        Instant::now() + Duration::from_millis(500),
    ) {
        Ok(_) => panic!("something still listens"),
        Err(error) => error,
    };
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn a_client_that_waits_is_ended_by_its_cancel() {
    let registrar = registrar(2);
    let cancel = farandole_registrar::CancellationToken::new();
    let client = TaskClient::connect_cancellable(
        registrar.ticket(),
        TaskId(0),
        None,
        soon(),
        cancel.clone(),
    )
    .unwrap();
    client.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| client.await_assignment(soon()));
        cancel.cancel_calls();
        assert!(matches!(waiter.join().unwrap(), Err(Error::Closed { .. })));
    });
}

/// From the last of 64 registrations to the assignment of all.
fn last_registration_to_all_assignments() -> Duration {
    const TASKS: u32 = 64;
    let registrar = registrar(TASKS);
    let facts = local_host_facts::host_facts();
    let clients: Vec<TaskClient> =
        (0..TASKS).map(|task| connect(registrar.ticket(), task)).collect();
    for client in &clients[1..] {
        client.register_task(0, &facts, soon()).unwrap();
    }
    let (sender, done) = mpsc::channel();
    thread::scope(|scope| {
        for client in &clients[1..] {
            let sender = sender.clone();
            scope.spawn(move || {
                let world = client.await_assignment(soon()).unwrap();
                sender.send((Instant::now(), world.size())).unwrap();
            });
        }
        let last = Instant::now();
        clients[0].register_task(0, &facts, soon()).unwrap();
        clients[0].await_assignment(soon()).unwrap();
        let others: Vec<(Instant, usize)> = (1..TASKS).map(|_| done.recv().unwrap()).collect();
        assert!(others.iter().all(|(_, size)| *size == 64));
        others.iter().map(|(at, _)| at.duration_since(last)).max().unwrap_or_default()
    })
}

#[test]
fn sixty_four_tasks_are_assigned_within_50_ms_of_the_last_registration() {
    // The best of three: what is judged is the registrar, not what else the machine does meanwhile.
    let took = (0..3).map(|_| last_registration_to_all_assignments()).min().unwrap_or_default();
    println!("last registration to everybody's assignment, 64 tasks: {took:?}");
    assert!(took <= Duration::from_millis(50), "{took:?}");
}

#[test]
fn the_driver_publishes_values_that_ranks_wait_for() {
    let registrar = registrar(1);
    let agents = agents(&registrar, 1);
    thread::scope(|scope| {
        let waits = scope.spawn(|| agents[0].await_value("key of a run", soon()).unwrap());
        registrar.publish_value("key of a run", b"secret").unwrap();
        assert_eq!(waits.join().unwrap(), b"secret");
    });
    registrar.publish_value("key of a run", b"another").unwrap();
    assert_eq!(agents[0].await_value("key of a run", soon()).unwrap(), b"another");
    let long = registrar.publish_value(&"k".repeat(2000), b"").unwrap_err();
    assert!(matches!(long, Error::Refused { call: "publish", .. }), "{long}");
}
