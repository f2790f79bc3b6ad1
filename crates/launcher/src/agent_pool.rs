// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The agents of one job: threads on this host, and connections to the agents of other hosts.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farandole_registrar::Ticket;

use crate::agent::{Agent, OutputTarget};
use crate::conductor::{ConductorInput, StopLevel};
use crate::error::Result;
use crate::remote::{AgentNotice, RemoteAgent, RemoteTasks};
use crate::shell::RemoteShell;
use crate::worker_program::WorkerProgram;

/// All agents of one job. Dropping it ends them.
pub(crate) struct AgentPool<'a> {
    program: &'a WorkerProgram,
    ticket: Ticket,
    elastic: bool,
    agents: BTreeMap<u32, Agent>,
    hosts: Vec<RemoteAgent>,
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
        let agent = Agent::spawn_thread(self.program.local_agent_task(
            &self.ticket,
            task,
            output,
            self.elastic,
        ))?;
        self.agents.insert(task, agent);
        Ok(())
    }

    /// Connects to another host in the background, for these tasks; to this host if `is_local`: its
    /// agent is a separate process, which continues after the end of this one. Connections are
    /// numbered from 0.
    ///
    /// # Errors
    /// Like [`RemoteAgent::connect_agent`].
    pub(crate) fn connect_host(
        &mut self,
        host: String,
        tasks: Vec<u32>,
        is_local: bool,
    ) -> Result<()> {
        let mut tasks = self.program.remote_tasks(&self.ticket, host, tasks, self.elastic);
        if is_local {
            tasks = RemoteTasks {
                shell: RemoteShell::without_connecting_program(),
                detached: true,
                ..tasks
            };
        }
        let (number, sender) = (self.hosts.len(), self.sender.clone());
        // A job that is over receives no more notices.
        let on_event = move |notice| drop(sender.send((number, notice)));
        self.hosts.push(RemoteAgent::connect_agent(tasks, on_event)?);
        Ok(())
    }

    /// Returns the events since the last call, and when each connection was heard last, as the time
    /// since the start of the job.
    pub(crate) fn take_agent_events(&mut self, started_at: Instant) -> Vec<ConductorInput> {
        let mut events = Vec::new();
        self.agents.retain(|task, agent| match agent.wait_for_outcome(Duration::ZERO) {
            None => true,
            Some(Ok(outcome)) => {
                events.push(ConductorInput::WorkerEnded { task: *task, outcome });
                false
            }
            Some(Err(error)) => {
                events.push(ConductorInput::NoWorkers { tasks: vec![*task], error });
                false
            }
        });
        while let Ok((connection, notice)) = self.notices.try_recv() {
            events.push(match notice {
                AgentNotice::Ready => ConductorInput::ConnectionReady { connection },
                AgentNotice::WorkerEnded { task, outcome: Ok(outcome) } => {
                    ConductorInput::WorkerEnded { task: task.0, outcome }
                }
                AgentNotice::WorkerEnded { task, outcome: Err(error) } => {
                    ConductorInput::NoWorkers { tasks: vec![task.0], error }
                }
                AgentNotice::HostLost { error, .. } => {
                    ConductorInput::ConnectionLost { connection, error }
                }
                AgentNotice::AllReported => continue,
            });
        }
        events.extend(self.hosts.iter().enumerate().map(|(connection, host)| {
            let at = host.last_received_at().saturating_duration_since(started_at);
            ConductorInput::ConnectionActive { connection, at }
        }));
        events
    }

    /// Ends the worker of an agent of this process.
    pub(crate) fn cancel_worker(&self, task: u32, reason: &str) {
        if let Some(agent) = self.agents.get(&task) {
            agent.cancel_worker(reason);
        }
    }

    /// Closes a connection.
    pub(crate) fn close_connection(&self, connection: usize) {
        self.hosts[connection].close_connection();
    }

    /// Applies the caller's stop level to all agents.
    pub(crate) fn apply_stop_level(&self, level: StopLevel) {
        for host in &self.hosts {
            match level {
                StopLevel::Continue => {}
                StopLevel::Interrupt => host.interrupt_workers(),
                StopLevel::Terminate => host.terminate_workers(),
                StopLevel::Kill => host.kill_workers(),
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
