// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The server in the driver: it supplies inputs to `membership`, and bounds the resources that
//! callers can take.

mod announcements;
mod auth;
mod clock;
mod connection_admission;
mod decision_effects;
mod descriptor_limit;
mod formation;
mod listen;
mod membership_machine;
mod options;
mod recovered_state;
mod recovery;
mod registrar_core;
mod relay;
mod service;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use farandole_config::PortRange;
use farandole_membership::MembershipInput;
use farandole_telemetry::DrainedRecords;
use farandole_world::{JobId, TaskId, World};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::{Identity as TlsIdentity, Server, ServerTlsConfig};

use self::auth::AuthInterceptor;
use self::listen::listen_with_retries;
pub use self::options::{ElasticOptions, RegistrarOptions};
use self::recovered_state::RecoveredState;
pub use self::recovered_state::ResumedJob;
use self::registrar_core::{RegistrarCore, elastic_rules};
use self::service::RegistrarService;
use crate::error::{Error, Result};
use crate::event::JobEvent;
use crate::generated::registrar_server::RegistrarServer;
use crate::journal::{MembershipJournal, UnfinishedJournal};
use crate::secret::JobSecret;
use crate::ticket::{JobToken, Ticket};
use crate::{local_host_facts, tls};

/// Largest message: a value of the key-value store and the rest of its message.
const MAX_MESSAGE_BYTES: usize = 2 << 20;
/// Number of simultaneous calls on one connection.
const MAX_STREAMS_PER_CONNECTION: u32 = 1024;
/// Number of simultaneous calls on one connection if links are relayed, then the bytes of each link
/// that may be in flight to a reader.
const MAX_LINKS_PER_CONNECTION: u32 = 4096;
pub(crate) const LINK_STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Bytes of a stream that may be in flight. A connection's window is larger: records that a slow
/// driver does not read must not block the heartbeats on the same connection.
const RECORDS_WINDOW_BYTES: u32 = 1 << 20;
/// Shortest and longest timeout; other values are clamped.
const MIN_TIMEOUT: Duration = Duration::from_millis(100);
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);
/// Number of workers that an elastic job may start in its life.
const MAX_ELASTIC_TASKS: u32 = 1 << 20;
/// Largest number of simultaneous workers of an elastic job without a given maximum.
const MAX_LIVING_WORKERS: u32 = 4096;
/// Number of connections for workers that end while others replace them.
const MAX_LEAVING_WORKERS: u32 = 64;
/// Longest time that open calls have to end after the registrar closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for the port of an earlier registrar to become free.
const PORT_REUSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of agents that hold a connection, each with a worker that holds another one.
#[derive(Clone, Copy)]
struct AgentCounts {
    min_agents: u32,
    max_agents: u32,
}

/// Address and identity of a registrar for the tasks.
struct RegistrarIdentity {
    job_id: JobId,
    token: JobToken,
    identity: tls::CertificateIdentity,
    /// Port of an earlier registrar of the job, which the tasks still use.
    port: Option<u16>,
}

impl RegistrarIdentity {
    /// Returns the identity of a new job.
    fn new_random(name: Option<String>) -> Result<Self> {
        Ok(Self {
            job_id: choose_job_id(name)?,
            token: JobToken::random(),
            identity: tls::generate_certificate_identity()?,
            port: None,
        })
    }
}

/// A registrar that has begun to listen.
struct ListeningRegistrar<'a> {
    ticket: &'a Ticket,
    identity: &'a tls::CertificateIdentity,
    port: u16,
}

impl ListeningRegistrar<'_> {
    fn job_id(&self) -> JobId {
        self.ticket.job_id().clone()
    }
}

struct ServerRuntime {
    runtime: Runtime,
    server: JoinHandle<()>,
}

/// A running registrar. Dropping it closes it.
pub struct Registrar {
    core: Arc<RegistrarCore>,
    ticket: Ticket,
    calls: Arc<AtomicU64>,
    running: Mutex<Option<ServerRuntime>>,
    made_in: u32,
}

impl Registrar {
    /// Makes a certificate and a token, and starts to listen.
    ///
    /// # Errors
    /// `Options` for no tasks or an unusable job id, `Listen`, `Tls`, `Runtime`.
    pub fn start_job(options: RegistrarOptions) -> Result<Self> {
        let known = RegistrarIdentity::new_random(options.job_id.clone())?;
        Self::start_with_identity(options, known, false)
    }

    /// Like [`Registrar::start_job`], for tasks whose numbers are their ranks. With a secret, the
    /// job's name is the secret's, and the token and the certificate are derived from the secret.
    ///
    /// # Errors
    /// Like [`Registrar::start_job`].
    pub fn start_with_ranked_tasks(
        options: RegistrarOptions,
        secret: Option<&JobSecret>,
    ) -> Result<Self> {
        let known = match secret {
            None => RegistrarIdentity::new_random(options.job_id.clone())?,
            Some(secret) => RegistrarIdentity {
                job_id: choose_job_id(Some(secret.job_id().0.clone()))?,
                token: secret.derive_token(),
                identity: secret.derive_identity()?,
                port: None,
            },
        };
        Self::start_with_identity(options, known, true)
    }

    /// Like [`Registrar::start_job`], for workers that come and go. `options.tasks` is ignored.
    ///
    /// # Errors
    /// Like [`Registrar::start_job`]; `Options` also if the numbers of workers contradict each
    /// other.
    pub fn start_elastic(options: RegistrarOptions, elastic: &ElasticOptions) -> Result<Self> {
        Self::start_with_journal(options, elastic, None)
    }

    /// Like [`Registrar::start_elastic`], with a journal. If this process is killed, a registrar
    /// that is started with the same journal continues the job, at the same port, with the same
    /// token and certificate.
    ///
    /// # Errors
    /// Like [`Registrar::start_elastic`]; `Journal`.
    pub fn start_with_journal(
        options: RegistrarOptions,
        elastic: &ElasticOptions,
        journal: Option<MembershipJournal>,
    ) -> Result<Self> {
        let ElasticOptions { first, min_workers, max_workers, .. } = *elastic;
        if min_workers == 0 || min_workers > first || first > max_workers {
            let reason = format!(
                "an elastic job has at least 1 worker, and its minimum ({min_workers}), first \
                 ({first}) and maximum ({max_workers}) number of workers ascend"
            );
            return Err(Error::Options { reason });
        }
        // Without a maximum, there may be any number of workers: additional ones wait for a free
        // connection.
        let agents = |workers: u32| {
            workers.saturating_add(elastic.spares).min(MAX_LIVING_WORKERS) + MAX_LEAVING_WORKERS
        };
        let connected = AgentCounts { min_agents: agents(first), max_agents: agents(max_workers) };
        let options = RegistrarOptions { tasks: MAX_ELASTIC_TASKS, ..options };
        let Some(mut journal) = journal else {
            let known = RegistrarIdentity::new_random(options.job_id.clone())?;
            return Self::start_server(options, known, connected, |options, made| {
                Ok(RegistrarCore::new_elastic(
                    made.job_id(),
                    options,
                    RecoveredState::new(elastic_rules(options, elastic), None),
                ))
            });
        };
        match journal.take_unfinished_job() {
            Some(unfinished) => {
                Self::continue_job(options, elastic, connected, journal, unfinished)
            }
            None => {
                let known = RegistrarIdentity::new_random(options.job_id.clone())?;
                Self::start_server(options, known, connected, |options, made| {
                    let recovered = RecoveredState::new(
                        elastic_rules(options, elastic),
                        Some(Arc::new(journal)),
                    );
                    recovered.begin_journal(made.ticket, made.identity, made.port)?;
                    Ok(RegistrarCore::new_elastic(made.job_id(), options, recovered))
                })
            }
        }
    }

    /// Continues the job of a journal.
    fn continue_job(
        options: RegistrarOptions,
        elastic: &ElasticOptions,
        connected: AgentCounts,
        journal: MembershipJournal,
        unfinished: UnfinishedJournal,
    ) -> Result<Self> {
        let UnfinishedJournal { head, records } = unfinished;
        let ticket = head.parse_ticket()?;
        let known = RegistrarIdentity {
            identity: head.certificate_identity(&ticket),
            job_id: ticket.job_id().clone(),
            token: ticket.token,
            port: Some(head.port),
        };
        Self::start_server(options, known, connected, |options, made| {
            let recovered = RecoveredState::replay_records(
                elastic_rules(options, elastic),
                Arc::new(journal),
                records,
            );
            let mut core = RegistrarCore::new_elastic(made.job_id(), options, recovered);
            core.resumed = Some(core.resume_job());
            Ok(core)
        })
    }

    /// Returns the state that an earlier registrar left of this job, if this registrar continues
    /// it.
    pub fn resumed_job(&self) -> Option<&ResumedJob> {
        self.core.resumed.as_ref()
    }

    fn start_with_identity(
        options: RegistrarOptions,
        known: RegistrarIdentity,
        in_order: bool,
    ) -> Result<Self> {
        if options.tasks == 0 {
            return Err(Error::Options { reason: "a job has at least one task".to_owned() });
        }
        let connected = AgentCounts { min_agents: options.tasks, max_agents: options.tasks };
        Self::start_server(options, known, connected, |options, made| {
            Ok(RegistrarCore::new(made.job_id(), options, in_order))
        })
    }

    fn start_server(
        options: RegistrarOptions,
        known: RegistrarIdentity,
        connected: AgentCounts,
        make: impl FnOnce(&RegistrarOptions, &ListeningRegistrar<'_>) -> Result<RegistrarCore>,
    ) -> Result<Self> {
        let RegistrarIdentity { job_id, token, identity, port } = known;
        let options = RegistrarOptions {
            // Beyond these limits, timers never fire, always fire, or overflow.
            peer_timeout: options.peer_timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT),
            start_timeout: options.start_timeout.min(MAX_TIMEOUT),
            ..options
        };
        // A worker with relayed links has a separate connection for them.
        let workers = |agents: u32| if options.relays { agents.saturating_mul(2) } else { agents };
        let both = |agents: u32| workers(agents).saturating_add(agents);
        let places = descriptor_limit::raise_limit_for_connections(
            both(connected.min_agents),
            connection_admission::max_wanted_connections(workers(connected.max_agents)),
        )?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("farandole-registrar")
            .enable_all()
            .build()
            .map_err(|error| Error::Runtime { reason: error.to_string() })?;
        let (ports, timeout) = match port {
            Some(port) => (PortRange { first: port, last: port }, PORT_REUSE_TIMEOUT),
            None => (options.port_range, Duration::ZERO),
        };
        let (listener, port, addresses) = listen_with_retries(
            options.host.as_deref(),
            local_host_facts::resolve_bind_address(&options.bind)?,
            ports,
            timeout,
        )?;
        let ticket = Ticket::new(token.clone(), identity.fingerprint, job_id, addresses);
        // Create the core before the first call arrives, and before time passes.
        let core = Arc::new(make(
            &options,
            &ListeningRegistrar { ticket: &ticket, identity: &identity, port },
        )?);
        let gate = AuthInterceptor::new(token, options.tasks);
        let calls = gate.admitted_call_count();
        let registrar =
            RegistrarServer::new(RegistrarService::new(Arc::clone(&core), options.relays))
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(usize::MAX);
        let guarded = tonic::service::interceptor::InterceptedService::new(registrar, gate);
        let certificate = TlsIdentity::from_pem(identity.certificate_pem, identity.key_pem);
        let tls = ServerTlsConfig::new().identity(certificate).timeout(Duration::from_secs(10));
        let mut server = Server::builder()
            .tls_config(tls)
            .map_err(|error| Error::Tls { reason: error.to_string() })?
            .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
            .http2_max_header_list_size(16 << 10)
            .http2_keepalive_interval(Some(options.peer_timeout / 2))
            .http2_keepalive_timeout(Some(options.peer_timeout))
            .initial_stream_window_size(RECORDS_WINDOW_BYTES)
            .initial_connection_window_size(4 * RECORDS_WINDOW_BYTES);
        if options.relays {
            // If the reader of a link is slow, only this link's data waits, never other links of
            // the connection.
            server = server
                .max_concurrent_streams(MAX_LINKS_PER_CONNECTION)
                .initial_stream_window_size(LINK_STREAM_WINDOW_BYTES)
                .initial_connection_window_size(
                    MAX_LINKS_PER_CONNECTION * LINK_STREAM_WINDOW_BYTES,
                );
        }
        let router = server.add_service(guarded);
        let context = runtime.enter();
        let incoming = connection_admission::admit_connections(
            listener,
            places,
            workers(connected.max_agents),
        )
        .map_err(|error| Error::Runtime { reason: error.to_string() })?;
        drop(context);
        let closed = Arc::clone(&core);
        let server = runtime.spawn(async move {
            let serving = router.serve_with_incoming_shutdown(incoming, async move {
                closed.wait_until_closed().await
            });
            if let Err(error) = serving.await {
                tracing::error!(%error, "the registrar stopped listening");
            }
        });
        let ticking = Arc::clone(&core);
        runtime.spawn(async move { ticking.run_membership_ticks().await });
        let running = Mutex::new(Some(ServerRuntime { runtime, server }));
        Ok(Self { core, ticket, calls, running, made_in: std::process::id() })
    }

    /// Returns the ticket that a task needs to be admitted.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Returns the job's name.
    pub fn job_id(&self) -> &JobId {
        self.ticket.job_id()
    }

    /// Waits for events, at most until `deadline`, and takes all of them.
    ///
    /// # Errors
    /// `Forked`.
    pub fn drain_events(&self, deadline: Instant) -> Result<DrainedRecords<JobEvent>> {
        self.check_own_process()?;
        Ok(self.core.drain_events(deadline))
    }

    /// Returns the number of calls admitted so far.
    pub fn admitted_call_count(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns whether the registrar is closed and every event has been taken.
    pub fn is_finished(&self) -> bool {
        self.core.is_finished()
    }

    /// Returns the latest world, seen from rank 0.
    pub fn current_world(&self) -> Option<World> {
        self.core.current_world()
    }

    /// Makes every agent interrupt its worker with SIGINT. Later calls change nothing.
    ///
    /// # Errors
    /// `Forked`.
    pub fn interrupt_workers(&self) -> Result<()> {
        self.check_own_process()?;
        self.core.interrupt_workers();
        Ok(())
    }

    /// Makes every agent end its worker. Later calls change nothing.
    ///
    /// # Errors
    /// `Forked`.
    pub fn abort_job(&self, reason: &str) -> Result<()> {
        self.check_own_process()?;
        self.core.abort_job(reason.to_owned());
        Ok(())
    }

    /// Sets the available hosts of an elastic job and their slots, in the order of discovery.
    ///
    /// # Errors
    /// `Forked`.
    pub fn update_hosts(&self, hosts: &[(String, u32)]) -> Result<()> {
        self.check_own_process()?;
        self.core.apply_membership_input(MembershipInput::Hosts(hosts.to_vec()));
        Ok(())
    }

    /// Records that a worker of an elastic job could not be started, which counts as a failure of
    /// its host.
    ///
    /// # Errors
    /// `Forked`.
    pub fn report_worker_not_started(&self, task: TaskId, reason: &str) -> Result<()> {
        self.check_own_process()?;
        let reason = format!("could not be started: {reason}");
        self.core.apply_membership_input(MembershipInput::NotStarted { task, reason });
        Ok(())
    }

    /// Makes a worker of an elastic job leave at its next opportunity, because its place is about
    /// to be removed. This is not a failure.
    ///
    /// # Errors
    /// `Forked`.
    pub fn dismiss_worker(&self, task: TaskId, reason: &str) -> Result<()> {
        self.check_own_process()?;
        self.core
            .apply_membership_input(MembershipInput::Leaves { task, reason: reason.to_owned() });
        Ok(())
    }

    /// Sets a value that the ranks of the present world can read under its key. The value is not in
    /// the journal.
    ///
    /// # Errors
    /// `Forked`; `Refused` if the key or the value is too long, or all values together are too
    /// large.
    pub fn publish_value(&self, key: &str, value: &[u8]) -> Result<()> {
        self.check_own_process()?;
        let generation =
            self.core.current_world().map(|world| world.generation).unwrap_or_default();
        let put = self.core.key_value_store().lock().put_value(
            generation,
            key.to_owned(),
            Bytes::copy_from_slice(value),
        );
        put.map_err(|full| Error::Refused {
            job: self.job_id().to_string(),
            call: "publish",
            reason: full.to_string(),
        })
    }

    /// Ends the journal, if there is one: if this process is killed from now on, the job is not
    /// continued.
    pub fn end_journal(&self) {
        self.core.finish_journal();
    }

    /// Aborts a job that still runs, notifies the agents, and stops listening. Later calls do
    /// nothing.
    pub fn close(&self) {
        let running = self.running.lock().take();
        let Some(running) = running else { return };
        if self.check_own_process().is_err() {
            // The threads stayed in the parent process: joining them here would wait forever.
            std::mem::forget(running);
            return;
        }
        self.core.abort_job("the driver closed the job".to_owned());
        self.core.close();
        let ServerRuntime { runtime, server } = running;
        // The server ends when every connection has ended; the shutdown closes connections that are
        // still open after this.
        runtime.block_on(async move { drop(tokio::time::timeout(CLOSE_TIMEOUT, server).await) });
        runtime.shutdown_timeout(CLOSE_TIMEOUT);
        self.core.finish_journal();
    }

    fn check_own_process(&self) -> Result<()> {
        let used_in = std::process::id();
        if used_in == self.made_in {
            Ok(())
        } else {
            Err(Error::Forked { made_in: self.made_in, used_in })
        }
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        self.close();
    }
}

fn choose_job_id(given: Option<String>) -> Result<JobId> {
    let Some(name) = given else {
        return Ok(JobId(format!("job-{:08x}", rand::random::<u32>())));
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if name.is_empty() || name.len() > 128 || !name.chars().all(plain) {
        let reason = format!(
            "a job id has 1 to 128 letters, digits, dashes, dots, colons, underscores: {name}"
        );
        return Err(Error::Options { reason });
    }
    Ok(JobId(name))
}
