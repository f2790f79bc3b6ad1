// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar, this host's agents, and an agent on each other host: `farandole run`.
//!
//! ```text
//! run --+-- Registrar <------------- TLS ---------------+
//!       |-- Agent (thread) --> worker                    |
//!       '-- Remote --ssh--> serve_host --> Agent ... ----'
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{Event, Options, Registrar};
use farandole_telemetry::{Record, Sink};
use farandole_world::{TaskId, World};

use crate::agent::{Agent, Outcome, Output, Task};
use crate::environment::forwarded_environment;
use crate::error::{Error, Result};
use crate::hosts::{HostSlots, Placement};
use crate::near::placements;
use crate::remote::{Notice, Remote, RemoteTasks};
use crate::report::Report;
use crate::shell::Shell;

/// How often the caller's wish is looked at.
const SLICE: Duration = Duration::from_millis(20);
/// How long other hosts may still take to answer once one has failed before anything ran: all that fail are told.
const OTHERS: Duration = Duration::from_secs(10);
/// How long a host whose agent fell silent may take to come back with its last words.
const SILENT: Duration = Duration::from_secs(2);
/// How long hosts may take to end their workers once the job is over.
const ENDING: Duration = Duration::from_secs(20);

/// What to run, and where.
#[derive(Clone, Debug)]
pub struct Job {
    /// Number of processes.
    pub num_proc: u32,
    /// Hosts and their slots, in the order of ranks; none means this host alone.
    pub hosts: Vec<HostSlots>,
    /// How other hosts are reached.
    pub shell: Shell,
    /// The Python interpreter that has the package on other hosts.
    pub python: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes.
    pub environment: BTreeMap<String, Option<String>>,
    /// The configuration of this process.
    pub config: Config,
}

/// What the caller wants of a running job. Later wishes are harsher; an earlier one after a later one changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// That it goes on.
    #[default]
    GoOn,
    /// That it ends, with time for a last checkpoint: SIGINT to the workers.
    Interrupt,
    /// That it ends soon: SIGTERM.
    Terminate,
    /// That it ends now: SIGKILL.
    Kill,
}

/// Hears of the ranks.
type Assigned<'a> = dyn Fn(&World) + 'a;

impl Job {
    /// A job of this host alone.
    pub fn here(
        num_proc: u32,
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self {
            num_proc,
            hosts: Vec::new(),
            shell: Shell::default(),
            python: String::new(),
            command,
            environment,
            config,
        }
    }

    /// As [`Job::run_told`], and nobody wants to know the ranks.
    ///
    /// # Errors
    /// As [`Job::run_told`].
    pub fn run(&self, sink: &Arc<dyn Sink>, wish: &dyn Fn() -> Wish) -> Result<Report> {
        self.run_told(sink, wish, &|_| {})
    }

    /// Runs the command until all processes have ended, or until one has failed and the others were ended, or until
    /// `wish` says so. Lines of the workers go to `sink`; `assigned` hears of the ranks.
    ///
    /// # Errors
    /// `Usage` for no process, an empty command or too few slots; `Host` and `Hosts` for hosts that cannot be used, or
    /// were lost; `Registrar`, `Spawn`, `System`.
    pub fn run_told(
        &self,
        sink: &Arc<dyn Sink>,
        wish: &dyn Fn() -> Wish,
        assigned: &Assigned<'_>,
    ) -> Result<Report> {
        if self.num_proc == 0 {
            return Err(Error::Usage { reason: "at least one process is needed".to_owned() });
        }
        if self.command.first().is_none_or(String::is_empty) {
            return Err(Error::Usage { reason: "the command is empty".to_owned() });
        }
        let (here, there) = placements(&self.hosts, self.num_proc)?;
        let mut options = Options::from_config(self.num_proc, &self.config);
        if there.is_empty() {
            // Nobody else needs to reach it.
            options.host = Some("127.0.0.1".to_owned());
            options.bind = String::new();
        }
        let registrar = Registrar::start(options)
            .map_err(|source| Error::Registrar { task: TaskId(0), source: Box::new(source) })?;
        let mut crew = Crew::start(self, &registrar, (sink, assigned), here, there)?;
        let ended = crew.conduct(wish);
        drop(crew);
        registrar.close();
        ended
    }

    fn task(&self, registrar: &Registrar, sink: &Arc<dyn Sink>, task: u32) -> Task {
        Task {
            ticket: registrar.ticket().clone(),
            task: TaskId(task),
            host: None,
            attempt: 0,
            command: self.command.clone(),
            environment: self.environment.clone(),
            payload: None,
            collect_result: false,
            together: false,
            output: Output::Sink(Arc::clone(sink)),
            start_timeout: self.config.start_timeout,
            peer_timeout: self.config.peer_timeout,
        }
    }

    fn remote(&self, registrar: &Registrar, placement: Placement) -> RemoteTasks {
        let mut environment = forwarded_environment();
        environment.extend(self.environment.clone());
        RemoteTasks {
            host: placement.host,
            shell: self.shell.clone(),
            python: self.python.clone(),
            python_path: farandole_config::environment("PYTHONPATH"),
            same_python: None,
            ticket: registrar.ticket().clone(),
            tasks: placement.tasks,
            command: self.command.clone(),
            environment,
            folder: std::env::current_dir()
                .ok()
                .and_then(|folder| folder.into_os_string().into_string().ok()),
            payload: None,
            collect_result: false,
            start_timeout: self.config.start_timeout,
            peer_timeout: self.config.peer_timeout,
        }
    }
}

/// Another host, as far as it was heard of.
struct Elsewhere {
    remote: Remote,
    tasks: Range<u32>,
    /// Its agent has its order.
    ready: bool,
    /// When its agent was said to be lost.
    silent_since: Option<Instant>,
}

/// Everybody who works for one job.
struct Crew<'a> {
    registrar: &'a Registrar,
    sink: &'a Arc<dyn Sink>,
    assigned: &'a Assigned<'a>,
    num_proc: u32,
    agents: BTreeMap<u32, Agent>,
    hosts: Vec<Elsewhere>,
    notices: mpsc::Receiver<(usize, Notice)>,
    outcomes: BTreeMap<u32, Outcome>,
    /// Hosts and agents that could not do their part.
    errors: Vec<Error>,
    /// Hosts whose last words were given up on.
    unheard: Vec<Error>,
    began: Instant,
    failed_at: Option<Instant>,
    over_at: Option<Instant>,
    wish: Wish,
}

impl<'a> Crew<'a> {
    fn start(
        job: &Job,
        registrar: &'a Registrar,
        (sink, assigned): (&'a Arc<dyn Sink>, &'a Assigned<'a>),
        here: Vec<u32>,
        there: Vec<Placement>,
    ) -> Result<Self> {
        let (sender, notices) = mpsc::channel();
        let mut hosts = Vec::with_capacity(there.len());
        for (number, placement) in there.into_iter().enumerate() {
            let (sender, tasks) = (sender.clone(), placement.tasks.clone());
            // A job that is over hears no more.
            let tell = move |notice| drop(sender.send((number, notice)));
            let remote = Remote::start(job.remote(registrar, placement), tell)?;
            hosts.push(Elsewhere { remote, tasks, ready: false, silent_since: None });
        }
        let start = |task| Ok((task, Agent::start(job.task(registrar, sink, task))?));
        let agents = here.into_iter().map(start).collect::<Result<_>>()?;
        Ok(Self {
            registrar,
            sink,
            assigned,
            num_proc: job.num_proc,
            agents,
            hosts,
            notices,
            outcomes: BTreeMap::new(),
            errors: Vec::new(),
            unheard: Vec::new(),
            began: Instant::now(),
            failed_at: None,
            over_at: None,
            wish: Wish::GoOn,
        })
    }

    fn conduct(&mut self, wish: &dyn Fn() -> Wish) -> Result<Report> {
        let mut told = BTreeSet::new();
        while told.len() < self.num_proc as usize {
            self.events(Instant::now() + SLICE);
            self.hear_agents(&mut told);
            self.hear_hosts(&mut told);
            self.follow(wish());
            self.give_up(&mut told);
        }
        // What the workers of other hosts wrote last came before their ends did.
        self.events(Instant::now());
        let interrupted = self.wish > Wish::GoOn;
        if self.errors.is_empty() && self.outcomes.values().all(Outcome::is_success) {
            // Hosts that fall silent together leave nobody who could say why the job ended.
            self.errors.append(&mut self.unheard);
        }
        match Error::of_hosts(std::mem::take(&mut self.errors)) {
            Some(error) if !interrupted => Err(error),
            _ => Ok(Report {
                outcomes: std::mem::take(&mut self.outcomes).into_values().collect(),
                interrupted,
            }),
        }
    }

    /// Takes what the registrar has heard.
    fn events(&mut self, deadline: Instant) {
        // Made in this process, so it is not a fork's.
        let Ok(drained) = self.registrar.events(deadline) else { return };
        if drained.dropped > 0 {
            tracing::warn!(lines = drained.dropped, "lines of workers were lost: this end could not keep up");
        }
        for event in drained.records {
            match event {
                Event::Record(record @ Record::Log(_)) => self.sink.accept(record),
                Event::Assigned { world } => (self.assigned)(&world),
                Event::Lost { task, .. } => {
                    let host = self.hosts.iter_mut().find(|host| host.tasks.contains(&task.0));
                    if let Some(host) = host {
                        host.silent_since.get_or_insert_with(Instant::now);
                    }
                }
                Event::Aborted { .. } => {
                    self.over_at.get_or_insert_with(Instant::now);
                }
                _ => {}
            }
        }
    }

    fn hear_agents(&mut self, told: &mut BTreeSet<u32>) {
        let ended: Vec<(u32, Result<Outcome>)> = self
            .agents
            .iter()
            .filter_map(|(task, agent)| Some((*task, agent.wait(Duration::ZERO)?)))
            .collect();
        for (task, outcome) in ended {
            self.agents.remove(&task);
            self.ended(task, outcome, told);
        }
    }

    fn hear_hosts(&mut self, told: &mut BTreeSet<u32>) {
        while let Ok((number, notice)) = self.notices.try_recv() {
            match notice {
                Notice::Ready => self.hosts[number].ready = true,
                Notice::Ended { task, outcome } => self.ended(task.0, outcome, told),
                Notice::Gone { tasks, error } => {
                    let begun = self.hosts[number].ready;
                    let over = self.over_at.is_some();
                    self.hosts[number].ready = true;
                    told.extend(&tasks);
                    if over || self.wish > Wish::GoOn {
                        // What ended the job has a name already.
                        tracing::info!(%error, "a host ended without its last words");
                        continue;
                    }
                    if begun {
                        self.abort(&error.told());
                    }
                    self.failed(error);
                }
                Notice::Done => {}
            }
        }
    }

    fn ended(&mut self, task: u32, outcome: Result<Outcome>, told: &mut BTreeSet<u32>) {
        if !told.insert(task) {
            return;
        }
        match outcome {
            Ok(outcome) => {
                self.outcomes.insert(task, outcome);
            }
            // The other agents learn of it from the registrar; their ends are waited for.
            Err(error) => self.failed(error),
        }
    }

    fn failed(&mut self, error: Error) {
        self.failed_at.get_or_insert_with(Instant::now);
        self.errors.push(error);
    }

    fn abort(&mut self, reason: &str) {
        self.over_at.get_or_insert_with(Instant::now);
        // Made in this process, so it is not a fork's.
        drop(self.registrar.abort(reason));
    }

    /// Ends a job that cannot begin or go on, and what is left of one that is over.
    fn give_up(&mut self, told: &mut BTreeSet<u32>) {
        let now = Instant::now();
        let passed = |since: Option<Instant>, limit| since.is_some_and(|since| now >= since + limit);
        let all_answered = self.hosts.iter().all(|host| host.ready);
        if self.over_at.is_none()
            && self.failed_at.is_some()
            && (all_answered || passed(self.failed_at, OTHERS))
        {
            let reasons: Vec<String> = self.errors.iter().map(Error::told).collect();
            self.abort(&reasons.join("; "));
        }
        let late = passed(self.over_at, ENDING);
        for host in &mut self.hosts {
            if (self.over_at.is_some() || self.wish > Wish::GoOn) && !host.ready {
                // Nothing runs there that could end.
                host.ready = true;
                host.remote.hang_up();
                told.extend(host.tasks.clone());
                let reason = format!("it has not answered within {:.1?}", self.began.elapsed());
                self.errors.push(Error::Host { host: host.remote.host().to_owned(), reason });
            }
            let gone = self.over_at.is_some() && passed(host.silent_since, SILENT);
            if (gone || late) && host.tasks.clone().any(|task| !told.contains(&task)) {
                host.remote.hang_up();
                let reason = "its agent fell silent".to_owned();
                self.unheard.push(Error::Host { host: host.remote.host().to_owned(), reason });
                for task in host.tasks.clone().filter(|task| told.insert(*task)) {
                    tracing::info!(task, host = host.remote.host(), "its end is not waited for");
                }
            }
        }
    }

    fn follow(&mut self, wish: Wish) {
        if wish <= self.wish {
            return;
        }
        self.wish = wish;
        for host in &self.hosts {
            match wish {
                Wish::GoOn => {}
                Wish::Interrupt => host.remote.interrupt(),
                Wish::Terminate => host.remote.terminate(),
                Wish::Kill => host.remote.kill(),
            }
        }
        for agent in self.agents.values() {
            match wish {
                Wish::GoOn => {}
                Wish::Interrupt => agent.interrupt("interrupted"),
                Wish::Terminate => agent.cancel("interrupted"),
                Wish::Kill => agent.kill("interrupted"),
            }
        }
        if wish > Wish::Interrupt {
            self.abort("interrupted");
        }
    }
}
