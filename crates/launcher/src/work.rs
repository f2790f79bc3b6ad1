// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The program or function that every worker of a job runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use farandole_config::Config;
use farandole_registrar::Ticket;
use farandole_world::TaskId;

use crate::agent::{Output, Task};
use crate::environment::forwarded_environment;
use crate::error::{Error, Result};
use crate::remote::RemoteTasks;
use crate::shell::Shell;

/// The program of every worker of a job, and the way to reach other hosts.
#[derive(Clone, Debug)]
pub struct Work {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Changes to the inherited environment; `None` removes.
    pub environment: BTreeMap<String, Option<String>>,
    /// Bytes that each worker reads from `FARANDOLE_PAYLOAD_FD`, if any.
    pub payload: Option<Arc<Vec<u8>>>,
    /// Whether workers may write a result to `FARANDOLE_RESULT_FD`.
    pub collect_result: bool,
    /// The program that connects to other hosts.
    pub shell: Shell,
    /// The Python interpreter that has the package on other hosts.
    pub python: String,
    /// Version of this process's own interpreter, where workers read what it has pickled: then
    /// theirs must be the same.
    pub same_python: Option<String>,
    /// Time for which workers continue without the launcher, which may be started again; zero if it
    /// may not.
    pub outage: Duration,
    /// The configuration of this process.
    pub config: Config,
}

impl Work {
    /// Returns a program of this host alone, without payload and result.
    pub fn program(
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self {
            command,
            environment,
            payload: None,
            collect_result: false,
            shell: Shell::default(),
            python: String::new(),
            same_python: None,
            outage: Duration::ZERO,
            config,
        }
    }

    /// # Errors
    /// `Usage` when there is nothing to run.
    pub(crate) fn check(&self) -> Result<()> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(Error::Usage { reason: "the command is empty".to_owned() });
        }
        Ok(())
    }

    /// Returns a task of this host.
    pub(crate) fn here(&self, ticket: &Ticket, task: u32, output: Output, elastic: bool) -> Task {
        Task {
            ticket: ticket.clone(),
            task: TaskId(task),
            host: None,
            attempt: 0,
            command: self.command.clone(),
            environment: self.environment.clone(),
            payload: self.payload.as_deref().cloned(),
            collect_result: self.collect_result,
            elastic,
            together: false,
            output,
            start_timeout: self.config.start_timeout,
            peer_timeout: self.config.peer_timeout,
            outage: self.outage,
        }
    }

    /// Tasks of another host.
    pub(crate) fn there(
        &self,
        ticket: &Ticket,
        host: String,
        tasks: Vec<u32>,
        elastic: bool,
    ) -> RemoteTasks {
        let mut environment = forwarded_environment();
        environment.extend(self.environment.clone());
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
            lasting: false,
        }
    }
}
