// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! An elastic job: executes the decisions of the registrar.

use std::path::PathBuf;
use std::sync::Arc;

use farandole_config::Config;
use farandole_registrar::{ElasticOptions, MembershipJournal, Registrar, RegistrarOptions};
use farandole_telemetry::RecordSink;

use super::discovery::DiscoverySource;
use super::host_watcher::{DiscoveredHosts, HostWatcher};
use crate::agent::WorkerOutcome;
use crate::conductor::StopLevel;
use crate::error::{Error, Result};
use crate::job_run::{
    ElasticJobUpdate, JobRun, STOP_POLL_INTERVAL, job_start_error, listen_on_loopback,
};
use crate::report::JobReport;
use crate::worker_program::WorkerProgram;

/// The program to run, and the limits on its number of workers.
#[derive(Clone, Debug)]
pub struct ElasticJob {
    /// Number of workers, and the limits of the job.
    pub rules: ElasticOptions,
    /// The program of each worker.
    pub program: WorkerProgram,
    /// The file from which another process can continue the job after this one was killed, if any.
    pub journal: Option<PathBuf>,
}

impl ElasticJob {
    /// Returns the rules of the configuration for a first world of `num_proc` workers. With spares
    /// and without a maximum, the maximum is `num_proc`.
    ///
    /// # Errors
    /// `Usage` for numbers that contradict each other; the text names their flags.
    pub fn elastic_rules_from_config(num_proc: u32, config: &Config) -> Result<ElasticOptions> {
        let spares = u32::try_from(config.spares).unwrap_or(u32::MAX);
        // Without a maximum, spares would join the world instead of waiting.
        let unbounded = if spares > 0 { num_proc } else { u32::MAX };
        let rules = ElasticOptions {
            first: num_proc,
            min_workers: config.min_num_proc.unwrap_or(num_proc),
            max_workers: config.max_num_proc.unwrap_or(unbounded),
            spares,
            timeout: config.elastic_timeout,
            reset_limit: config.reset_limit,
            cooldown: (config.blacklist_cooldown_range.least, config.blacklist_cooldown_range.most),
        };
        let ElasticOptions { first, min_workers, max_workers, .. } = rules;
        let wrong = |reason| Err(Error::Usage { reason });
        if min_workers == 0 || first == 0 {
            return wrong(
                "an elastic job has at least one process: --num-proc and --min-num-proc".to_owned(),
            );
        }
        if min_workers > first {
            return wrong(format!(
                "--min-num-proc ({min_workers}) is larger than --num-proc ({first})"
            ));
        }
        if max_workers < first {
            return wrong(format!(
                "--max-num-proc ({max_workers}) is smaller than --num-proc ({first})"
            ));
        }
        Ok(rules)
    }

    /// Runs the command on the hosts that `discovery` finds, until it has returned on every rank of
    /// one world, or the job has failed, or `stop_level` asks to stop. Lines of the workers go to
    /// `sink`.
    ///
    /// # Errors
    /// `Discovery` when the first discovery fails; `Usage` for an empty command, or if hosts that
    /// do not change have fewer slots than processes; `Registrar`, `System`.
    pub fn run(
        &self,
        discovery: Box<dyn DiscoverySource>,
        sink: &Arc<dyn RecordSink>,
        stop_level: &dyn Fn() -> StopLevel,
        observer: &dyn Fn(ElasticJobUpdate<'_>),
    ) -> Result<JobReport> {
        self.program.check_command()?;
        // Opened first: this fails if another launcher uses the journal.
        let purpose = self.program.command.join(" ");
        let journal =
            self.journal.as_ref().map(|path| MembershipJournal::open_or_create(path, &purpose));
        let journal = journal.transpose().map_err(job_start_error)?;
        let lasting = journal.is_some();
        let fixed = discovery.is_fixed();
        let watch = HostWatcher::spawn_thread(discovery)?;
        let Some(found) = wait_for_first_hosts(&watch, stop_level)? else {
            let outcome = WorkerOutcome::outcome_without_worker("interrupted".to_owned());
            return Ok(JobReport { outcomes: vec![outcome], interrupted: true });
        };
        let mut options = RegistrarOptions::from_config(self.rules.first, &self.program.config);
        if fixed {
            self.check_enough_slots(&found)?;
            if found.are_all_hosts_local() {
                listen_on_loopback(&mut options);
            }
        }
        let registrar = Registrar::start_with_journal(options, &self.rules, journal)
            .map_err(job_start_error)?;
        let mut job_run =
            JobRun::new(&self.program, &registrar, (sink, observer), Some(&watch), lasting);
        job_run.adopt_workers();
        job_run.report_hosts_to_registrar(found)?;
        // Before the registrar closes: agents end their workers on the order that this sends.
        let ended = job_run.run_until_done(stop_level);
        drop(watch);
        registrar.close();
        ended
    }

    /// Checks that hosts that do not change have slots for all processes of the first world.
    fn check_enough_slots(&self, found: &DiscoveredHosts) -> Result<()> {
        let slots: u64 = found.hosts.iter().map(|host| u64::from(host.slots)).sum();
        let first = self.rules.first;
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

/// Returns the first discovered hosts; `None` when the caller wants to stop.
fn wait_for_first_hosts(
    watch: &HostWatcher,
    stop_level: &dyn Fn() -> StopLevel,
) -> Result<Option<DiscoveredHosts>> {
    loop {
        match watch.wait_for_host_change(STOP_POLL_INTERVAL) {
            Some(Ok(found)) => return Ok(Some(found)),
            Some(Err(reason)) => return Err(Error::Discovery { reason }),
            None if stop_level() > StopLevel::Continue => return Ok(None),
            None => {}
        }
    }
}
