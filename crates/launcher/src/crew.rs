// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agents of one job: those of this host in threads, those of other hosts behind connections.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farandole_registrar::Ticket;

use crate::agent::{Agent, Outcome, Output};
use crate::error::{Error, Result};
use crate::remote::{Notice, Remote, RemoteTasks};
use crate::shell::Shell;
use crate::work::Work;

/// The caller's wish for a running job. Later wishes are harsher; an earlier one after a later one
/// changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// The job continues.
    #[default]
    GoOn,
    /// The job ends, with time for a last checkpoint: SIGINT to the workers.
    Interrupt,
    /// The job ends soon: SIGTERM.
    Terminate,
    /// The job ends now: SIGKILL.
    Kill,
}

/// A connection to another host, as far as it was heard of.
pub(crate) struct Elsewhere {
    pub(crate) remote: Remote,
    /// Tasks whose end was not heard of.
    pub(crate) open: BTreeSet<u32>,
    /// Its agent has its order.
    pub(crate) ready: bool,
    /// The time since which no message is expected from there.
    pub(crate) silent_since: Option<Instant>,
}

/// An event of an agent.
pub(crate) enum News {
    /// A worker ended, or could not be run.
    Ended { task: u32, outcome: Result<Outcome> },
    /// A connection ended before the ends of all its tasks were reported.
    Gone {
        tasks: BTreeSet<u32>,
        error: Error,
        /// Whether its agent had been given its order.
        begun: bool,
    },
}

/// All agents of one job. Dropping it ends them.
pub(crate) struct Crew<'a> {
    work: &'a Work,
    ticket: Ticket,
    elastic: bool,
    pub(crate) agents: BTreeMap<u32, Agent>,
    pub(crate) hosts: Vec<Elsewhere>,
    sender: mpsc::Sender<(usize, Notice)>,
    notices: mpsc::Receiver<(usize, Notice)>,
}

impl<'a> Crew<'a> {
    pub(crate) fn new(work: &'a Work, ticket: Ticket, elastic: bool) -> Self {
        let (sender, notices) = mpsc::channel();
        Self { work, ticket, elastic, agents: BTreeMap::new(), hosts: Vec::new(), sender, notices }
    }

    /// Starts the agent of a task of this host.
    ///
    /// # Errors
    /// Like [`Agent::start`].
    pub(crate) fn start_here(&mut self, task: u32, output: Output) -> Result<()> {
        let agent = Agent::start(self.work.here(&self.ticket, task, output, self.elastic))?;
        self.agents.insert(task, agent);
        Ok(())
    }

    /// Starts to connect to another host, for these tasks.
    ///
    /// # Errors
    /// Like [`Remote::start`].
    pub(crate) fn start_there(&mut self, host: String, tasks: Vec<u32>) -> Result<()> {
        self.connect(self.work.there(&self.ticket, host, tasks, self.elastic))
    }

    /// Like [`Crew::start_there`], for this host: the agent is a separate process, which continues
    /// without this one.
    ///
    /// # Errors
    /// Like [`Remote::start`].
    pub(crate) fn start_apart(&mut self, host: String, tasks: Vec<u32>) -> Result<()> {
        let tasks = self.work.there(&self.ticket, host, tasks, self.elastic);
        self.connect(RemoteTasks { shell: Shell::here(), lasting: true, ..tasks })
    }

    fn connect(&mut self, tasks: RemoteTasks) -> Result<()> {
        let (number, sender) = (self.hosts.len(), self.sender.clone());
        let open = tasks.tasks.iter().copied().collect();
        // A job that is over hears no more.
        let tell = move |notice| drop(sender.send((number, notice)));
        let remote = Remote::start(tasks, tell)?;
        self.hosts.push(Elsewhere { remote, open, ready: false, silent_since: None });
        Ok(())
    }

    /// Returns the events since the last call.
    pub(crate) fn news(&mut self) -> Vec<News> {
        let mut news = Vec::new();
        self.agents.retain(|task, agent| match agent.wait(Duration::ZERO) {
            None => true,
            Some(outcome) => {
                news.push(News::Ended { task: *task, outcome });
                false
            }
        });
        while let Ok((number, notice)) = self.notices.try_recv() {
            let host = &mut self.hosts[number];
            match notice {
                Notice::Ready => host.ready = true,
                Notice::Ended { task, outcome } => {
                    if host.open.remove(&task.0) {
                        news.push(News::Ended { task: task.0, outcome });
                    }
                }
                Notice::Gone { error, .. } => {
                    let begun = std::mem::replace(&mut host.ready, true);
                    let tasks = std::mem::take(&mut host.open);
                    if !tasks.is_empty() {
                        news.push(News::Gone { tasks, error, begun });
                    }
                }
                Notice::Done => {}
            }
        }
        news
    }

    /// Returns the connection that has a task, if its end was not heard of.
    pub(crate) fn elsewhere(&mut self, task: u32) -> Option<&mut Elsewhere> {
        self.hosts.iter_mut().find(|host| host.open.contains(&task))
    }

    /// Ends the connections that `given_up` says so of; their names, and the tasks whose ends will
    /// not be heard of.
    pub(crate) fn hang_up(
        &mut self,
        given_up: impl Fn(&Elsewhere) -> bool,
    ) -> Vec<(String, BTreeSet<u32>)> {
        let mut ended = Vec::new();
        for host in self.hosts.iter_mut().filter(|host| !host.open.is_empty()) {
            if given_up(host) {
                host.remote.hang_up();
                ended.push((host.remote.host().to_owned(), std::mem::take(&mut host.open)));
            }
        }
        ended
    }

    /// Returns whether all ends were reported.
    pub(crate) fn is_done(&self) -> bool {
        self.agents.is_empty() && self.hosts.iter().all(|host| host.open.is_empty())
    }

    /// Applies the caller's wish to all agents.
    pub(crate) fn follow(&self, wish: Wish) {
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
    }
}
