// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Client of a task: blocking calls from any thread, served by one background thread of this
//! process.

mod authenticated_channel;
mod cancellation;
mod dial;
mod elastic_worker_calls;
mod formation;
mod heartbeat;
mod key_value;
mod liveness;
#[cfg(test)]
mod load_test;
mod outbox;
mod relay;
mod runtime;
mod socket_owner;

use std::future::Future;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use farandole_config::Config;
use farandole_membership::{ExitKind, ExitReport, GenerationVerdict};
use farandole_telemetry::OutputStream;
use farandole_world::{Generation, HostFacts, JobId, TaskId, World};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Response, Status, Streaming};

use self::authenticated_channel::AuthenticatedChannel;
pub use self::cancellation::CancellationToken;
pub use self::elastic_worker_calls::HostChange;
pub use self::formation::FormationOutcome;
pub use self::heartbeat::RegistrarOrder;
use self::outbox::RecordOutbox;
pub use self::relay::RelayedLinks;
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::ticket::Ticket;
use crate::wire::{DISMISSED_HEADER, PROTOCOL_HEADER, PROTOCOL_VERSION, RETRY_HEADER};
use crate::wire_conversions::{self, duration_millis};

/// Longest time that a call waits at the registrar before the call is repeated.
const MAX_SERVER_WAIT: Duration = Duration::from_secs(30);
/// Longest time for which a repeatable call is repeated after the connection breaks.
const CALL_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest piece of a result.
const MAX_CHUNK_BYTES: usize = 1 << 20;
/// Longest line of output that is sent in one piece.
const MAX_LINE_BYTES: usize = 64 << 10;

struct ClientInner {
    ticket: Ticket,
    caller: AuthenticatedChannel,
    address: String,
    session: u64,
    handle: Handle,
    cancel: CancellationToken,
    /// Cancelled when the registrar is given up, by the `RegistrarMonitor` or the caller.
    lost: CancellationToken,
    outbox: Arc<RecordOutbox>,
    offer: heartbeat::RepeatableRegistration,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// The asynchronous task that receives host changes.
    changes: Mutex<Option<JoinHandle<()>>>,
    /// Time for which a call is repeated while the connection is broken, in milliseconds.
    timeout: AtomicU64,
    made_in: u32,
}

/// A connection of one task. Clones share it; the last one closes it.
#[derive(Clone)]
pub struct TaskClient {
    inner: Arc<ClientInner>,
}

// One connection for each worker: the registrar counts two for each task, its agent and its worker.
static PROCESS_CLIENT: Mutex<Option<(u32, String, TaskClient)>> = Mutex::new(None);

impl TaskClient {
    /// Returns the client of this worker process, which connects on first use and is then shared;
    /// `None` in a process that no launcher started.
    ///
    /// # Errors
    /// Like [`TaskClient::connect`]; `Ticket` if the ticket in the environment does not parse.
    pub fn for_this_process(config: &Config, deadline: Instant) -> Result<Option<Self>> {
        if config.job.is_empty() {
            return Ok(None);
        }
        let pid = std::process::id();
        let mut slot = PROCESS_CLIENT.lock();
        if let Some((made_in, job, client)) = slot.as_ref()
            // A fork must not use the connection of its parent: both would read the same socket.
            && *made_in == pid
            && *job == config.job
        {
            return Ok(Some(client.clone()));
        }
        if slot.as_ref().is_some_and(|(made_in, ..)| *made_in != pid) {
            // The client's asynchronous tasks run in the parent process. Ending them from a fork
            // may wait for a lock that no thread of the fork will release.
            std::mem::forget(slot.take());
        }
        let ticket: Ticket = config.job.parse()?;
        let task = u32::try_from(config.task).map_err(|_| Error::Options {
            reason: format!("no task has the number {}", config.task),
        })?;
        let generation = (config.generation > 0).then_some(Generation(config.generation));
        let client = Self::connect(&ticket, TaskId(task), generation, deadline)?;
        client.tolerate_outage(config.outage);
        *slot = Some((pid, config.job.clone(), client.clone()));
        Ok(Some(client))
    }

    /// Connects as `task`, in `generation` if the caller knows it.
    ///
    /// # Errors
    /// `Unreachable` with the reason at each address.
    pub fn connect(
        ticket: &Ticket,
        task: TaskId,
        generation: Option<Generation>,
        deadline: Instant,
    ) -> Result<Self> {
        Self::connect_cancellable(ticket, task, generation, deadline, CancellationToken::new())
    }

    /// Like [`TaskClient::connect`]; `cancel` ends this call and every later one.
    ///
    /// # Errors
    /// `Unreachable` with the reason at each address, `Closed` once cancelled.
    pub fn connect_cancellable(
        ticket: &Ticket,
        task: TaskId,
        generation: Option<Generation>,
        deadline: Instant,
        cancel: CancellationToken,
    ) -> Result<Self> {
        let handle = runtime::runtime_handle()?;
        let dialing = cancel.clone();
        let (channel, address) = handle.block_on(async move {
            tokio::select! {
                dialed = dial::dial_registrar(ticket, deadline) => dialed,
                () = dialing.wait_cancelled() => Err(Error::Closed { what: "the connection to the \
                                                                       registrar" }),
            }
        })?;
        let mut token: MetadataValue<Ascii> = ticket
            .token
            .to_hex()
            .parse()
            .map_err(|_| Error::Ticket { reason: "its token does not fit into a header" })?;
        // HTTP/2 then never puts the token into its table of headers, and `Debug` hides it.
        token.set_sensitive(true);
        let generation = Arc::new(AtomicU64::new(generation.unwrap_or_default().0));
        let caller = AuthenticatedChannel { channel, token, task, generation };
        let outbox = Arc::new(RecordOutbox::new());
        let pump = handle.spawn(outbox::run_outbox(Arc::clone(&outbox), caller.clone()));
        let inner = ClientInner {
            ticket: ticket.clone(),
            caller,
            address,
            session: rand::random(),
            handle,
            cancel,
            lost: CancellationToken::new(),
            outbox,
            offer: heartbeat::RepeatableRegistration::default(),
            tasks: Mutex::new(vec![pump]),
            changes: Mutex::new(None),
            timeout: AtomicU64::new(duration_millis(CALL_RETRY_TIMEOUT)),
            made_in: std::process::id(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes every call wait up to `outage` for a registrar that is gone and may come back. A
    /// shorter time than before changes nothing.
    pub fn tolerate_outage(&self, outage: Duration) {
        // Several callers set it, and the most tolerant one must not lose its time.
        self.inner.timeout.fetch_max(duration_millis(outage), Ordering::AcqRel);
        self.inner.outbox.tolerate_outage(duration_millis(outage));
    }

    fn retry_timeout(&self) -> Duration {
        Duration::from_millis(self.inner.timeout.load(Ordering::Acquire))
    }

    /// Returns the deadline of a call that waits for nothing but its reply.
    fn call_deadline(&self) -> Instant {
        Instant::now() + MAX_SERVER_WAIT.max(self.retry_timeout())
    }

    /// Returns the ticket with which this task connected.
    pub fn ticket(&self) -> &Ticket {
        &self.inner.ticket
    }

    /// Returns the identifier of the job.
    pub fn job_id(&self) -> &JobId {
        self.inner.ticket.job_id()
    }

    /// Returns the identifier of the task.
    pub fn task_id(&self) -> TaskId {
        self.inner.caller.task
    }

    /// Returns the local address on the route to the registrar. Peers most likely reach this host
    /// there.
    pub fn local_address(&self) -> Option<IpAddr> {
        let target = self.inner.address.to_socket_addrs().ok()?.next()?;
        let any = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Connecting a UDP socket looks up the route and sends nothing.
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    }

    /// Registers this task, which then waits for a rank. Repeating the call changes nothing.
    ///
    /// # Errors
    /// `Refused` for an unknown task, a duplicate or a stale attempt, `Version`, `Aborted`, `Lost`,
    /// `Timeout`.
    pub fn register_task(
        &self,
        attempt: u64,
        facts: &HostFacts,
        deadline: Instant,
    ) -> Result<Generation> {
        let offer = wire::RegisterRequest {
            protocol_version: PROTOCOL_VERSION,
            attempt,
            session: self.inner.session,
            host: Some(facts.clone().into()),
        };
        let reply = self.call_with_retries("registration", deadline, || {
            let request = self.inner.caller.build_request(offer.clone());
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.register(request).await }
        })?;
        // Pairs with the load in `build_request`, which heartbeats call from another thread.
        self.inner.caller.generation.store(reply.generation, Ordering::Release);
        // After the success: heartbeats repeat the registration, and must not register before the
        // caller.
        *self.inner.offer.lock() = Some(offer);
        Ok(Generation(reply.generation))
    }

    /// Waits until every task has registered. The world is seen from this task's rank.
    ///
    /// # Errors
    /// `Timeout` naming the missing tasks, `Aborted`, `Refused`, `Lost`, `Malformed`.
    pub fn await_assignment(&self, deadline: Instant) -> Result<World> {
        self.await_world(deadline, "tasks to register")
    }

    /// Like [`TaskClient::await_assignment`], for a job whose task numbers are ranks: a `Timeout`
    /// names ranks.
    ///
    /// # Errors
    /// Like [`TaskClient::await_assignment`].
    pub fn await_ranked_assignment(&self, deadline: Instant) -> Result<World> {
        self.await_world(deadline, "ranks to come")
    }

    fn await_world(&self, deadline: Instant, all: &str) -> Result<World> {
        let started = Instant::now();
        let session = self.inner.offer.lock().as_ref().map(|offer| offer.session);
        loop {
            let timeout_ms = self.server_wait_millis(deadline);
            let reply =
                self.call_with_retries("the wait for ranks", deadline + MAX_SERVER_WAIT, || {
                    let request = self
                        .inner
                        .caller
                        .build_request(wire::AwaitAssignmentRequest { timeout_ms, session });
                    let mut stub = self.inner.caller.grpc_stub();
                    async move {
                        collect_assignment_pieces(
                            stub.await_assignment(request).await?.into_inner(),
                        )
                        .await
                    }
                })?;
            if let Some(world) = reply.world {
                let world = wire_conversions::decode_world(world, self.task_id())
                    .map_err(|reason| self.malformed_reply("the wait for ranks", reason))?;
                self.inner.caller.generation.store(world.generation.0, Ordering::Release);
                return Ok(world);
            }
            if Instant::now() >= deadline {
                let more = if reply.missing.len() < reply.missing_count as usize {
                    " and more"
                } else {
                    ""
                };
                let what = format!(
                    "all {all}, {} missing: {:?}{more}",
                    reply.missing_count, reply.missing
                );
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            }
        }
    }

    /// Sends a line of output. Blocks while the send buffer is full.
    ///
    /// # Errors
    /// `Forked`.
    pub fn send_log_line(&self, stream: OutputStream, text: &str) -> Result<()> {
        self.check_own_process()?;
        let stderr = stream == OutputStream::Stderr;
        let mut rest = text;
        loop {
            // A line without an end, such as a progress bar, must fit into messages of limited
            // size.
            let (head, tail) = rest.split_at(rest.floor_char_boundary(MAX_LINE_BYTES));
            self.inner.outbox.push_line(wire::LogLine { stderr, text: head.to_owned() });
            if tail.is_empty() {
                return Ok(());
            }
            rest = tail;
        }
    }

    /// Sends a metric. Never blocks: if the send buffer is full, the oldest metrics are dropped.
    ///
    /// # Errors
    /// `Forked`; `Options` for more than 1 MiB.
    pub fn send_metric(&self, kind: &str, data: &[u8]) -> Result<()> {
        self.check_own_process()?;
        if data.len() > MAX_CHUNK_BYTES {
            let reason = format!("a metric has at most {MAX_CHUNK_BYTES} bytes: {}", data.len());
            return Err(Error::Options { reason });
        }
        let data = Bytes::copy_from_slice(data);
        self.inner.outbox.push_metric(wire::Metric { kind: kind.to_owned(), data });
        Ok(())
    }

    /// Waits until the registrar has confirmed every record sent so far, or the connection is known
    /// to be broken.
    ///
    /// # Errors
    /// `Timeout`, `Closed`, `Lost`, `Forked`.
    pub fn flush_records(&self, deadline: Instant) -> Result<()> {
        self.check_own_process()?;
        let started = Instant::now();
        let (number, mut flushed) = self.inner.outbox.request_flush();
        let confirmed = async move { drop(flushed.wait_for(|flushed| *flushed >= number).await) };
        self.block_on("the confirmation of records", deadline, confirmed, || Error::Timeout {
            what: "records to reach the driver".to_owned(),
            elapsed: started.elapsed(),
        })
    }

    /// Sends the result of the worker.
    ///
    /// # Errors
    /// `Refused` beyond [`crate::MAX_RESULT_BYTES`], `Aborted`, `Lost`, `Timeout`.
    pub fn send_result(&self, data: &[u8], deadline: Instant) -> Result<()> {
        let data = Bytes::copy_from_slice(data);
        self.call_with_retries("a result", deadline, || {
            let chunks: Vec<wire::ResultChunk> = (0..data.len())
                // The registrar refuses messages of more than 2 MiB.
                .step_by(MAX_CHUNK_BYTES)
                .map(|at| data.slice(at..data.len().min(at + MAX_CHUNK_BYTES)))
                .map(|data| wire::ResultChunk { data })
                .collect();
            let request = self.inner.caller.build_request(tokio_stream::iter(chunks));
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.result(request).await }
        })?;
        Ok(())
    }

    /// Reports how the worker ended. After a failure, waits for the verdict, which names the first
    /// failure.
    ///
    /// # Errors
    /// `Lost`, `Timeout`, `Refused`.
    pub fn report_exit(
        &self,
        exit: &ExitReport,
        deadline: Instant,
    ) -> Result<Option<GenerationVerdict>> {
        let reply = self.call_with_retries("the report of an exit", deadline, || {
            let request = self.inner.caller.build_request(wire::ExitRequest::from(exit.clone()));
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.exit(request).await }
        })?;
        Ok(reply.verdict.map(Into::into))
    }

    /// Like [`TaskClient::report_exit`], for a success of this process itself. Makes only one
    /// attempt, because the registrar may be ending at the same time, and waits for no other
    /// worker.
    ///
    /// # Errors
    /// Like [`TaskClient::report_exit`].
    pub fn report_own_success(&self, deadline: Instant) -> Result<()> {
        self.check_own_process()?;
        let exit = ExitReport {
            kind: ExitKind::Code(0),
            peer_error: false,
            stopped: false,
            stderr_tail: Vec::new(),
        };
        let request = self.inner.caller.build_request(wire::ExitRequest::from(exit));
        let mut stub = self.inner.caller.grpc_stub();
        let late = || Error::Timeout {
            what: "the registrar's answer to a farewell".to_owned(),
            elapsed: CALL_RETRY_TIMEOUT,
        };
        self.block_on(
            "the report of an exit",
            deadline,
            async move { stub.exit(request).await },
            late,
        )?
        .map(|_| ())
        .map_err(|status| self.error_from_status("a farewell", &status))
    }

    /// Like [`TaskClient::report_exit`], but after a success also waits for the other workers of
    /// the generation, for up to one second. If they still work, returns `Pending`, and the caller
    /// must call again.
    ///
    /// # Errors
    /// Like [`TaskClient::report_exit`].
    pub fn report_exit_awaiting_peers(
        &self,
        exit: &ExitReport,
        deadline: Instant,
    ) -> Result<Poll<Option<GenerationVerdict>>> {
        let reply = self.call_with_retries("the report of an exit", deadline, || {
            let exit =
                wire::ExitRequest { together: true, ..wire::ExitRequest::from(exit.clone()) };
            let request = self.inner.caller.build_request(exit);
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.exit(request).await }
        })?;
        Ok(if reply.pending { Poll::Pending } else { Poll::Ready(reply.verdict.map(Into::into)) })
    }

    /// Starts the heartbeats of this agent. Calls `on_order` from another thread with each order of
    /// the registrar. The last one is `Stop`: by the registrar's verdict, or because the registrar
    /// has been gone for `timeout`. If the registrar's process is stopped while its kernel accepts
    /// connections, the wait is eight times as long. Another process that listens at the
    /// registrar's address does not count as the registrar. Once the registrar is given up, current
    /// and later calls fail with `Lost`.
    pub fn start_heartbeats(
        &self,
        timeout: Duration,
        on_order: impl FnMut(RegistrarOrder) + Send + 'static,
    ) {
        let ClientInner { caller, address, session, offer, lost, ticket, .. } = &*self.inner;
        let watch = heartbeat::RegistrarMonitor {
            caller: caller.clone(),
            address: address.clone(),
            fingerprint: ticket.fingerprint,
            session: *session,
            offer: Arc::clone(offer),
            outage_timeout: timeout,
            lost: lost.clone(),
        };
        let task = self.inner.handle.spawn(watch.run_heartbeats(Box::new(on_order)));
        self.inner.tasks.lock().push(task);
    }

    fn server_wait_millis(&self, deadline: Instant) -> u64 {
        duration_millis(deadline.saturating_duration_since(Instant::now()).min(MAX_SERVER_WAIT))
    }

    fn malformed_reply(&self, call: &'static str, reason: String) -> Error {
        Error::Malformed { job: self.job_id().0.clone(), call, reason }
    }

    /// Makes current and later calls fail with `Lost`: the caller knows that the registrar has
    /// ended.
    pub fn give_up_registrar(&self) {
        self.inner.lost.cancel_calls();
    }

    fn check_own_process(&self) -> Result<()> {
        let used_in = std::process::id();
        if used_in == self.inner.made_in {
            Ok(())
        } else {
            Err(Error::Forked { made_in: self.inner.made_in, used_in })
        }
    }

    fn block_on<T>(
        &self,
        call: &'static str,
        deadline: Instant,
        work: impl Future<Output = T>,
        late: impl FnOnce() -> Error,
    ) -> Result<T> {
        self.inner.handle.block_on(async {
            tokio::select! {
                done = tokio::time::timeout_at(deadline.into(), work) => done.map_err(|_| late()),
                () = self.inner.cancel.wait_cancelled() => Err(Error::Closed { what: "the connection to \
                                                                                 the registrar" }),
                // The heartbeats notice a dead registrar before a call that waits for minutes does.
                () = self.inner.lost.wait_cancelled() => Err(Error::Lost {
                    job: self.job_id().0.clone(),
                    call,
                    reason: "it has been silent for too long".to_owned(),
                }),
            }
        })
    }

    /// Makes a call, at most until `deadline`.
    fn call_with_retries<T, F>(
        &self,
        name: &'static str,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        self.check_own_process()?;
        let started = Instant::now();
        self.block_on(name, deadline, self.retry_while_disconnected(name, make), || {
            Error::Timeout {
                what: format!("the registrar's answer to {name}"),
                elapsed: started.elapsed(),
            }
        })?
    }

    /// Makes a call, and repeats it for up to `retry_timeout` while the connection is broken. Every
    /// call may be repeated.
    async fn retry_while_disconnected<T, F>(
        &self,
        name: &'static str,
        make: impl Fn() -> F,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let started = Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            let error = match make().await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => self.error_from_status(name, &status),
            };
            // A refusal would be the same again; only a broken connection can heal.
            if !matches!(error, Error::Lost { .. })
                || started.elapsed() + pause > self.retry_timeout()
            {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            // Short at first for a registrar that only closed one connection, and never longer than
            // a heartbeat.
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    fn error_from_status(&self, call: &'static str, status: &Status) -> Error {
        let theirs = status
            .metadata()
            .get(PROTOCOL_HEADER)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        // Before the codes: another version may use them for other reasons.
        if let Some(theirs) = theirs {
            return Error::Version { ours: PROTOCOL_VERSION, theirs };
        }
        let job = self.job_id().0.clone();
        let reason = status.message().to_owned();
        match status.code() {
            // gRPC has no code for a dismissal, so a header distinguishes it from the end of the
            // job.
            Code::Aborted if status.metadata().contains_key(DISMISSED_HEADER) => {
                Error::Dismissed { job, reason }
            }
            Code::Aborted => {
                Error::Aborted { job, reason, retry: status.metadata().contains_key(RETRY_HEADER) }
            }
            Code::Unauthenticated
            | Code::PermissionDenied
            | Code::NotFound
            | Code::AlreadyExists
            | Code::InvalidArgument
            | Code::OutOfRange
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::Unimplemented => Error::Refused { job, call, reason },
            _ => Error::Lost {
                job,
                call,
                reason: if reason.is_empty() { status.code().to_string() } else { reason },
            },
        }
    }
}

/// Assembles a reply from its pieces.
async fn collect_assignment_pieces(
    mut pieces: Streaming<wire::AwaitAssignmentReply>,
) -> std::result::Result<Response<wire::AwaitAssignmentReply>, Status> {
    let mut reply = wire::AwaitAssignmentReply::default();
    let mut world = BytesMut::new();
    while let Some(piece) = pieces.message().await? {
        if let Some(bytes) = &piece.world {
            world.extend_from_slice(bytes);
        }
        reply = piece;
    }
    reply.world = reply.world.is_some().then(|| world.freeze());
    Ok(Response::new(reply))
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        let changes = self.changes.lock().take();
        for task in self.tasks.lock().drain(..).chain(changes) {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests;
