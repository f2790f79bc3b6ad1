// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The loop of every job: passes what happens to the conductor, and carries out its decisions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_registrar::{JobEvent, Registrar, RegistrarOptions};
use farandole_telemetry::RecordSink;
use farandole_world::{Generation, TaskId, World};

use crate::agent::OutputTarget;
use crate::agent_pool::AgentPool;
use crate::conductor::{
    Conductor, ConductorAction, ConductorInput, ConductorRules, StopLevel, WorkerExitChannel,
};
use crate::elastic::host_watcher::{DiscoveredHosts, HostWatcher};
use crate::error::{Error, Result};
use crate::report::JobReport;
use crate::suspension::{SUSPENSION_KEY, SuspensionRequest};
use crate::worker_program::WorkerProgram;

/// Interval at which the caller is asked whether to stop.
// A user who presses Ctrl-C notices no delay, and the loop uses little processor time.
pub(crate) const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Shortest limit for agents that only the registrar hears to report their workers' ends.
const MIN_REPORT_TIMEOUT: Duration = Duration::from_secs(20);

/// An event of an elastic job for the user.
#[derive(Clone, Copy, Debug)]
pub enum ElasticJobUpdate<'a> {
    /// A world has started to work.
    World {
        /// The world.
        world: &'a World,
        /// The host of each worker under its discovered name, by task.
        hosts: &'a BTreeMap<u32, String>,
    },
    /// This process continues the job of an earlier launcher.
    Resumed {
        /// Number of workers.
        workers: usize,
    },
    /// A worker or a host was lost or could not be used; a sentence says which.
    Loss(&'a str),
}

/// Receives the updates of a job.
pub(crate) type JobObserver<'a> = dyn Fn(ElasticJobUpdate<'_>) + 'a;

/// A running job.
pub(crate) struct JobRun<'a> {
    registrar: &'a Registrar,
    sink: &'a Arc<dyn RecordSink>,
    observe: &'a JobObserver<'a>,
    agent_pool: AgentPool<'a>,
    started_at: Instant,
    conductor: Conductor,
    /// The discovery of an elastic job.
    watch: Option<&'a HostWatcher>,
    discovered: DiscoveredHosts,
    /// Whether agents of this host are separate processes, which continue without this one.
    detached_agents: bool,
    suspension: SuspensionRequest,
    /// The world whose ranks can read the request.
    suspended_generation: Option<Generation>,
}

pub(crate) fn job_start_error(source: farandole_registrar::Error) -> Error {
    Error::JobStart { source: Box::new(source) }
}

/// Makes a registrar that no other host needs to connect to.
pub(crate) fn listen_on_loopback(options: &mut RegistrarOptions) {
    options.host = Some("127.0.0.1".to_owned());
    // A bind address is for other hosts, and would win over `host`.
    options.bind = String::new();
}

impl<'a> JobRun<'a> {
    pub(crate) fn new(
        program: &'a WorkerProgram,
        registrar: &'a Registrar,
        (sink, observe): (&'a Arc<dyn RecordSink>, &'a JobObserver<'a>),
        watch: Option<&'a HostWatcher>,
        detached_agents: bool,
    ) -> Self {
        let elastic = watch.is_some();
        let rules = ConductorRules {
            elastic,
            collect_result: program.collect_result,
            exit_report_timeout: MIN_REPORT_TIMEOUT.max(program.config.peer_timeout),
        };
        Self {
            registrar,
            sink,
            observe,
            agent_pool: AgentPool::new(program, registrar.ticket().clone(), elastic),
            started_at: Instant::now(),
            conductor: Conductor::new(rules),
            watch,
            discovered: DiscoveredHosts::default(),
            detached_agents,
            suspension: program.suspension.clone(),
            suspended_generation: None,
        }
    }

    /// Takes over the workers and the world of an earlier launcher.
    pub(crate) fn adopt_workers(&mut self) {
        let Some(resumed) = self.registrar.resumed_job().cloned() else { return };
        (self.observe)(ElasticJobUpdate::Resumed { workers: resumed.workers.len() });
        for (task, host) in resumed.workers {
            self.conductor.expect_worker_end(task.0, WorkerExitChannel::RegistrarOnly);
            self.conductor.set_worker_host(task.0, host);
        }
        if let Some(world) = resumed.world {
            self.conductor.set_world(world);
        }
    }

    /// Starts the agent of a task of this host.
    ///
    /// # Errors
    /// Like [`AgentPool::start_local_agent`].
    pub(crate) fn start_local_agent(&mut self, task: u32) -> Result<()> {
        // Workers without a rank get theirs from the registrar, which knows it for each line.
        let output = match self.watch {
            Some(_) => OutputTarget::Registrar,
            None => OutputTarget::Sink(Arc::clone(self.sink)),
        };
        self.agent_pool.start_local_agent(task, output)?;
        self.conductor.expect_worker_end(task, WorkerExitChannel::Thread);
        Ok(())
    }

    /// Connects to a host in the background, for these tasks.
    ///
    /// # Errors
    /// Like [`AgentPool::connect_host`].
    pub(crate) fn connect_host(
        &mut self,
        host: String,
        tasks: Vec<u32>,
        is_local: bool,
    ) -> Result<()> {
        self.agent_pool.connect_host(host.clone(), tasks.clone(), is_local)?;
        self.conductor.expect_ends_from_connection(self.started_at.elapsed(), host, tasks);
        Ok(())
    }

    /// Reports the present hosts to the registrar, which orders workers there.
    ///
    /// # Errors
    /// `JobStart` in a forked process.
    pub(crate) fn report_hosts_to_registrar(&mut self, found: DiscoveredHosts) -> Result<()> {
        let hosts: Vec<(String, u32)> =
            found.hosts.iter().map(|host| (host.host.clone(), host.slots)).collect();
        tracing::info!(?hosts, "these hosts were found");
        self.discovered = found;
        self.registrar.update_hosts(&hosts).map_err(job_start_error)
    }

    /// Runs the job until it has ended, then ends its agents.
    ///
    /// # Errors
    /// Like [`Conductor::into_report`] and [`JobRun::report_hosts_to_registrar`].
    pub(crate) fn run_until_done(
        mut self,
        stop_level: &dyn Fn() -> StopLevel,
    ) -> Result<JobReport> {
        while !self.conductor.is_done() {
            let mut inputs = self.take_registrar_events(Instant::now() + STOP_POLL_INTERVAL);
            while let Some(Ok(found)) =
                self.watch.and_then(|watch| watch.wait_for_host_change(Duration::ZERO))
            {
                self.report_hosts_to_registrar(found)?;
            }
            inputs.extend(self.agent_pool.take_agent_events(self.started_at));
            inputs.push(ConductorInput::StopWanted(stop_level()));
            self.advance_conductor(inputs);
            self.publish_suspension();
        }
        // The last lines of workers on other hosts arrived before the reports of their ends.
        let last = self.take_registrar_events(Instant::now());
        self.advance_conductor(last);
        self.conductor.into_report()
    }

    /// Publishes the request for a suspension once in each world: the values of a world end with
    /// it.
    fn publish_suspension(&mut self) {
        if !self.suspension.is_requested() {
            return;
        }
        let generation = self.conductor.world().map(|world| world.generation);
        if generation.is_some()
            && generation != self.suspended_generation
            && self.registrar.publish_value(SUSPENSION_KEY, b"1").is_ok()
        {
            self.suspended_generation = generation;
        }
    }

    /// Passes records on, and returns the other events of the registrar.
    fn take_registrar_events(&self, deadline: Instant) -> Vec<ConductorInput> {
        // Fails only in a forked process; this process started the registrar.
        let Ok(drained) = self.registrar.drain_events(deadline) else { return Vec::new() };
        if drained.dropped > 0 {
            tracing::warn!(
                lines = drained.dropped,
                "lines of workers were lost: this process could not keep up"
            );
        }
        let mut inputs = Vec::new();
        for event in drained.records {
            match event {
                JobEvent::Record(record) => self.sink.accept_record(record),
                event => inputs.push(ConductorInput::Registrar(event)),
            }
        }
        inputs
    }

    fn advance_conductor(&mut self, inputs: Vec<ConductorInput>) {
        for action in self.conductor.step(self.started_at.elapsed(), inputs) {
            self.carry_out_decision(action);
        }
    }

    /// Carries out one decision. The registrar refuses calls only in a forked process, and this
    /// process started it.
    fn carry_out_decision(&mut self, action: ConductorAction) {
        match action {
            ConductorAction::StartWorkers { host, tasks } => self.start_workers(host, tasks),
            ConductorAction::CancelWorker { task, reason } => {
                self.agent_pool.cancel_worker(task, &reason);
            }
            ConductorAction::ReportNotStarted { task, reason } => {
                drop(self.registrar.report_worker_not_started(TaskId(task), &reason));
            }
            ConductorAction::AbortJob { reason } => drop(self.registrar.abort_job(&reason)),
            ConductorAction::ApplyStopLevel(level) => {
                // End the journal first: if this process is killed while the workers end, the job
                // is not continued.
                self.registrar.end_journal();
                // A connection may be silent, so the registrar's interrupt goes to the same agents.
                drop(self.registrar.interrupt_workers());
                self.agent_pool.apply_stop_level(level);
            }
            ConductorAction::CloseConnection(connection) => {
                self.agent_pool.close_connection(connection);
            }
            ConductorAction::ShowWorld(world) => (self.observe)(ElasticJobUpdate::World {
                world: &world,
                hosts: self.conductor.hosts(),
            }),
            ConductorAction::ShowLoss(what) => (self.observe)(ElasticJobUpdate::Loss(&what)),
        }
    }

    fn start_workers(&mut self, host: String, tasks: Vec<u32>) {
        let is_local = self.discovered.is_local_host(&host);
        if !is_local || self.detached_agents {
            if let Err(error) = self.connect_host(host, tasks.clone(), is_local) {
                self.advance_conductor(vec![ConductorInput::NoWorkers { tasks, error }]);
            }
            return;
        }
        for task in tasks {
            if let Err(error) = self.start_local_agent(task) {
                self.advance_conductor(vec![ConductorInput::NoWorkers {
                    tasks: vec![task],
                    error,
                }]);
            }
        }
    }
}
