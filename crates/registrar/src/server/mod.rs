// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The driver's side: a server that feeds `membership` and keeps what passes through it within
//! bounds.

mod auth;
mod board;
mod clock;
mod core;
mod descriptors;
mod effects;
mod incoming;
mod kept;
mod listen;
mod meet;
mod members;
mod relay;
mod service;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use farandole_config::{Config, PortRange};
use farandole_telemetry::Drained;
use farandole_world::{JobId, TaskId, World};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::{Identity as TlsIdentity, Server, ServerTlsConfig};

use self::auth::Gate;
use self::core::{Core, rules};
use self::kept::Kept;
pub use self::kept::Resumed;
use self::listen::listen_in_time;
use self::service::Service;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::generated::registrar_server::RegistrarServer;
use crate::journal::{Journal, Left};
use crate::membership::Input;
use crate::secret::Secret;
use crate::ticket::{Ticket, Token};
use crate::{host, tls};

/// Longest message: a value of the key-value store and what surrounds it.
const MAX_MESSAGE: usize = 2 << 20;
/// Calls at the same time on one connection.
const STREAMS: u32 = 1024;
/// The same where links are relayed, and the bytes that each may have on its way to a reader.
const LINKS: u32 = 4096;
pub(crate) const STREAM_WINDOW: u32 = 256 << 10;
/// Bytes that a stream may have on its way. A connection takes more: records that a slow driver
/// leaves where they are must not hold up the signs of life beside them.
const RECORDS_WINDOW: u32 = 1 << 20;
/// Times beyond these are taken for these.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(365 * 86_400);
/// Workers that an elastic job may start in its life.
const TASKS: u32 = 1 << 20;
/// Greatest number of workers of an elastic job at one time, if none is given.
const LIVING: u32 = 4096;
/// Connections of workers that end while others take their places.
const LEAVERS: u32 = 64;
/// Longest time in which open calls must end once the registrar closes.
const CLOSING: Duration = Duration::from_secs(1);
/// Longest time for which the port of an earlier registrar may be taken.
const PORT_TAKEN: Duration = Duration::from_secs(5);

/// The arguments of a registrar.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tasks that will register.
    pub tasks: u32,
    /// Name of the job; made up when absent.
    pub job_id: Option<String>,
    /// Address to listen on and to offer; all own addresses when absent.
    pub host: Option<String>,
    /// Address of this host to listen on instead, or the network it is in (`10.0.0.0/8`); empty for
    /// no such wish.
    pub bind: String,
    /// Ports to try.
    pub port_range: PortRange,
    /// Longest time in which all tasks must register.
    pub start_timeout: Duration,
    /// Silence after which an agent is lost.
    pub peer_timeout: Duration,
    /// Whether links between tasks may pass through here, for tasks that no other can dial.
    pub relays: bool,
}

impl Options {
    /// Options for a job of `tasks`, the rest from the configuration.
    pub fn from_config(tasks: u32, config: &Config) -> Self {
        Self {
            tasks,
            job_id: None,
            host: Some(config.driver_host.clone()).filter(|host| !host.is_empty()),
            bind: config.bind_address.clone(),
            port_range: config.port_range,
            start_timeout: config.start_timeout,
            peer_timeout: config.peer_timeout,
            relays: config.dial_out,
        }
    }
}

/// The settings of an elastic job.
#[derive(Clone, Debug)]
pub struct Elastic {
    /// Workers that the first world waits for.
    pub first: u32,
    /// Fewest workers of a world.
    pub least: u32,
    /// Most workers of a world.
    pub most: u32,
    /// Workers beyond `most` that are started, and wait to take a place.
    pub spares: u32,
    /// Longest wait of the job for workers.
    pub timeout: Duration,
    /// Worlds after the first that may be formed; any number when absent.
    pub reset_limit: Option<u32>,
    /// Shortest and longest time without a new worker on a host where one has failed.
    pub cooldown: (Duration, Duration),
}

/// Agents that hold a connection, each with a worker that holds another.
#[derive(Clone, Copy)]
struct Connected {
    least: u32,
    most: u32,
}

/// Address and identity of a registrar for the tasks.
struct Known {
    job_id: JobId,
    token: Token,
    identity: tls::Identity,
    /// The port of an earlier registrar of the job, which the tasks still call.
    port: Option<u16>,
}

impl Known {
    /// Returns the one of a new job.
    fn made_up(name: Option<String>) -> Result<Self> {
        Ok(Self {
            job_id: job_id(name)?,
            token: Token::random(),
            identity: tls::identity()?,
            port: None,
        })
    }
}

/// A registrar that has begun to listen.
struct Made<'a> {
    ticket: &'a Ticket,
    identity: &'a tls::Identity,
    port: u16,
}

impl Made<'_> {
    fn job_id(&self) -> JobId {
        self.ticket.job_id().clone()
    }
}

struct Running {
    runtime: Runtime,
    server: JoinHandle<()>,
}

/// A running registrar. Dropping it closes it.
pub struct Registrar {
    core: Arc<Core>,
    ticket: Ticket,
    calls: Arc<AtomicU64>,
    running: Mutex<Option<Running>>,
    made_in: u32,
}

impl Registrar {
    /// Makes a certificate and a token, and starts to listen.
    ///
    /// # Errors
    /// `Options` for no tasks or an unusable job id, `Listen`, `Tls`, `Runtime`.
    pub fn start(options: Options) -> Result<Self> {
        let known = Known::made_up(options.job_id.clone())?;
        Self::start_fixed(options, known, false)
    }

    /// Like [`Registrar::start`], for tasks whose numbers are their ranks; with a secret, for its
    /// job, and a token and a certificate made from it.
    ///
    /// # Errors
    /// Like [`Registrar::start`].
    pub fn start_in_order(options: Options, secret: Option<&Secret>) -> Result<Self> {
        let known = match secret {
            None => Known::made_up(options.job_id.clone())?,
            Some(secret) => Known {
                job_id: job_id(Some(secret.job().0.clone()))?,
                token: secret.token(),
                identity: secret.identity()?,
                port: None,
            },
        };
        Self::start_fixed(options, known, true)
    }

    /// Like [`Registrar::start`], for workers that come and go. `options.tasks` is not looked at.
    ///
    /// # Errors
    /// Like [`Registrar::start`]; `Options` also where the numbers of workers contradict each
    /// other.
    pub fn start_elastic(options: Options, elastic: &Elastic) -> Result<Self> {
        Self::start_kept(options, elastic, None)
    }

    /// Like [`Registrar::start_elastic`], with a journal. If this process is killed, a registrar
    /// that is started with the same journal continues the job, at the same port, with the same
    /// token and certificate.
    ///
    /// # Errors
    /// Like [`Registrar::start_elastic`]; `Journal`.
    pub fn start_kept(
        options: Options,
        elastic: &Elastic,
        journal: Option<Journal>,
    ) -> Result<Self> {
        let Elastic { first, least, most, .. } = *elastic;
        if least == 0 || least > first || first > most {
            let reason = format!(
                "an elastic job has at least 1 worker, and its least ({least}), first ({first}) \
                 and most ({most}) workers ascend"
            );
            return Err(Error::Options { reason });
        }
        // Without a maximum there may be any number of workers: additional ones wait for their turn
        // to connect.
        let agents = |workers: u32| workers.saturating_add(elastic.spares).min(LIVING) + LEAVERS;
        let connected = Connected { least: agents(first), most: agents(most) };
        let options = Options { tasks: TASKS, ..options };
        let Some(mut journal) = journal else {
            let known = Known::made_up(options.job_id.clone())?;
            return Self::begin(options, known, connected, |options, made| {
                Ok(Core::elastic(made.job_id(), options, Kept::new(rules(options, elastic), None)))
            });
        };
        match journal.left() {
            Some(left) => Self::go_on(options, elastic, connected, journal, left),
            None => {
                let known = Known::made_up(options.job_id.clone())?;
                Self::begin(options, known, connected, |options, made| {
                    let kept = Kept::new(rules(options, elastic), Some(Arc::new(journal)));
                    kept.begin(made.ticket, made.identity, made.port)?;
                    Ok(Core::elastic(made.job_id(), options, kept))
                })
            }
        }
    }

    /// Continues the job of a journal.
    fn go_on(
        options: Options,
        elastic: &Elastic,
        connected: Connected,
        journal: Journal,
        left: Left,
    ) -> Result<Self> {
        let Left { head, records } = left;
        let ticket = head.ticket()?;
        let known = Known {
            identity: head.identity(&ticket),
            job_id: ticket.job_id().clone(),
            token: ticket.token,
            port: Some(head.port),
        };
        Self::begin(options, known, connected, |options, made| {
            let kept = Kept::resumed(rules(options, elastic), Arc::new(journal), records);
            let mut core = Core::elastic(made.job_id(), options, kept);
            core.resumed = Some(core.resume());
            Ok(core)
        })
    }

    /// Returns the state that an earlier registrar has left of this job, if this one continues it.
    pub fn resumed(&self) -> Option<&Resumed> {
        self.core.resumed.as_ref()
    }

    fn start_fixed(options: Options, known: Known, in_order: bool) -> Result<Self> {
        if options.tasks == 0 {
            return Err(Error::Options { reason: "a job has at least one task".to_owned() });
        }
        let connected = Connected { least: options.tasks, most: options.tasks };
        Self::begin(options, known, connected, |options, made| {
            Ok(Core::new(made.job_id(), options, in_order))
        })
    }

    fn begin(
        options: Options,
        known: Known,
        connected: Connected,
        make: impl FnOnce(&Options, &Made<'_>) -> Result<Core>,
    ) -> Result<Self> {
        let Known { job_id, token, identity, port } = known;
        let options = Options {
            // Outside of these, timers never fire, always fire, or overflow.
            peer_timeout: options.peer_timeout.clamp(SHORTEST, LONGEST),
            start_timeout: options.start_timeout.min(LONGEST),
            ..options
        };
        // A worker that is linked through here has a connection for that.
        let workers = |agents: u32| if options.relays { agents.saturating_mul(2) } else { agents };
        let both = |agents: u32| workers(agents).saturating_add(agents);
        let places =
            descriptors::allow(both(connected.least), incoming::places(workers(connected.most)))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("farandole-registrar")
            .enable_all()
            .build()
            .map_err(|error| Error::Runtime { reason: error.to_string() })?;
        let (ports, patience) = match port {
            Some(port) => (PortRange { first: port, last: port }, PORT_TAKEN),
            None => (options.port_range, Duration::ZERO),
        };
        let (listener, port, addresses) =
            listen_in_time(options.host.as_deref(), host::bound(&options.bind)?, ports, patience)?;
        let ticket = Ticket::new(token.clone(), identity.fingerprint, job_id, addresses);
        // Before the first call comes, and before time passes.
        let core = Arc::new(make(&options, &Made { ticket: &ticket, identity: &identity, port })?);
        let gate = Gate::new(token, options.tasks);
        let calls = gate.admitted();
        let registrar = RegistrarServer::new(Service::new(Arc::clone(&core), options.relays))
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(usize::MAX);
        let guarded = tonic::service::interceptor::InterceptedService::new(registrar, gate);
        let certificate = TlsIdentity::from_pem(identity.certificate_pem, identity.key_pem);
        let tls = ServerTlsConfig::new().identity(certificate).timeout(Duration::from_secs(10));
        let mut server = Server::builder()
            .tls_config(tls)
            .map_err(|error| Error::Tls { reason: error.to_string() })?
            .max_concurrent_streams(STREAMS)
            .http2_max_header_list_size(16 << 10)
            .http2_keepalive_interval(Some(options.peer_timeout / 2))
            .http2_keepalive_timeout(Some(options.peer_timeout))
            .initial_stream_window_size(RECORDS_WINDOW)
            .initial_connection_window_size(4 * RECORDS_WINDOW);
        if options.relays {
            // A link whose reader is slow holds what it has on its way, and never the other links
            // of its connection.
            server = server
                .max_concurrent_streams(LINKS)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(LINKS * STREAM_WINDOW);
        }
        let router = server.add_service(guarded);
        let context = runtime.enter();
        let incoming = incoming::accept(listener, places, workers(connected.most))
            .map_err(|error| Error::Runtime { reason: error.to_string() })?;
        drop(context);
        let closed = Arc::clone(&core);
        let server = runtime.spawn(async move {
            let serving = router
                .serve_with_incoming_shutdown(incoming, async move { closed.until_closed().await });
            if let Err(error) = serving.await {
                tracing::error!(%error, "the registrar stopped listening");
            }
        });
        let ticking = Arc::clone(&core);
        runtime.spawn(async move { ticking.tick().await });
        let running = Mutex::new(Some(Running { runtime, server }));
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

    /// Waits until something has happened, at most until `deadline`, and takes everything that has.
    ///
    /// # Errors
    /// `Forked`.
    pub fn events(&self, deadline: Instant) -> Result<Drained<Event>> {
        self.own_process()?;
        Ok(self.core.events(deadline))
    }

    /// Returns the number of calls admitted so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns whether the registrar is closed and every event was taken.
    pub fn is_finished(&self) -> bool {
        self.core.is_finished()
    }

    /// Returns the latest world, seen from rank 0.
    pub fn assignment(&self) -> Option<World> {
        self.core.assignment()
    }

    /// Makes every agent end its worker. Later calls change nothing.
    ///
    /// # Errors
    /// `Forked`.
    pub fn abort(&self, reason: &str) -> Result<()> {
        self.own_process()?;
        self.core.abort(reason.to_owned());
        Ok(())
    }

    /// Elastic jobs: the hosts that there are now, and their slots, in the order of discovery.
    ///
    /// # Errors
    /// `Forked`.
    pub fn hosts(&self, hosts: &[(String, u32)]) -> Result<()> {
        self.own_process()?;
        self.core.observe(Input::Hosts(hosts.to_vec()));
        Ok(())
    }

    /// Elastic jobs: a worker could not be started, which counts as a failure of its host.
    ///
    /// # Errors
    /// `Forked`.
    pub fn not_started(&self, task: TaskId, reason: &str) -> Result<()> {
        self.own_process()?;
        let reason = format!("could not be started: {reason}");
        self.core.observe(Input::NotStarted { task, reason });
        Ok(())
    }

    /// Elastic jobs: has a worker leave at its next chance, because its place is about to go. That
    /// is no failure.
    ///
    /// # Errors
    /// `Forked`.
    pub fn dismiss(&self, task: TaskId, reason: &str) -> Result<()> {
        self.own_process()?;
        self.core.observe(Input::Leaves { task, reason: reason.to_owned() });
        Ok(())
    }

    /// Sets a value that the ranks of the present world find under its key. No journal contains it.
    ///
    /// # Errors
    /// `Forked`; `Refused` for a key or value that is too long, or if all values together are.
    pub fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.own_process()?;
        let generation = self.core.assignment().map(|world| world.generation).unwrap_or_default();
        let put =
            self.core.kv().lock().put(generation, key.to_owned(), Bytes::copy_from_slice(value));
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

    /// Aborts what still runs, tells the agents, and stops listening. Later calls do nothing.
    pub fn close(&self) {
        let running = self.running.lock().take();
        let Some(running) = running else { return };
        if self.own_process().is_err() {
            // Its threads stayed in the parent: joining them here would wait forever.
            std::mem::forget(running);
            return;
        }
        self.core.abort("the driver closed the job".to_owned());
        self.core.close();
        let Running { runtime, server } = running;
        // The server ends when every connection has ended; the shutdown closes connections that are
        // still open after this.
        runtime.block_on(async move { drop(tokio::time::timeout(CLOSING, server).await) });
        runtime.shutdown_timeout(CLOSING);
        self.core.finish_journal();
    }

    fn own_process(&self) -> Result<()> {
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

fn job_id(given: Option<String>) -> Result<JobId> {
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
