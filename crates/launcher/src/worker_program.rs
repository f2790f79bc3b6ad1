// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The program or function that every worker of a job runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use farandole_config::Config;
use farandole_registrar::Ticket;
use farandole_world::TaskId;

use crate::agent::{AgentTask, OutputTarget};
use crate::environment::forwarded_environment;
use crate::error::{Error, Result};
use crate::remote::RemoteTasks;
use crate::shell::RemoteShell;
use crate::suspension::SuspensionRequest;

/// The program of every worker of a job, and the program that connects to other hosts.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes a variable.
    pub environment: BTreeMap<String, Option<String>>,
    /// Bytes that each worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Arc<Vec<u8>>>,
    /// Whether workers may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// The program that connects to other hosts.
    pub shell: RemoteShell,
    /// The Python interpreter with the package, on other hosts.
    pub python: String,
    /// Version of this process's own interpreter, if workers load objects that it pickled: then the
    /// workers' version must be the same.
    pub same_python: Option<String>,
    /// Time for which workers continue without the launcher, which may be restarted; zero if it may
    /// not be.
    pub outage: Duration,
    /// The request that the ranks commit and end, which the caller may make at any time.
    pub suspension: SuspensionRequest,
    /// The configuration of this process.
    pub config: Config,
}

impl WorkerProgram {
    /// Returns a program for this host only, without payload and result.
    pub fn for_this_host(
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self {
            command,
            environment,
            payload: None,
            collect_result: false,
            shell: RemoteShell::default(),
            python: String::new(),
            same_python: None,
            outage: Duration::ZERO,
            suspension: SuspensionRequest::default(),
            config,
        }
    }

    /// # Errors
    /// `Usage` when the command is empty.
    pub(crate) fn check_command(&self) -> Result<()> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(Error::Usage { reason: "the command is empty".to_owned() });
        }
        Ok(())
    }

    /// Returns a task of this host.
    pub(crate) fn local_agent_task(
        &self,
        ticket: &Ticket,
        task: u32,
        output: OutputTarget,
        elastic: bool,
    ) -> AgentTask {
        AgentTask {
            ticket: ticket.clone(),
            task: TaskId(task),
            host: None,
            attempt: 0,
            command: self.command.clone(),
            environment: self.environment.clone(),
            payload: self.payload.as_deref().cloned(),
            collect_result: self.collect_result,
            elastic,
            wait_for_peers: false,
            output,
            start_timeout: self.config.start_timeout,
            peer_timeout: self.config.peer_timeout,
            outage: self.outage,
        }
    }

    /// Returns the tasks of another host.
    pub(crate) fn remote_tasks(
        &self,
        ticket: &Ticket,
        host: String,
        tasks: Vec<u32>,
        elastic: bool,
    ) -> RemoteTasks {
        let mut environment = forwarded_environment();
        // The caller's changes win over the environment of this process.
        environment.extend(self.environment.clone());
        // The agent itself must import the package, before it gets the variables of its workers.
        let python_path = environment.get("PYTHONPATH").cloned().flatten();
        RemoteTasks {
            host,
            shell: self.shell.clone(),
            python: self.python.clone(),
            python_path,
            same_python: self.same_python.clone(),
            ticket: ticket.clone(),
            tasks,
            elastic,
            command: self.command.clone(),
            environment,
            folder: std::env::current_dir()
                .ok()
                .and_then(|folder| folder.into_os_string().into_string().ok()),
            payload: self.payload.clone(),
            collect_result: self.collect_result,
            start_timeout: self.config.start_timeout,
            peer_timeout: self.config.peer_timeout,
            outage: self.outage,
            detached: false,
        }
    }
}
