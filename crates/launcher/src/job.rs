// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A registrar, this host's agents, and an agent on each other host: `farandole run`.
//!
//! ```text
//! run --+-- Registrar <---------------- TLS ----------------+
//!       |-- Agent (thread) --> worker                       |
//!       '-- RemoteAgent --ssh--> serve_one_launcher --> Agent ... --'
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use farandole_config::Config;
use farandole_registrar::{Registrar, RegistrarOptions};
use farandole_telemetry::RecordSink;
use farandole_world::World;

use crate::conductor::StopLevel;
use crate::error::{Error, Result};
use crate::hosts::HostSlots;
use crate::job_run::{ElasticJobUpdate, JobRun, job_start_error, listen_on_loopback};
use crate::local_hosts::split_local_tasks;
use crate::report::JobReport;
use crate::worker_program::WorkerProgram;

/// The program to run, and the hosts.
#[derive(Clone, Debug)]
pub struct StaticJob {
    /// Number of processes.
    pub num_proc: u32,
    /// Hosts and their slots, in the order of ranks; an empty list means only this host.
    pub hosts: Vec<HostSlots>,
    /// The program of each process.
    pub program: WorkerProgram,
}

impl StaticJob {
    /// Returns a job that uses only this host.
    pub fn job_on_this_host(
        num_proc: u32,
        command: Vec<String>,
        environment: BTreeMap<String, Option<String>>,
        config: Config,
    ) -> Self {
        Self {
            num_proc,
            hosts: Vec::new(),
            program: WorkerProgram::for_this_host(command, environment, config),
        }
    }

    /// Like [`StaticJob::run_with_observer`], without an observer.
    ///
    /// # Errors
    /// Like [`StaticJob::run_with_observer`].
    pub fn run(
        &self,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
    ) -> Result<JobReport> {
        self.run_with_observer(sink, stop_level, &|_| {})
    }

    /// Runs the command until all processes have ended, or until one has failed and the others were
    /// ended, or until `stop_level` asks to stop. Lines of the workers go to `sink`; `assigned`
    /// receives the world when ranks are assigned.
    ///
    /// # Errors
    /// `Usage` for no process, an empty command or too few slots; `JobStart` without a registrar;
    /// `Host` and `Hosts` for hosts that cannot be used, or were lost; `Registrar`, `Spawn`,
    /// `System`.
    pub fn run_with_observer(
        &self,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
        assigned: &dyn Fn(&World),
    ) -> Result<JobReport> {
        if self.num_proc == 0 {
            return Err(Error::Usage { reason: "at least one process is needed".to_owned() });
        }
        self.program.check_command()?;
        let (local_tasks, remote_placements) = split_local_tasks(&self.hosts, self.num_proc)?;
        let mut options = RegistrarOptions::from_config(self.num_proc, &self.program.config);
        if remote_placements.is_empty() {
            listen_on_loopback(&mut options);
        }
        let registrar = Registrar::start_job(options).map_err(job_start_error)?;
        let observe = |update: ElasticJobUpdate<'_>| {
            if let ElasticJobUpdate::World { world, .. } = update {
                assigned(world);
            }
        };
        let mut job_run = JobRun::new(&self.program, &registrar, (sink, &observe), None, false);
        for placement in remote_placements {
            job_run.connect_host(placement.host, placement.tasks.collect(), false)?;
        }
        for task in local_tasks {
            job_run.start_local_agent(task)?;
        }
        let ended = job_run.run_until_done(stop_level);
        registrar.close();
        ended
    }
}
