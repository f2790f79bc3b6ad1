// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An elastic job: executes the decisions of the registrar.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_config::Config;
use farandole_registrar::{Elastic, Event, Journal, Options, Registrar, Resumed};
use farandole_telemetry::Sink;
use farandole_world::{TaskId, World};

use super::discovery::Discovery;
use super::tally::Tally;
use super::watch::{Found, Watch};
use crate::agent::Output;
use crate::crew::{Crew, Elsewhere, News, Wish};
use crate::error::{Error, Result};
use crate::report::Report;
use crate::work::Work;

/// Interval at which the caller is asked whether to stop.
const SLICE: Duration = Duration::from_millis(20);
/// Longest time in which a host whose agent fell silent must return with its last messages.
const SILENT: Duration = Duration::from_secs(2);
/// Longest time in which a host must end its workers.
const ENDING: Duration = Duration::from_secs(20);
/// Longest time in which a dismissed worker must end while the job continues: its script may have
/// to write files.
const LEAVING: Duration = Duration::from_secs(120);

/// The program to run while workers come and go.
#[derive(Clone, Debug)]
pub struct ElasticJob {
    /// Number of workers, and the limits of the job.
    pub elastic: Elastic,
    /// The program of each worker.
    pub work: Work,
    /// The file from which another process continues the job after this one was killed, if there is
    /// one.
    pub journal: Option<PathBuf>,
}

/// Something that a user wants to know of.
#[derive(Clone, Copy, Debug)]
pub enum Happening<'a> {
    /// A world is at work.
    World {
        /// The world.
        world: &'a World,
        /// The host of each worker, as it was discovered, by task.
        hosts: &'a BTreeMap<u32, String>,
    },
    /// A job of an earlier launcher is continued.
    Resumed {
        /// Its workers.
        workers: usize,
    },
    /// A worker, or a host, is out, or could not be used; in a sentence.
    Loss(&'a str),
}

/// Hears of them.
type Heard<'a> = dyn Fn(Happening<'_>) + 'a;

impl ElasticJob {
    /// Returns the rules of the configuration for a first world of `num_proc`. With spares and
    /// without a maximum, `num_proc` is the maximum.
    ///
    /// # Errors
    /// `Usage` for numbers that contradict each other, by their flags.
    pub fn rules(num_proc: u32, config: &Config) -> Result<Elastic> {
        let spares = u32::try_from(config.spares).unwrap_or(u32::MAX);
        let unbounded = if spares > 0 { num_proc } else { u32::MAX };
        let rules = Elastic {
            first: num_proc,
            least: config.min_num_proc.unwrap_or(num_proc),
            most: config.max_num_proc.unwrap_or(unbounded),
            spares,
            timeout: config.elastic_timeout,
            reset_limit: config.reset_limit,
            cooldown: (config.blacklist_cooldown_range.least, config.blacklist_cooldown_range.most),
        };
        let Elastic { first, least, most, .. } = rules;
        let wrong = |reason| Err(Error::Usage { reason });
        if least == 0 || first == 0 {
            return wrong(
                "an elastic job has at least one process: --num-proc and --min-num-proc".to_owned(),
            );
        }
        if least > first {
            return wrong(format!("--min-num-proc ({least}) is larger than --num-proc ({first})"));
        }
        if most < first {
            return wrong(format!("--max-num-proc ({most}) is smaller than --num-proc ({first})"));
        }
        Ok(rules)
    }

    /// Runs the command on the hosts that `discovery` finds, until it has returned on every rank of
    /// one world, or the job has failed, or `wish` says so. Lines of the workers go to `sink`.
    ///
    /// # Errors
    /// `Discovery` when hosts cannot be found at first; `Usage` for an empty command, or fewer
    /// slots on hosts that do not change than processes; `Registrar`, `System`.
    pub fn run(
        &self,
        discovery: Box<dyn Discovery>,
        sink: &Arc<dyn Sink>,
        wish: &dyn Fn() -> Wish,
        heard: &Heard<'_>,
    ) -> Result<Report> {
        self.work.check()?;
        // Before anything is started: another launcher may use it.
        let purpose = self.work.command.join(" ");
        let journal = self.journal.as_ref().map(|path| Journal::open(path, &purpose));
        let journal = journal.transpose().map_err(of_registrar)?;
        let lasting = journal.is_some();
        let fixed = discovery.is_fixed();
        let watch = Watch::start(discovery)?;
        let Some(found) = first(&watch, wish)? else { return Ok(Tally::default().report(true)) };
        let mut options = Options::from_config(self.elastic.first, &self.work.config);
        if fixed {
            self.check_slots(&found)?;
            if found.only_here() {
                // No other process needs to connect to it.
                options.host = Some("127.0.0.1".to_owned());
                options.bind = String::new();
            }
        }
        let registrar =
            Registrar::start_kept(options, &self.elastic, journal).map_err(of_registrar)?;
        let mut conduct = Conduct {
            registrar: &registrar,
            sink,
            heard,
            crew: Crew::new(&self.work, registrar.ticket().clone(), true),
            found: Found::default(),
            hosts: BTreeMap::new(),
            lasting,
            adopted: BTreeSet::new(),
            hearing: ENDING.max(self.work.config.peer_timeout),
            tally: Tally::default(),
            ending: BTreeMap::new(),
            silent: BTreeMap::new(),
            over_at: None,
            wish: Wish::GoOn,
        };
        conduct.adopt();
        let ended = conduct.run(found, &watch, wish);
        drop(conduct);
        drop(watch);
        registrar.close();
        ended
    }

    /// Hosts that do not change must have room for all processes at the beginning.
    fn check_slots(&self, found: &Found) -> Result<()> {
        let slots: u64 = found.hosts.iter().map(|host| u64::from(host.slots)).sum();
        let first = self.elastic.first;
        if u64::from(first) <= slots {
            return Ok(());
        }
        Err(Error::Usage {
            reason: format!(
                "Requested more processes ({first}) than there are available slots ({slots})"
            ),
        })
    }
}

fn of_registrar(source: farandole_registrar::Error) -> Error {
    Error::Begin { source: Box::new(source) }
}

/// Returns the hosts there are at first; `None` when the caller no longer wants to know.
fn first(watch: &Watch, wish: &dyn Fn() -> Wish) -> Result<Option<Found>> {
    loop {
        match watch.next(SLICE) {
            Some(Ok(found)) => return Ok(Some(found)),
            Some(Err(reason)) => return Err(Error::Discovery { reason }),
            None if wish() > Wish::GoOn => return Ok(None),
            None => {}
        }
    }
}

/// A running job.
struct Conduct<'a> {
    registrar: &'a Registrar,
    sink: &'a Arc<dyn Sink>,
    heard: &'a Heard<'a>,
    crew: Crew<'a>,
    found: Found,
    /// Host of each worker.
    hosts: BTreeMap<u32, String>,
    /// Whether agents of this host are separate processes, which continue without this one.
    lasting: bool,
    /// Workers of an earlier launcher whose ends are not known.
    adopted: BTreeSet<u32>,
    /// Longest time in which agents must hear that the job is over and report their workers' ends.
    hearing: Duration,
    tally: Tally,
    /// Workers that were told to end, and when.
    ending: BTreeMap<u32, Instant>,
    /// Workers whose agents were lost, and when.
    silent: BTreeMap<u32, Instant>,
    over_at: Option<Instant>,
    wish: Wish,
}

impl Conduct<'_> {
    /// Takes over the workers and the world of an earlier launcher.
    fn adopt(&mut self) {
        let Some(Resumed { workers, world }) = self.registrar.resumed().cloned() else { return };
        (self.heard)(Happening::Resumed { workers: workers.len() });
        self.adopted = workers.keys().map(|task| task.0).collect();
        self.hosts.extend(workers.into_iter().map(|(task, host)| (task.0, host)));
        if let Some(world) = world {
            self.tally.assigned(world);
        }
    }

    fn is_done(&self) -> bool {
        self.crew.is_done() && self.adopted.is_empty()
    }

    fn run(&mut self, found: Found, watch: &Watch, wish: &dyn Fn() -> Wish) -> Result<Report> {
        self.tell_hosts(found)?;
        while !(self.is_done() && (self.over_at.is_some() || self.wish > Wish::GoOn)) {
            self.events(Instant::now() + SLICE);
            while let Some(Ok(found)) = watch.next(Duration::ZERO) {
                self.tell_hosts(found)?;
            }
            self.hear();
            self.follow(wish());
            self.give_up();
        }
        // What the workers of other hosts wrote last came before their ends did.
        self.events(Instant::now());
        Ok(std::mem::take(&mut self.tally).report(self.wish > Wish::GoOn))
    }

    fn tell_hosts(&mut self, found: Found) -> Result<()> {
        let hosts: Vec<(String, u32)> =
            found.hosts.iter().map(|host| (host.host.clone(), host.slots)).collect();
        tracing::info!(?hosts, "these hosts were found");
        self.found = found;
        self.registrar.hosts(&hosts).map_err(of_registrar)
    }

    /// Takes what the registrar has decided and heard.
    fn events(&mut self, deadline: Instant) {
        // Made in this process, so it is not a fork's.
        let Ok(drained) = self.registrar.events(deadline) else { return };
        if drained.dropped > 0 {
            tracing::warn!(
                lines = drained.dropped,
                "lines of workers were lost: this process could not keep up"
            );
        }
        let mut starting: Vec<(String, Vec<u32>)> = Vec::new();
        for event in drained.records {
            match event {
                Event::Record(record) => self.sink.accept(record),
                Event::Start { task, host } => match starting.last_mut() {
                    Some((last, tasks)) if *last == host => tasks.push(task.0),
                    _ => starting.push((host, vec![task.0])),
                },
                Event::Stop { task, reason } => self.end(task.0, &reason),
                Event::Dismissed { task, reason } => {
                    tracing::info!(task = task.0, reason, "a worker may go");
                    self.ending.insert(task.0, Instant::now());
                }
                Event::Assigned { world } => {
                    (self.heard)(Happening::World { world: &world, hosts: &self.hosts });
                    self.tally.assigned(world);
                }
                Event::Exited { task, exit, .. } => {
                    self.silent.remove(&task.0);
                    self.adopted.remove(&task.0);
                    self.tally.exited(task.0, &exit);
                }
                Event::Result { task, data, .. } => self.tally.returned(task.0, data),
                Event::Lost { task, rank, reason } => {
                    self.lost(task.0, rank.map(|rank| rank.0), &reason)
                }
                Event::Finished { .. } => {
                    self.tally.finished();
                    self.over();
                }
                Event::Aborted { verdict, rank } => {
                    self.tally.aborted(verdict, rank);
                    self.over();
                }
                _ => {}
            }
        }
        for (host, tasks) in starting {
            self.start(host, tasks);
        }
    }

    fn start(&mut self, host: String, tasks: Vec<u32>) {
        if self.over_at.is_some() || self.wish > Wish::GoOn {
            return;
        }
        self.hosts.extend(tasks.iter().map(|task| (*task, host.clone())));
        let here = self.found.is_here(&host);
        if !here || self.lasting {
            let started = if here {
                self.crew.start_apart(host, tasks.clone())
            } else {
                self.crew.start_there(host, tasks.clone())
            };
            if let Err(error) = started {
                self.not_started(tasks, &error);
            }
            return;
        }
        for task in tasks {
            if let Err(error) = self.crew.start_here(task, Output::Registrar) {
                self.not_started([task], &error);
            }
        }
    }

    /// Lets the registrar know that these have no worker, or no longer one that anybody can reach.
    fn not_started(&mut self, tasks: impl IntoIterator<Item = u32>, error: &Error) {
        let reason = error.told();
        for task in tasks {
            if !self.ending.contains_key(&task) {
                // Made in this process, so it is not a fork's.
                drop(self.registrar.not_started(TaskId(task), &reason));
            }
        }
    }

    fn end(&mut self, task: u32, reason: &str) {
        self.ending.insert(task, Instant::now());
        // Agents on other hosts get it from the registrar.
        if let Some(agent) = self.crew.agents.get(&task) {
            agent.cancel(reason);
        }
    }

    fn lost(&mut self, task: u32, rank: Option<u32>, reason: &str) {
        if !self.tally.has_ended(task) {
            self.silent.insert(task, Instant::now());
        }
        let host = self.hosts.get(&task).map_or("an unknown host", String::as_str);
        let who = match rank {
            Some(rank) => format!("rank {rank} on {host}"),
            None => format!("a worker on {host}"),
        };
        (self.heard)(Happening::Loss(&format!("{who} {reason}")));
    }

    /// Ends all workers that still run.
    fn over(&mut self) {
        self.over_at.get_or_insert_with(Instant::now);
        for (task, agent) in &self.crew.agents {
            if !self.tally.has_ended(*task) {
                agent.cancel("the job is over");
            }
        }
    }

    fn hear(&mut self) {
        let over = self.over_at.is_some() || self.wish > Wish::GoOn;
        for news in self.crew.news() {
            match news {
                News::Ended { task, outcome: Ok(outcome) } => self.tally.ended(task, outcome),
                News::Ended { task, outcome: Err(error) } if over => {
                    tracing::info!(task, %error, "a worker ended without its last words");
                }
                News::Gone { error, .. } if over => {
                    tracing::info!(%error, "a host ended without its last words");
                }
                News::Ended { task, outcome: Err(error) } => self.not_started([task], &error),
                News::Gone { tasks, error, .. } => self.not_started(tasks, &error),
            }
        }
    }

    /// Ends connections to hosts that will send nothing any more.
    fn give_up(&mut self) {
        let now = Instant::now();
        let passed =
            |since: Option<&Instant>, limit| since.is_some_and(|since| now >= *since + limit);
        let late = passed(self.over_at.as_ref(), ENDING);
        let (silent, ending) = (&self.silent, &self.ending);
        let over = self.over_at.is_some();
        let limit = if over { ENDING } else { LEAVING };
        let gone = |task: &u32| passed(silent.get(task), SILENT) || passed(ending.get(task), limit);
        let unheard = passed(self.over_at.as_ref(), self.hearing);
        self.adopted.retain(|task| !unheard && !gone(task));
        let given_up = |host: &Elsewhere| late || host.open.iter().all(&gone);
        for (host, tasks) in self.crew.hang_up(given_up) {
            tracing::info!(?tasks, host, "their ends are not waited for");
        }
    }

    fn follow(&mut self, wish: Wish) {
        if wish <= self.wish {
            return;
        }
        self.wish = wish;
        // The job is not wanted any more, also if this process is killed while the workers end.
        self.registrar.end_journal();
        self.crew.follow(wish);
        // Agents of an earlier launcher have no connection but the one to the registrar.
        if wish > Wish::Interrupt || !self.adopted.is_empty() {
            // Made in this process, so it is not a fork's.
            drop(self.registrar.abort("interrupted"));
        }
    }
}
