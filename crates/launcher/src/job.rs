// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar, this host's agents, and an agent on each other host: `farandole run`.
//!
//! ```text
//! run --+-- Registrar <------------- TLS ---------------+
//!       |-- Agent (thread) --> worker                    |
//!       '-- Remote --ssh--> serve_host --> Agent ... ----'
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{Event, Options, Registrar};
use farandole_telemetry::Sink;
use farandole_world::World;

use crate::agent::{Outcome, Output};
use crate::crew::{Crew, Elsewhere, News, Wish};
use crate::error::{Error, Result};
use crate::hosts::{HostSlots, Placement};
use crate::near::placements;
use crate::report::Report;
use crate::work::Work;

/// Interval at which the caller is asked whether to stop.
const SLICE: Duration = Duration::from_millis(20);
/// Longest time in which other hosts must answer after one has failed before the start: the error
/// names all that fail.
const OTHERS: Duration = Duration::from_secs(10);
/// Longest time in which a host whose agent fell silent must return with its last messages.
const SILENT: Duration = Duration::from_secs(2);
/// Longest time in which hosts must end their workers once the job is over.
const ENDING: Duration = Duration::from_secs(20);

/// The program to run, and the hosts.
#[derive(Clone, Debug)]
pub struct Job {
    /// Number of processes.
    pub num_proc: u32,
    /// Hosts and their slots, in the order of ranks; none means this host alone.
    pub hosts: Vec<HostSlots>,
    /// The program of each process.
    pub work: Work,
}

/// Hears of the ranks.
type Assigned<'a> = dyn Fn(&World) + 'a;

impl Job {
    /// Returns a job of this host alone.
    pub fn here(
        num_proc: u32,
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self { num_proc, hosts: Vec::new(), work: Work::program(command, environment, config) }
    }

    /// Like [`Job::run_told`], without reporting the ranks.
    ///
    /// # Errors
    /// Like [`Job::run_told`].
    pub fn run(&self, sink: &Arc<dyn Sink>, wish: &dyn Fn() -> Wish) -> Result<Report> {
        self.run_told(sink, wish, &|_| {})
    }

    /// Runs the command until all processes have ended, or until one has failed and the others were
    /// ended, or until `wish` says so. Lines of the workers go to `sink`; `assigned` hears of the
    /// ranks.
    ///
    /// # Errors
    /// `Usage` for no process, an empty command or too few slots; `Begin` without a registrar;
    /// `Host` and `Hosts` for hosts that cannot be used, or were lost; `Registrar`, `Spawn`,
    /// `System`.
    pub fn run_told(
        &self,
        sink: &Arc<dyn Sink>,
        wish: &dyn Fn() -> Wish,
        assigned: &Assigned<'_>,
    ) -> Result<Report> {
        if self.num_proc == 0 {
            return Err(Error::Usage { reason: "at least one process is needed".to_owned() });
        }
        self.work.check()?;
        let (here, there) = placements(&self.hosts, self.num_proc)?;
        let mut options = Options::from_config(self.num_proc, &self.work.config);
        if there.is_empty() {
            // No other process needs to connect to it.
            options.host = Some("127.0.0.1".to_owned());
            options.bind = String::new();
        }
        let registrar = Registrar::start(options)
            .map_err(|source| Error::Begin { source: Box::new(source) })?;
        let mut conduct = Conduct::start(self, &registrar, (sink, assigned), here, there)?;
        let ended = conduct.run(wish);
        drop(conduct);
        registrar.close();
        ended
    }
}

/// A running job.
struct Conduct<'a> {
    registrar: &'a Registrar,
    sink: &'a Arc<dyn Sink>,
    assigned: &'a Assigned<'a>,
    crew: Crew<'a>,
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

impl<'a> Conduct<'a> {
    fn start(
        job: &'a Job,
        registrar: &'a Registrar,
        (sink, assigned): (&'a Arc<dyn Sink>, &'a Assigned<'a>),
        here: Vec<u32>,
        there: Vec<Placement>,
    ) -> Result<Self> {
        let mut crew = Crew::new(&job.work, registrar.ticket().clone(), false);
        for placement in there {
            crew.start_there(placement.host, placement.tasks.collect())?;
        }
        for task in here {
            crew.start_here(task, Output::Sink(Arc::clone(sink)))?;
        }
        Ok(Self {
            registrar,
            sink,
            assigned,
            crew,
            outcomes: BTreeMap::new(),
            errors: Vec::new(),
            unheard: Vec::new(),
            began: Instant::now(),
            failed_at: None,
            over_at: None,
            wish: Wish::GoOn,
        })
    }

    fn run(&mut self, wish: &dyn Fn() -> Wish) -> Result<Report> {
        while !self.crew.is_done() {
            self.events(Instant::now() + SLICE);
            self.hear();
            self.follow(wish());
            self.give_up();
        }
        // What the workers of other hosts wrote last came before their ends did.
        self.events(Instant::now());
        let interrupted = self.wish > Wish::GoOn;
        if self.errors.is_empty() && self.outcomes.values().all(Outcome::is_success) {
            // If hosts fall silent together, no agent is left to say why the job ended.
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
            tracing::warn!(
                lines = drained.dropped,
                "lines of workers were lost: this process could not keep up"
            );
        }
        for event in drained.records {
            match event {
                Event::Record(record) => self.sink.accept(record),
                Event::Assigned { world } => (self.assigned)(&world),
                Event::Lost { task, .. } => {
                    if let Some(host) = self.crew.elsewhere(task.0) {
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

    fn hear(&mut self) {
        for news in self.crew.news() {
            match news {
                News::Ended { task, outcome: Ok(outcome) } => {
                    self.outcomes.insert(task, outcome);
                }
                // The other agents learn of it from the registrar; their ends are waited for.
                News::Ended { outcome: Err(error), .. } => self.failed(error),
                News::Gone { error, .. } if self.over_at.is_some() || self.wish > Wish::GoOn => {
                    // What ended the job has a name already.
                    tracing::info!(%error, "a host ended without its last words");
                }
                News::Gone { error, begun, .. } => {
                    if begun {
                        self.abort(&error.told());
                    }
                    self.failed(error);
                }
            }
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

    /// Ends a job that cannot begin or continue, and the rest of a job that is over.
    fn give_up(&mut self) {
        let now = Instant::now();
        let passed =
            |since: Option<Instant>, limit| since.is_some_and(|since| now >= since + limit);
        let all_answered = self.crew.hosts.iter().all(|host| host.ready);
        if self.over_at.is_none()
            && self.failed_at.is_some()
            && (all_answered || passed(self.failed_at, OTHERS))
        {
            let reasons: Vec<String> = self.errors.iter().map(Error::told).collect();
            self.abort(&reasons.join("; "));
        }
        let (over, late) = (self.over_at.is_some(), passed(self.over_at, ENDING));
        let ending = over || self.wish > Wish::GoOn;
        for (host, _) in self.crew.hang_up(|host| ending && !host.ready) {
            // Nothing runs there that could end.
            let reason = format!("it has not answered within {:.1?}", self.began.elapsed());
            self.errors.push(Error::Host { host, reason });
        }
        let given_up = |host: &Elsewhere| late || (over && passed(host.silent_since, SILENT));
        for (host, tasks) in self.crew.hang_up(given_up) {
            tracing::info!(?tasks, host, "their ends are not waited for");
            self.unheard.push(Error::Host { host, reason: "its agent fell silent".to_owned() });
        }
    }

    fn follow(&mut self, wish: Wish) {
        if wish <= self.wish {
            return;
        }
        self.wish = wish;
        self.crew.follow(wish);
        if wish > Wish::Interrupt {
            self.abort("interrupted");
        }
    }
}
