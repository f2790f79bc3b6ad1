// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Garbage for a registrar, on real sockets: from strangers without a token, and from a task of the
//! job, which has one. The job continues, strangers learn nothing, and nothing panics.
#![expect(clippy::unwrap_used, reason = "tests")]

mod rogue;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use farandole_config::{Config, PortRange};
use farandole_fuzz::{Limit, Random, cases};
use farandole_registrar::{
    ElasticOptions, Registrar, RegistrarOptions, RelayedLinks, TaskClient, local_host_facts,
};
use farandole_world::{Generation, TaskId};
use rogue::{METHODS, Rogue};
use tonic::Code;

const DOOR: u64 = 3;
/// Honest tasks; the one after them is free, or the rogue's.
const HONEST: u32 = 2;

/// Whether any thread has panicked: those of the registrar are the runtime's, which survives.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Tests take turns: the hook is the process's.
static ALONE: Mutex<()> = Mutex::new(());

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn watch_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICKED.store(true, Ordering::Release);
        before(info);
    }));
}

fn registrar(tasks: u32) -> Registrar {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let port_range = PortRange { first: 0, last: 0 };
    Registrar::start_job(RegistrarOptions {
        relays: true,
        port_range,
        ..RegistrarOptions::from_config(tasks, &config)
    })
    .unwrap()
}

/// One of a job whose workers come and go: a worker that joins may be in the first world.
fn elastic() -> Registrar {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let port_range = PortRange { first: 0, last: 0 };
    let options =
        RegistrarOptions { relays: true, port_range, ..RegistrarOptions::from_config(1, &config) };
    let elastic = ElasticOptions {
        first: HONEST,
        min_workers: 1,
        max_workers: HONEST + 3,
        spares: 1,
        timeout: Duration::from_secs(60),
        reset_limit: None,
        cooldown: (Duration::ZERO, Duration::from_secs(1)),
    };
    Registrar::start_elastic(options, &elastic).unwrap()
}

fn connect(registrar: &Registrar, task: u32) -> TaskClient {
    TaskClient::connect(registrar.ticket(), TaskId(task), None, soon()).unwrap()
}

/// A job at work, which must not be disturbed.
struct Job {
    registrar: Registrar,
    agents: Vec<TaskClient>,
    relays: (RelayedLinks, RelayedLinks),
    listener: TcpListener,
    rounds: u64,
}

impl Job {
    fn start() -> Self {
        let registrar = registrar(HONEST);
        let agents: Vec<TaskClient> = (0..HONEST).map(|task| connect(&registrar, task)).collect();
        for agent in &agents {
            agent.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
        }
        for agent in &agents {
            agent.await_assignment(soon()).unwrap();
            agent.start_heartbeats(Duration::from_secs(60), |_| ());
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relays = (agents[0].open_relay(DOOR).unwrap(), agents[1].open_relay(DOOR).unwrap());
        relays.0.accept_relay_calls(listener.local_addr().unwrap().port()).unwrap();
        Self { registrar, agents, relays, listener, rounds: 0 }
    }

    /// Does the work of a job: keys, and now and then a link.
    fn works(&mut self) {
        self.rounds += 1;
        let key = format!("round/{}", self.rounds % 100);
        let value = self.rounds.to_le_bytes();
        self.agents[0].put_value(&key, &value).unwrap();
        assert_eq!(self.agents[1].await_value(&key, soon()).unwrap(), value);
        if self.rounds % 16 == 1 {
            let mut near = std::net::TcpStream::connect(
                self.relays.1.open_listener_to_task(TaskId(0), DOOR).unwrap(),
            )
            .unwrap();
            near.write_all(&value).unwrap();
            let mut heard = [0; 8];
            // Calls of others may have come before it.
            let mut far = self.listener.accept().unwrap().0;
            far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            far.read_exact(&mut heard).unwrap();
            assert_eq!(heard, value);
        }
    }
}

#[test]
fn strangers_learn_nothing_and_disturb_no_task() {
    let _alone = ALONE.lock();
    watch_panics();
    let mut job = Job::start();
    let rogue = Rogue::new(&job.registrar.ticket().with_forged_token());
    cases(|random| {
        match random.below(3) {
            0 => rogue.mutter(random),
            1 => rogue.mutter_inside(random),
            _ => {
                let method = METHODS[random.below(METHODS.len())];
                let status = rogue.call(method, random.below(4), random);
                let code = status.unwrap_or(Code::Ok);
                let turned_away = matches!(
                    code,
                    Code::Unauthenticated
                        | Code::Unavailable
                        | Code::Unknown
                        | Code::Cancelled
                        | Code::Internal
                );
                assert!(turned_away, "{method}: {code:?}");
            }
        }
        job.works();
        assert!(!PANICKED.load(Ordering::Acquire));
    });
}

#[test]
fn a_task_of_the_job_that_sends_garbage_stops_no_registrar() {
    let _alone = ALONE.lock();
    watch_panics();
    cases(|random: &mut Random| {
        // Such a task may end its job, which is its right; so each case has a job of its own.
        let registrar = registrar(HONEST + 1);
        let agents: Vec<TaskClient> = (0..HONEST).map(|task| connect(&registrar, task)).collect();
        for agent in &agents {
            agent.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
        }
        let rogue = Rogue::new(registrar.ticket());
        for _ in 0..40 {
            let method = METHODS[random.below(METHODS.len())];
            // As its own task, as another one's, or as one that is not there.
            rogue.call(method, random.below(5), random);
        }
        assert!(!PANICKED.load(Ordering::Acquire));
        let limit = Limit::of(Duration::from_secs(10));
        drop(connect(&registrar, 1));
        limit.check();
    });
}

#[test]
fn a_worker_that_sends_garbage_stops_no_registrar_of_an_elastic_job() {
    let _alone = ALONE.lock();
    watch_panics();
    cases(|random: &mut Random| {
        let registrar = elastic();
        let agents: Vec<TaskClient> = (0..HONEST).map(|task| connect(&registrar, task)).collect();
        for agent in &agents {
            agent.register_task(0, &local_host_facts::host_facts(), soon()).unwrap();
        }
        // In half of the cases there is a world, whose members, keys and meetings the rogue can
        // speak of.
        if random.below(2) == 0 {
            let asked =
                |agent: &TaskClient| agent.join_next_world(Generation(0), &[], soon()).map(drop);
            std::thread::scope(|scope| {
                let all: Vec<_> =
                    agents.iter().map(|agent| scope.spawn(move || asked(agent))).collect();
                all.into_iter().for_each(|one| one.join().unwrap().unwrap());
            });
        }
        let rogue = Rogue::new(registrar.ticket());
        for _ in 0..40 {
            let method = if random.below(2) == 0 {
                ["Join", "Changes", "Leave", "Meet"][random.below(4)]
            } else {
                METHODS[random.below(METHODS.len())]
            };
            rogue.call(method, random.below(6), random);
        }
        assert!(!PANICKED.load(Ordering::Acquire));
        let limit = Limit::of(Duration::from_secs(10));
        drop(connect(&registrar, 1));
        limit.check();
    });
}
