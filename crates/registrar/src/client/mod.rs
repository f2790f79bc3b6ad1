// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A task's side: blocking calls from any thread, served by one thread of this process.

mod caller;
#[cfg(test)]
mod crowd;
mod dial;
mod elastic;
mod heartbeat;
mod meet;
mod outbox;
mod relay;
mod runtime;

use std::future::Future;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use farandole_config::Config;
use farandole_telemetry::Stream;
use farandole_world::{Generation, HostFacts, JobId, TaskId, World};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};

pub use self::elastic::HostChange;
pub use self::meet::Meet;
use self::outbox::Outbox;
pub use self::relay::Relay;
use crate::convert;
use crate::error::{Error, Result};
use crate::exit::{Exit, How, Verdict};
use crate::generated as wire;
use crate::generated::registrar_client::RegistrarClient;
use crate::ticket::Ticket;
use crate::wire::{DISMISSED, GENERATION, PROTOCOL, PROTOCOL_VERSION, RETRY, TASK, TOKEN};

/// The longest a call waits at the registrar before it is made again.
const POLL: Duration = Duration::from_secs(30);
/// Longest time for which a repeatable call is repeated after the connection breaks.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes in a piece of a result.
const CHUNK: usize = 1 << 20;
/// Longest line of output that is sent in one piece.
const MAX_LINE: usize = 64 << 10;

/// Ends the waits of all clones, from any thread.
#[derive(Clone, Debug)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Cancel {
    /// Not yet cancelled.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Makes current and later calls fail with `Closed`.
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    async fn cancelled(&self) {
        // The sender lives in `self`, so the wait ends by the condition alone.
        drop(self.0.subscribe().wait_for(|cancelled| *cancelled).await);
    }
}

impl Default for Cancel {
    fn default() -> Self {
        Self::new()
    }
}

/// The caller, and its connection.
#[derive(Clone)]
struct Caller {
    channel: Channel,
    token: MetadataValue<Ascii>,
    task: TaskId,
    generation: Arc<AtomicU64>,
}

impl Caller {
    fn stub(&self) -> RegistrarClient<Channel> {
        RegistrarClient::new(self.channel.clone()).max_decoding_message_size(usize::MAX)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert(TOKEN, self.token.clone());
        metadata.insert(TASK, self.task.0.into());
        metadata.insert(GENERATION, self.generation.load(Ordering::Acquire).into());
        request
    }
}

struct Inner {
    ticket: Ticket,
    caller: Caller,
    address: String,
    session: u64,
    handle: Handle,
    cancel: Cancel,
    /// Cancelled when a watch has given the registrar up.
    lost: Cancel,
    outbox: Arc<Outbox>,
    offer: heartbeat::Offer,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// The receiver of news of hosts.
    changes: Mutex<Option<JoinHandle<()>>>,
    /// Time for which a call is repeated while the connection is broken, in milliseconds.
    patience: AtomicU64,
    made_in: u32,
}

/// A connection of one task. Clones share it; the last one closes it.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

static OF_PROCESS: Mutex<Option<(u32, String, Client)>> = Mutex::new(None);

impl Client {
    /// Returns the connection of the worker that this process is, made on first use and shared from
    /// then on; `None` in a process that no launcher started.
    ///
    /// # Errors
    /// Like [`Client::connect`]; `Ticket` when the environment holds none that parses.
    pub fn of_process(config: &Config, deadline: Instant) -> Result<Option<Self>> {
        if config.job.is_empty() {
            return Ok(None);
        }
        let pid = std::process::id();
        let mut slot = OF_PROCESS.lock();
        if let Some((made_in, job, client)) = slot.as_ref()
            && *made_in == pid
            && *job == config.job
        {
            return Ok(Some(client.clone()));
        }
        if slot.as_ref().is_some_and(|(made_in, ..)| *made_in != pid) {
            // Its tasks run in the parent: ending them from a fork may wait for a lock that no
            // thread of the fork will release.
            std::mem::forget(slot.take());
        }
        let ticket: Ticket = config.job.parse()?;
        let task = u32::try_from(config.task).map_err(|_| Error::Options {
            reason: format!("no task has the number {}", config.task),
        })?;
        let generation = (config.generation > 0).then_some(Generation(config.generation));
        let client = Self::connect(&ticket, TaskId(task), generation, deadline)?;
        client.wait_out(config.outage);
        *slot = Some((pid, config.job.clone(), client.clone()));
        Ok(Some(client))
    }

    /// Connects as `task`; as part of `generation` where the caller knows it.
    ///
    /// # Errors
    /// `Unreachable` with the reason at each address.
    pub fn connect(
        ticket: &Ticket,
        task: TaskId,
        generation: Option<Generation>,
        deadline: Instant,
    ) -> Result<Self> {
        Self::connect_or_cancel(ticket, task, generation, deadline, Cancel::new())
    }

    /// Like [`Client::connect`]; `cancel` ends this call and every later one.
    ///
    /// # Errors
    /// `Unreachable` with the reason at each address, `Closed` once cancelled.
    pub fn connect_or_cancel(
        ticket: &Ticket,
        task: TaskId,
        generation: Option<Generation>,
        deadline: Instant,
        cancel: Cancel,
    ) -> Result<Self> {
        let handle = runtime::handle()?;
        let dialing = cancel.clone();
        let (channel, address) = handle.block_on(async move {
            tokio::select! {
                dialed = dial::dial(ticket, deadline) => dialed,
                () = dialing.cancelled() => Err(Error::Closed { what: "the connection to the \
                                                                       registrar" }),
            }
        })?;
        let mut token: MetadataValue<Ascii> = ticket
            .token
            .hex()
            .parse()
            .map_err(|_| Error::Ticket { reason: "its token does not fit into a header" })?;
        token.set_sensitive(true);
        let generation = Arc::new(AtomicU64::new(generation.unwrap_or_default().0));
        let caller = Caller { channel, token, task, generation };
        let outbox = Arc::new(Outbox::new());
        let pump = handle.spawn(outbox::pump(Arc::clone(&outbox), caller.clone()));
        let inner = Inner {
            ticket: ticket.clone(),
            caller,
            address,
            session: rand::random(),
            handle,
            cancel,
            lost: Cancel::new(),
            outbox,
            offer: heartbeat::Offer::default(),
            tasks: Mutex::new(vec![pump]),
            changes: Mutex::new(None),
            patience: AtomicU64::new(milliseconds(PATIENCE)),
            made_in: std::process::id(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Every call waits up to `outage` for a registrar that is gone and may come back. A shorter
    /// time than before changes nothing.
    pub fn wait_out(&self, outage: Duration) {
        self.inner.patience.fetch_max(milliseconds(outage), Ordering::AcqRel);
        self.inner.outbox.wait_out(milliseconds(outage));
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.inner.patience.load(Ordering::Acquire))
    }

    /// Until when a call may take that waits for nothing but its answer.
    fn soon(&self) -> Instant {
        Instant::now() + POLL.max(self.patience())
    }

    /// The ticket that let this task in.
    pub fn ticket(&self) -> &Ticket {
        &self.inner.ticket
    }

    /// The job.
    pub fn job_id(&self) -> &JobId {
        self.inner.ticket.job_id()
    }

    /// The task.
    pub fn task(&self) -> TaskId {
        self.inner.caller.task
    }

    /// Returns the address of this host from which the registrar is reached: where peers most
    /// likely reach this host.
    pub fn local_address(&self) -> Option<IpAddr> {
        let target = self.inner.address.to_socket_addrs().ok()?.next()?;
        let any = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Connecting a UDP socket asks for the route and sends nothing.
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    }

    /// Offers this task for a rank. Repeating it changes nothing.
    ///
    /// # Errors
    /// `Refused` for an unknown task, a duplicate or a stale attempt, `Version`, `Aborted`, `Lost`,
    /// `Timeout`.
    pub fn register(
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
        let reply = self.call("registration", deadline, || {
            let request = self.inner.caller.request(offer.clone());
            let mut stub = self.inner.caller.stub();
            async move { stub.register(request).await }
        })?;
        self.inner.caller.generation.store(reply.generation, Ordering::Release);
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

    /// Like [`Client::await_assignment`] where tasks are ranks, which a `Timeout` then names.
    ///
    /// # Errors
    /// Like [`Client::await_assignment`].
    pub fn await_ranks(&self, deadline: Instant) -> Result<World> {
        self.await_world(deadline, "ranks to come")
    }

    fn await_world(&self, deadline: Instant, all: &str) -> Result<World> {
        let started = Instant::now();
        let session = self.inner.offer.lock().as_ref().map(|offer| offer.session);
        loop {
            let timeout_ms = self.slice(deadline);
            let reply = self.call("the wait for ranks", deadline + POLL, || {
                let request =
                    self.inner.caller.request(wire::AwaitAssignmentRequest { timeout_ms, session });
                let mut stub = self.inner.caller.stub();
                async move { whole(stub.await_assignment(request).await?.into_inner()).await }
            })?;
            if let Some(world) = reply.world {
                let world = convert::decode_world(world, self.task())
                    .map_err(|reason| self.malformed("the wait for ranks", reason))?;
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

    /// Publishes `value` under `key` of this generation; the last value wins.
    ///
    /// # Errors
    /// `Refused` for an oversized key or value, `Aborted`, `Lost`.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        let message =
            wire::PutRequest { key: key.to_owned(), value: Bytes::copy_from_slice(value) };
        self.call("a put", self.soon(), || {
            let request = self.inner.caller.request(message.clone());
            let mut stub = self.inner.caller.stub();
            async move { stub.put(request).await }
        })?;
        Ok(())
    }

    /// Publishes `value` under `key` of this generation unless it has one, and returns its value:
    /// `value` exactly if no other caller was first. Repeating it changes nothing.
    ///
    /// # Errors
    /// `Refused` for an oversized key or value, `Aborted`, `Lost`.
    pub fn put_if_absent(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        let message =
            wire::PutIfAbsentRequest { key: key.to_owned(), value: Bytes::copy_from_slice(value) };
        let reply = self.call("a claim", self.soon(), || {
            let request = self.inner.caller.request(message.clone());
            let mut stub = self.inner.caller.stub();
            async move { stub.put_if_absent(request).await }
        })?;
        Ok(reply.value.into())
    }

    /// Waits until `key` of this generation has a value.
    ///
    /// # Errors
    /// `Timeout` at `deadline`, `Aborted` as soon as the generation is over, `Refused`, `Lost`.
    pub fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let started = Instant::now();
        loop {
            let timeout_ms = self.slice(deadline);
            let reply = self.call("a get", deadline + POLL, || {
                let request =
                    self.inner.caller.request(wire::GetRequest { key: key.to_owned(), timeout_ms });
                let mut stub = self.inner.caller.stub();
                async move { stub.get(request).await }
            })?;
            if let Some(value) = reply.value {
                return Ok(value.into());
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    what: format!("key {key}"),
                    elapsed: started.elapsed(),
                });
            }
        }
    }

    /// Sends a line of output. Blocks while too much waits to be sent.
    ///
    /// # Errors
    /// `Forked`.
    pub fn log(&self, stream: Stream, text: &str) -> Result<()> {
        self.own_process()?;
        let stderr = stream == Stream::Stderr;
        let mut rest = text;
        loop {
            let (head, tail) = rest.split_at(rest.floor_char_boundary(MAX_LINE));
            self.inner.outbox.push_line(wire::LogLine { stderr, text: head.to_owned() });
            if tail.is_empty() {
                return Ok(());
            }
            rest = tail;
        }
    }

    /// Sends a metric. Never blocks: the oldest waiting ones are dropped when too much waits.
    ///
    /// # Errors
    /// `Forked`; `Options` for more than 1 MiB.
    pub fn metric(&self, kind: &str, data: &[u8]) -> Result<()> {
        self.own_process()?;
        if data.len() > CHUNK {
            let reason = format!("a metric has at most {CHUNK} bytes: {}", data.len());
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
    pub fn flush(&self, deadline: Instant) -> Result<()> {
        self.own_process()?;
        let started = Instant::now();
        let (number, mut flushed) = self.inner.outbox.flush();
        let confirmed = async move { drop(flushed.wait_for(|flushed| *flushed >= number).await) };
        self.block_on("the confirmation of records", deadline, confirmed, || Error::Timeout {
            what: "records to reach the driver".to_owned(),
            elapsed: started.elapsed(),
        })
    }

    /// Hands over what the worker returned.
    ///
    /// # Errors
    /// `Refused` beyond [`crate::MAX_RESULT`], `Aborted`, `Lost`, `Timeout`.
    pub fn result(&self, data: &[u8], deadline: Instant) -> Result<()> {
        let data = Bytes::copy_from_slice(data);
        self.call("a result", deadline, || {
            let chunks: Vec<wire::ResultChunk> = (0..data.len())
                .step_by(CHUNK)
                .map(|at| data.slice(at..data.len().min(at + CHUNK)))
                .map(|data| wire::ResultChunk { data })
                .collect();
            let request = self.inner.caller.request(tokio_stream::iter(chunks));
            let mut stub = self.inner.caller.stub();
            async move { stub.result(request).await }
        })?;
        Ok(())
    }

    /// Reports how the worker ended. After a failure, waits for the verdict, which names the first
    /// failure.
    ///
    /// # Errors
    /// `Lost`, `Timeout`, `Refused`.
    pub fn exit(&self, exit: &Exit, deadline: Instant) -> Result<Option<Verdict>> {
        let reply = self.call("the report of an exit", deadline, || {
            let request = self.inner.caller.request(wire::ExitRequest::from(exit.clone()));
            let mut stub = self.inner.caller.stub();
            async move { stub.exit(request).await }
        })?;
        Ok(reply.verdict.map(Into::into))
    }

    /// Like [`Client::exit`] of this very process, which ends well and waits for no reply: tried
    /// once, because the registrar may be ending at the same time.
    ///
    /// # Errors
    /// Like [`Client::exit`].
    pub fn leave(&self, deadline: Instant) -> Result<()> {
        self.own_process()?;
        let exit =
            Exit { how: How::Code(0), peer_error: false, stopped: false, stderr_tail: Vec::new() };
        let request = self.inner.caller.request(wire::ExitRequest::from(exit));
        let mut stub = self.inner.caller.stub();
        let late = || Error::Timeout {
            what: "the registrar's answer to a farewell".to_owned(),
            elapsed: PATIENCE,
        };
        self.block_on(
            "the report of an exit",
            deadline,
            async move { stub.exit(request).await },
            late,
        )?
        .map(|_| ())
        .map_err(|status| self.error("a farewell", &status))
    }

    /// Like [`Client::exit`]; after a success it waits for the others of the generation, for a
    /// second: `Pending` when they still work, and then it is to be called again.
    ///
    /// # Errors
    /// Like [`Client::exit`].
    pub fn exit_together(&self, exit: &Exit, deadline: Instant) -> Result<Poll<Option<Verdict>>> {
        let reply = self.call("the report of an exit", deadline, || {
            let exit =
                wire::ExitRequest { together: true, ..wire::ExitRequest::from(exit.clone()) };
            let request = self.inner.caller.request(exit);
            let mut stub = self.inner.caller.stub();
            async move { stub.exit(request).await }
        })?;
        Ok(if reply.pending { Poll::Pending } else { Poll::Ready(reply.verdict.map(Into::into)) })
    }

    /// Shows the registrar from now on that this agent lives, and calls `on_end` once, from another
    /// thread, when the worker must end: by the registrar's verdict, or because the registrar has
    /// been gone for `patience`. One whose process is stopped, while its kernel takes connections,
    /// is waited for eight times as long. Another process that listens at its address does not
    /// count. Once the registrar is given up, current and later calls fail with `Lost`.
    pub fn watch(&self, patience: Duration, on_end: impl FnOnce(Verdict) + Send + 'static) {
        let Inner { caller, address, session, offer, lost, ticket, .. } = &*self.inner;
        let watch = heartbeat::Watch {
            caller: caller.clone(),
            address: address.clone(),
            fingerprint: ticket.fingerprint,
            session: *session,
            offer: Arc::clone(offer),
            patience,
            lost: lost.clone(),
        };
        let task = self.inner.handle.spawn(watch.beat(Box::new(on_end)));
        self.inner.tasks.lock().push(task);
    }

    fn slice(&self, deadline: Instant) -> u64 {
        milliseconds(deadline.saturating_duration_since(Instant::now()).min(POLL))
    }

    fn malformed(&self, call: &'static str, reason: String) -> Error {
        Error::Malformed { job: self.job_id().0.clone(), call, reason }
    }

    fn own_process(&self) -> Result<()> {
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
                () = self.inner.cancel.cancelled() => Err(Error::Closed { what: "the connection to \
                                                                                 the registrar" }),
                () = self.inner.lost.cancelled() => Err(Error::Lost {
                    job: self.job_id().0.clone(),
                    call,
                    reason: "it has been silent for too long".to_owned(),
                }),
            }
        })
    }

    /// Makes a call, at most until `deadline`.
    fn call<T, F>(&self, name: &'static str, deadline: Instant, make: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        self.own_process()?;
        let started = Instant::now();
        self.block_on(name, deadline, self.repeated(name, make), || Error::Timeout {
            what: format!("the registrar's answer to {name}"),
            elapsed: started.elapsed(),
        })?
    }

    /// Makes a call; makes it again while the connection is broken, for a while. Every call may be
    /// repeated.
    async fn repeated<T, F>(&self, name: &'static str, make: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let started = Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            let error = match make().await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => self.error(name, &status),
            };
            if !matches!(error, Error::Lost { .. }) || started.elapsed() + pause > self.patience() {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    fn error(&self, call: &'static str, status: &Status) -> Error {
        let theirs =
            status.metadata().get(PROTOCOL).and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(theirs) = theirs {
            return Error::Version { ours: PROTOCOL_VERSION, theirs };
        }
        let job = self.job_id().0.clone();
        let reason = status.message().to_owned();
        match status.code() {
            Code::Aborted if status.metadata().contains_key(DISMISSED) => {
                Error::Dismissed { job, reason }
            }
            Code::Aborted => {
                Error::Aborted { job, reason, retry: status.metadata().contains_key(RETRY) }
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

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns a reply put together from its pieces.
async fn whole(
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

impl Drop for Inner {
    fn drop(&mut self) {
        let changes = self.changes.lock().take();
        for task in self.tasks.lock().drain(..).chain(changes) {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{Options, Registrar};

    #[test]
    fn another_protocol_version_is_refused_by_its_number() {
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        let registrar = Registrar::start(Options::from_config(1, &config)).unwrap();
        let deadline = Instant::now() + POLL;
        let client = Client::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
        let request = wire::RegisterRequest { protocol_version: 99, ..Default::default() };
        let answer = client.inner.handle.block_on(async {
            client.inner.caller.stub().register(client.inner.caller.request(request)).await
        });
        let error = client.error("registration", &answer.unwrap_err());
        assert!(matches!(error, Error::Version { theirs: PROTOCOL_VERSION, .. }), "{error}");
    }

    #[test]
    fn an_agent_that_was_silent_while_it_waited_registers_again() {
        let mut config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        // The shortest silence that counts is 3 s.
        config.peer_timeout = Duration::from_secs(1);
        let registrar = Registrar::start(Options::from_config(2, &config)).unwrap();
        let deadline = Instant::now() + POLL;
        let client = Client::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
        client.register(0, &crate::host::facts(), deadline).unwrap();
        let beat = wire::Beat { protocol_version: PROTOCOL_VERSION, session: client.inner.session };
        client.inner.handle.block_on(async {
            let (sender, receiver) = tokio::sync::mpsc::channel(1);
            sender.send(beat).await.unwrap();
            let beats = tokio_stream::wrappers::ReceiverStream::new(receiver);
            let request = client.inner.caller.request(beats);
            let mut directives =
                client.inner.caller.stub().heartbeat(request).await.unwrap().into_inner();
            let lost =
                |event: &crate::Event| matches!(event, crate::Event::Lost { task: TaskId(0), .. });
            while !registrar.events(Instant::now()).unwrap().records.iter().any(lost) {
                assert!(Instant::now() < deadline, "it is not dropped");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            sender.send(beat).await.unwrap();
            let end = tokio::time::timeout(Duration::from_secs(5), directives.message()).await;
            assert!(matches!(end, Ok(Ok(None) | Err(_))), "the stream goes on: {end:?}");
        });
    }

    #[test]
    fn records_are_not_waited_for_once_the_registrar_is_given_up() {
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        let registrar = Registrar::start(Options::from_config(1, &config)).unwrap();
        let deadline = Instant::now() + POLL;
        let client = Client::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
        client.register(0, &crate::host::facts(), deadline).unwrap();
        client.watch(Duration::from_millis(500), drop);
        drop(registrar);
        client.log(Stream::Stdout, "a last line").unwrap();
        let flushed = client.flush(deadline);
        assert!(matches!(flushed, Err(Error::Lost { .. })), "{flushed:?}");
        assert!(matches!(client.put("key", b"value"), Err(Error::Lost { .. })));
    }
}
