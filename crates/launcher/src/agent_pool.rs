// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agents of one job: threads on this host, and connections to the agents of other hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farandole_registrar::Ticket;

use crate::agent::{Agent, OutputTarget, WorkerOutcome};
use crate::error::{Error, Result};
use crate::remote::{AgentNotice, RemoteAgent, RemoteTasks};
use crate::shell::RemoteShell;
use crate::worker_program::WorkerProgram;

/// The degree to which the caller wants to stop a running job. It can only increase: a lower level
/// after a higher one has no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopLevel {
    /// The job continues.
    #[default]
    Continue,
    /// The job ends, with time for a last checkpoint: workers get SIGINT.
    Interrupt,
    /// The job ends soon: workers get SIGTERM.
    Terminate,
    /// The job ends at once: workers get SIGKILL.
    Kill,
}

/// A connection to another host, and its reported state.
pub(crate) struct RemoteHost {
    pub(crate) agent: RemoteAgent,
    /// Tasks whose end was not reported.
    pub(crate) open_tasks: BTreeSet<u32>,
    /// Whether the agent there has its order.
    pub(crate) ready: bool,
    /// The time since which no more messages from there are expected.
    pub(crate) silent_since: Option<Instant>,
}

/// An event of an agent.
pub(crate) enum AgentPoolEvent {
    /// A worker ended, or could not be run.
    WorkerEnded { task: u32, outcome: Result<WorkerOutcome> },
    /// A connection ended before the ends of all its tasks were reported.
    HostLost {
        tasks: BTreeSet<u32>,
        error: Error,
        /// Whether the agent there had received its order.
        begun: bool,
    },
}

/// All agents of one job. Dropping it ends them.
pub(crate) struct AgentPool<'a> {
    program: &'a WorkerProgram,
    ticket: Ticket,
    elastic: bool,
    pub(crate) agents: BTreeMap<u32, Agent>,
    pub(crate) hosts: Vec<RemoteHost>,
    sender: mpsc::Sender<(usize, AgentNotice)>,
    notices: mpsc::Receiver<(usize, AgentNotice)>,
}

impl<'a> AgentPool<'a> {
    pub(crate) fn new(work: &'a WorkerProgram, ticket: Ticket, elastic: bool) -> Self {
        let (sender, notices) = mpsc::channel();
        Self {
            program: work,
            ticket,
            elastic,
            agents: BTreeMap::new(),
            hosts: Vec::new(),
            sender,
            notices,
        }
    }

    /// Starts the agent of a task of this host.
    ///
    /// # Errors
    /// Like [`Agent::spawn_thread`].
    pub(crate) fn start_local_agent(&mut self, task: u32, output: OutputTarget) -> Result<()> {
        let agent =
            Agent::spawn_thread(self.program.local_task(&self.ticket, task, output, self.elastic))?;
        self.agents.insert(task, agent);
        Ok(())
    }

    /// Connects to another host in the background, for these tasks.
    ///
    /// # Errors
    /// Like [`RemoteAgent::connect_agent`].
    pub(crate) fn start_remote_agents(&mut self, host: String, tasks: Vec<u32>) -> Result<()> {
        self.connect_host(self.program.remote_tasks(&self.ticket, host, tasks, self.elastic))
    }

    /// Like [`AgentPool::start_remote_agents`], for this host: the agent is a separate process,
    /// which continues after the end of this one.
    ///
    /// # Errors
    /// Like [`RemoteAgent::connect_agent`].
    pub(crate) fn start_detached_agents(&mut self, host: String, tasks: Vec<u32>) -> Result<()> {
        let tasks = self.program.remote_tasks(&self.ticket, host, tasks, self.elastic);
        self.connect_host(RemoteTasks {
            shell: RemoteShell::without_connection(),
            detached: true,
            ..tasks
        })
    }

    fn connect_host(&mut self, tasks: RemoteTasks) -> Result<()> {
        let (number, sender) = (self.hosts.len(), self.sender.clone());
        let open = tasks.tasks.iter().copied().collect();
        // A job that is over receives no more notices.
        let on_event = move |notice| drop(sender.send((number, notice)));
        let remote = RemoteAgent::connect_agent(tasks, on_event)?;
        self.hosts.push(RemoteHost {
            agent: remote,
            open_tasks: open,
            ready: false,
            silent_since: None,
        });
        Ok(())
    }

    /// Returns the events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<AgentPoolEvent> {
        let mut events = Vec::new();
        self.agents.retain(|task, agent| match agent.wait_for_outcome(Duration::ZERO) {
            None => true,
            Some(outcome) => {
                events.push(AgentPoolEvent::WorkerEnded { task: *task, outcome });
                false
            }
        });
        while let Ok((number, notice)) = self.notices.try_recv() {
            let host = &mut self.hosts[number];
            match notice {
                AgentNotice::Ready => host.ready = true,
                AgentNotice::WorkerEnded { task, outcome } => {
                    // The registrar may have reported this end before, and each end counts once.
                    if host.open_tasks.remove(&task.0) {
                        events.push(AgentPoolEvent::WorkerEnded { task: task.0, outcome });
                    }
                }
                AgentNotice::HostLost { error, .. } => {
                    // Marked as ready, because no answer of this host is to be waited for any more.
                    let begun = std::mem::replace(&mut host.ready, true);
                    let tasks = std::mem::take(&mut host.open_tasks);
                    if !tasks.is_empty() {
                        events.push(AgentPoolEvent::HostLost { tasks, error, begun });
                    }
                }
                AgentNotice::AllReported => {}
            }
        }
        events
    }

    /// Returns the connection that has a task, if the task's end was not reported.
    pub(crate) fn host_of_task(&mut self, task: u32) -> Option<&mut RemoteHost> {
        self.hosts.iter_mut().find(|host| host.open_tasks.contains(&task))
    }

    /// Stops waiting for a connection's report about the end of a task.
    pub(crate) fn release_task(&mut self, task: u32) {
        for host in &mut self.hosts {
            host.open_tasks.remove(&task);
        }
    }

    /// Closes the connections for which `given_up` returns true. Returns their host names, and the
    /// tasks whose ends will not be reported.
    pub(crate) fn close_connections(
        &mut self,
        given_up: impl Fn(&RemoteHost) -> bool,
    ) -> Vec<(String, BTreeSet<u32>)> {
        let mut ended = Vec::new();
        for host in self.hosts.iter_mut().filter(|host| !host.open_tasks.is_empty()) {
            if given_up(host) {
                host.agent.close_connection();
                ended.push((
                    host.agent.host_name().to_owned(),
                    std::mem::take(&mut host.open_tasks),
                ));
            }
        }
        ended
    }

    /// Returns whether the ends of all tasks were reported.
    pub(crate) fn have_all_tasks_ended(&self) -> bool {
        self.agents.is_empty() && self.hosts.iter().all(|host| host.open_tasks.is_empty())
    }

    /// Applies the caller's stop level to all agents.
    pub(crate) fn apply_stop_level(&self, level: StopLevel) {
        for host in &self.hosts {
            match level {
                StopLevel::Continue => {}
                StopLevel::Interrupt => host.agent.interrupt_workers(),
                StopLevel::Terminate => host.agent.terminate_workers(),
                StopLevel::Kill => host.agent.kill_workers(),
            }
        }
        for agent in self.agents.values() {
            match level {
                StopLevel::Continue => {}
                StopLevel::Interrupt => agent.interrupt_worker("interrupted"),
                StopLevel::Terminate => agent.cancel_worker("interrupted"),
                StopLevel::Kill => agent.kill_worker("interrupted"),
            }
        }
    }
}
