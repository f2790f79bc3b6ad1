// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A crowd of tasks, each with connections of its own, against a registrar in another process whose
//! descriptors are limited.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fmt;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{Registrar, RegistrarOptions, TaskClient, Ticket, local_host_facts};
use farandole_world::TaskId;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::field::{Field, Visit};
use tracing::span;

const TASKS: u32 = 600;
/// Connections of each task: one of its agent and one of its worker.
const CONNECTIONS: u64 = 2;

fn limit(soft: u64, hard: Option<u64>) {
    let maximum = hard.or(getrlimit(Resource::Nofile).maximum);
    setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum }).unwrap();
}

/// The registrar's process. Starts under the limits `soft:hard:tasks`, prints its ticket and does
/// as it is told.
#[test]
#[ignore = "started by the other tests, in a process of its own"]
fn driver() {
    let given = farandole_config::environment_variable("FARANDOLE_TEST_CROWD").unwrap();
    let given: Vec<u64> = given.split(':').map(|number| number.parse().unwrap()).collect();
    let [soft, hard, tasks] = given[..] else { unreachable!("{given:?}") };
    tracing::subscriber::set_global_default(Errors).unwrap();
    limit(soft, Some(hard));
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let registrar = match Registrar::start_job(RegistrarOptions::from_config(
        u32::try_from(tasks).unwrap(),
        &config,
    )) {
        Ok(registrar) => registrar,
        Err(error) => return println!("\nrefused {error}"),
    };
    println!("\nticket {}", registrar.ticket().encode_text());
    let raised = getrlimit(Resource::Nofile).current.unwrap();
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            // The one that counts them is among them.
            "starve" => limit(fs::read_dir("/proc/self/fd").unwrap().count() as u64 + 1, None),
            "feed" => limit(raised, None),
            _ => {}
        }
        println!("\ndone {raised}");
    }
}

/// Writes errors to stderr.
struct Errors;

struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.push_str(&format!("{field}={value:?} "));
    }
}

impl tracing::Subscriber for Errors {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut words = Words(String::new());
        event.record(&mut words);
        eprintln!("{}", words.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The driver's process, ended when dropped.
struct Driver {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Driver {
    fn start(soft: u64, hard: u64, tasks: u32) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "crowd::driver", "--nocapture"])
            .env("FARANDOLE_TEST_CROWD", format!("{soft}:{hard}:{tasks}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// The rest of the next line that begins with this.
    fn read(&mut self, what: &str) -> String {
        for line in self.output.by_ref().lines() {
            if let Some(rest) = line.unwrap().strip_prefix(what) {
                return rest.trim().to_owned();
            }
        }
        unreachable!("the driver ended without a word of {what}")
    }

    fn tell(&mut self, what: &str) -> String {
        writeln!(self.input.as_ref().unwrap(), "{what}").unwrap();
        self.read("done")
    }

    fn ticket(&mut self) -> Ticket {
        self.read("ticket").parse().unwrap()
    }

    /// Processor time it has used.
    fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..].split_whitespace().collect();
        let ticks: u64 = fields[12..14].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Ends it; what it wrote to stderr.
    fn end(mut self) -> String {
        drop(self.input.take());
        let words = std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        assert!(self.child.wait().unwrap().success(), "{words}");
        words
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // It has ended already where all went well.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn within(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

/// An agent that registers and learns its world, then its worker, all at once with all others.
fn crowd(ticket: &Ticket, tasks: u32) -> Vec<(TaskClient, TaskClient)> {
    let deadline = within(60);
    let join = |task: u32| {
        let ticket = ticket.clone();
        move || {
            let agent = TaskClient::connect(&ticket, TaskId(task), None, deadline).unwrap();
            let generation =
                agent.register_task(0, &local_host_facts::host_facts(), deadline).unwrap();
            let world = agent.await_assignment(deadline).unwrap();
            assert!(world.generation >= generation);
            let worker =
                TaskClient::connect(&ticket, TaskId(task), Some(world.generation), deadline)
                    .unwrap();
            worker.put_value(&format!("card/{task}"), b"here").unwrap();
            (agent, worker)
        }
    };
    let threads: Vec<_> = (0..tasks)
        .map(|task| thread::Builder::new().stack_size(256 << 10).spawn(join(task)).unwrap())
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// This process plays all tasks.
fn allow_all() {
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
    limit(hard, None);
    assert!(
        hard > 2 * CONNECTIONS * u64::from(TASKS),
        "the hard limit of this machine is too low: {hard}"
    );
}

#[test]
fn six_hundred_tasks_connect_at_once_where_the_soft_limit_is_low_and_where_it_is_not() {
    allow_all();
    for soft in [256, 4096] {
        let mut driver = Driver::start(soft, 4096, TASKS);
        let ticket = driver.ticket();
        let raised: u64 = driver.tell("say").parse().unwrap();
        assert!(raised >= soft.max(CONNECTIONS * u64::from(TASKS)), "{raised}");
        let started = Instant::now();
        let held = crowd(&ticket, TASKS);
        println!(
            "{TASKS} tasks under ulimit -n {soft}: all connected after {:.1?}",
            started.elapsed()
        );
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
        drop(held);
        assert_eq!(driver.end(), "");
    }
}

#[test]
fn a_job_whose_connections_cannot_be_had_is_refused_with_the_number_that_is_needed() {
    let mut driver = Driver::start(256, 512, TASKS);
    let text = driver.read("refused");
    assert!(text.contains("1200 of them for connections"), "{text}");
    assert!(text.contains("the limit is 512"), "{text}");
    let needed: u64 =
        text.split_once("needs ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!((1200..1400).contains(&needed), "{needed}");
    assert!(text.contains(&format!("ulimit -n {needed}")), "{text}");
}

/// Returns the number of descriptors that a refused job says it needs.
fn needed() -> u64 {
    let text = Driver::start(256, 512, TASKS).read("refused");
    text.split_once("needs ").unwrap().1.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn the_limit_that_a_refusal_names_is_enough_for_the_crowd_beside_idle_strangers() {
    allow_all();
    let mut driver = Driver::start(256, needed() + 8, TASKS);
    let ticket = driver.ticket();
    let address = ticket.registrar_addresses().last().unwrap().clone();
    let strangers: Vec<TcpStream> =
        (0..1500).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let started = Instant::now();
    let held = crowd(&ticket, TASKS);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    drop((held, strangers));
    assert_eq!(driver.end(), "", "strangers had all descriptors");
}

#[test]
fn every_address_of_a_driver_with_many_is_dialled_and_all_of_the_crowd_comes_in() {
    allow_all();
    let mut driver = Driver::start(256, 8192, TASKS);
    let ticket = driver.ticket();
    let port = ticket.registrar_addresses().last().unwrap().rsplit_once(':').unwrap().1.to_owned();
    let many: Vec<String> = (1..=8).map(|host| format!("127.0.0.{host}:{port}")).collect();
    let started = Instant::now();
    let held = crowd(&ticket.with_addresses(&many), TASKS);
    println!("{TASKS} tasks, eight addresses: all connected after {:.1?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    drop(held);
}

#[test]
fn a_registrar_without_descriptors_says_so_waits_and_then_admits_all_tasks() {
    allow_all();
    let mut driver = Driver::start(256, 4096, 40);
    let ticket = driver.ticket();
    driver.tell("starve");
    let before = driver.cpu();
    let crowd = thread::spawn(move || crowd(&ticket, 40));
    let watch = Duration::from_secs(3);
    thread::sleep(watch);
    let spent = driver.cpu() - before;
    assert!(spent < watch / 10, "{spent:?} of {watch:?}");
    assert!(!crowd.is_finished(), "it had descriptors");
    driver.tell("feed");
    drop(crowd.join().unwrap());
    let words = driver.end();
    assert!(words.contains("the registrar cannot accept connections; it tries again"), "{words}");
    assert!(words.contains("Too many open files"), "{words}");
    assert_eq!(words.trim().lines().count(), 1, "{words}");
}
