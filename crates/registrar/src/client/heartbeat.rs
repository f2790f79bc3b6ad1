// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Heartbeats of an agent, and the registrar's orders.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farandole_membership::GenerationVerdict;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::authenticated_channel::AuthenticatedChannel;
use super::cancellation::CancellationToken;
use super::dial;
use crate::generated as wire;
use crate::ticket::CertificateFingerprint;
use crate::wire::PROTOCOL_VERSION;

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two attempts to connect again.
pub(super) const RECONNECT_INTERVAL: Duration = Duration::from_millis(200);

/// Factor by which an agent waits longer for a registrar whose process is stopped.
// A stopped process may continue, and then the job continues; a process that has ended never does.
const STOPPED_PROCESS_FACTOR: u32 = 8;
/// Longest time for the kernel of the registrar's host to accept a connection.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest timeout of an attempt to connect.
// Near the end of the outage timeout, a busy registrar must still have time for a TLS handshake.
const MIN_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// An order of the registrar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistrarOrder {
    /// The user interrupted the job: the worker gets SIGINT.
    Interrupt,
    /// The worker must end: by the registrar's verdict, or because the registrar is gone. This is
    /// the last order.
    Stop(GenerationVerdict),
}

type OrderCallback = Box<dyn FnMut(RegistrarOrder) + Send>;

/// The arguments of an agent's registration, after it has registered.
pub(super) type RepeatableRegistration = Arc<Mutex<Option<wire::RegisterRequest>>>;

/// An agent's watch of the registrar.
pub(super) struct RegistrarMonitor {
    pub(super) caller: AuthenticatedChannel,
    pub(super) address: String,
    /// The digest of the registrar's certificate.
    pub(super) fingerprint: CertificateFingerprint,
    pub(super) session: u64,
    pub(super) offer: RepeatableRegistration,
    /// Longest outage of the registrar.
    pub(super) outage_timeout: Duration,
    /// Cancelled when the registrar is given up.
    pub(super) lost: CancellationToken,
}

impl RegistrarMonitor {
    /// Sends heartbeats while the client lives. Calls `on_order` with each order of the registrar,
    /// and with `Stop` when the registrar has been gone for `outage_timeout`, or when its process
    /// has been stopped for `STOPPED_PROCESS_FACTOR` times as long.
    pub(super) async fn run_heartbeats(self, on_order: OrderCallback) {
        let Self { caller, address, fingerprint, session, offer, outage_timeout, lost } = self;
        let mut orders = RegistrarOrderForwarder { on_order, stopped: false };
        let mut last_answer_at = Instant::now();
        // Whether, since `last_answer_at`, the port was closed at some time: the registrar's
        // process has ended.
        let mut ended = false;
        loop {
            // An attempt to connect may take seconds, and must not extend `outage_timeout`.
            let began = Instant::now();
            let by = (last_answer_at + outage_timeout).max(began + MIN_ATTEMPT_TIMEOUT);
            let reason = match run_heartbeat_session(&caller, session, by, &mut orders).await {
                Ok(lasted) => {
                    (last_answer_at, ended) = (lasted, false);
                    "it closed the connection".to_owned()
                }
                Err(status) => {
                    // After a failure at once, check whether the port is closed. Skip the check
                    // after a slow failure: the process may only be stopped, and must not get
                    // further connections.
                    ended = ended
                        || (began.elapsed() < PROBE_TIMEOUT
                            && is_connection_refused(&address).await);
                    status.message().to_owned()
                }
            };
            let silent = last_answer_at.elapsed();
            if silent >= STOPPED_PROCESS_FACTOR * outage_timeout
                || (silent >= outage_timeout
                    && !may_registrar_be_alive(&address, fingerprint, ended).await)
            {
                // Before the order: calls of this agent that still wait must not delay the end of
                // its worker.
                lost.cancel_calls();
                let reason =
                    format!("lost the registrar for {:.1?}: {reason}", last_answer_at.elapsed());
                // The driver may have restarted when the tasks ask again.
                orders.forward_stop_once(GenerationVerdict { reason, cause: None, retry: true });
                return;
            }
            tokio::time::sleep(RECONNECT_INTERVAL).await;
            let by = (last_answer_at + outage_timeout).max(Instant::now() + MIN_ATTEMPT_TIMEOUT);
            // If the registration times out, it is repeated after the next attempt.
            drop(tokio::time::timeout_at(by.into(), repeat_registration(&caller, &offer)).await);
        }
    }
}

/// Passes the registrar's orders on: `Stop` only once.
struct RegistrarOrderForwarder {
    on_order: OrderCallback,
    stopped: bool,
}

impl RegistrarOrderForwarder {
    fn forward_stop_once(&mut self, verdict: GenerationVerdict) {
        // The registrar repeats the verdict on each new connection.
        if !std::mem::replace(&mut self.stopped, true) {
            (self.on_order)(RegistrarOrder::Stop(verdict));
        }
    }
}

/// Returns whether no process listens at an address.
pub(super) async fn is_connection_refused(address: &str) -> bool {
    let knock = tokio::time::timeout(PROBE_TIMEOUT, tokio::net::TcpStream::connect(address));
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    knock.await.is_ok_and(|answer| answer.err().is_some_and(refused))
}

/// Returns whether the registrar may still live. If its process is stopped, the kernel accepts
/// connections, and they stay silent. If its process has ended, or its host is down or cut off,
/// connections fail, unless another process has taken the port. Another process shows another
/// certificate or none; or it is silent, and the registrar had `ended` before.
async fn may_registrar_be_alive(
    address: &str,
    fingerprint: CertificateFingerprint,
    ended: bool,
) -> bool {
    let knock = tokio::time::timeout(PROBE_TIMEOUT, tokio::net::TcpStream::connect(address));
    if !knock.await.is_ok_and(|answer| answer.is_ok()) {
        return false;
    }
    let answer = tokio::time::timeout(
        MIN_ATTEMPT_TIMEOUT,
        dial::is_registrar_answering(address, fingerprint),
    );
    // No answer: the process is stopped. If the port was closed before, another process has it now.
    answer.await.unwrap_or(!ended)
}

/// Registers this agent again. If the connection of a waiting task breaks, the registrar forgets
/// the task. If the task is at work, repeating the registration changes nothing.
async fn repeat_registration(caller: &AuthenticatedChannel, offer: &RepeatableRegistration) {
    let Some(request) = offer.lock().clone() else { return };
    if let Ok(reply) = caller.grpc_stub().register(caller.build_request(request)).await {
        caller.generation.store(reply.into_inner().generation, Ordering::Release);
    }
}

/// Sends heartbeats over one connection until it ends, and returns the time of its end. The
/// connection must be established before `by`.
async fn run_heartbeat_session(
    caller: &AuthenticatedChannel,
    session: u64,
    by: Instant,
    orders: &mut RegistrarOrderForwarder,
) -> Result<Instant, Status> {
    // One slot: a second waiting heartbeat would say nothing new.
    let (sender, receiver) = mpsc::channel(1);
    let one = wire::Beat { protocol_version: PROTOCOL_VERSION, session };
    sender.try_send(one).map_err(|error| Status::internal(error.to_string()))?;
    let request = caller.build_request(ReceiverStream::new(receiver));
    let mut stub = caller.grpc_stub();
    let Ok(connected) = tokio::time::timeout_at(by.into(), stub.heartbeat(request)).await else {
        return Err(Status::deadline_exceeded("it does not answer"));
    };
    let mut directives = connected?.into_inner();
    let mut interval = tokio::time::interval(HEARTBEAT_INTERVAL);
    loop {
        tokio::select! {
            _ = interval.tick() => {
                // If the channel is full, the last heartbeat has not been sent yet. The keep-alive
                // of the connection decides whether the connection is broken.
                if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(one) {
                    return Ok(Instant::now());
                }
            }
            directive = directives.message() => match directive {
                Ok(Some(directive)) => {
                    if directive.interrupt {
                        (orders.on_order)(RegistrarOrder::Interrupt);
                    }
                    if let Some(verdict) = directive.stop {
                        orders.forward_stop_once(verdict.into());
                    }
                }
                Ok(None) | Err(_) => return Ok(Instant::now()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
    use std::thread::{self, JoinHandle};

    use farandole_config::{Config, PortRange};
    use farandole_world::TaskId;

    use super::*;
    use crate::client::TaskClient;
    use crate::server::{Registrar, RegistrarOptions};

    const OUTAGE: Duration = Duration::from_millis(1500);
    /// Upper bound of an outage and of the attempts under way at its end; less than the wait for a
    /// stopped registrar.
    const LONG: Duration = Duration::from_secs(9);

    fn registrar(first: u16) -> Registrar {
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        let (host, ports) = (Some("127.0.0.1".to_owned()), PortRange { first, last: first });
        let options = RegistrarOptions {
            host,
            port_range: ports,
            ..RegistrarOptions::from_config(1, &config)
        };
        Registrar::start_job(options).unwrap()
    }

    /// A proxy to the registrar. Cutting the proxy looks like a kill of the registrar.
    struct Way {
        listener: TcpListener,
        address: SocketAddr,
        cut: Arc<Mutex<Option<Vec<TcpStream>>>>,
        accepting: JoinHandle<()>,
    }

    impl Way {
        fn to(registrar: &Registrar) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (address, accepts) =
                (listener.local_addr().unwrap(), listener.try_clone().unwrap());
            let (cut, far) = (
                Arc::new(Mutex::new(Some(Vec::new()))),
                registrar.ticket().registrar_addresses()[0].clone(),
            );
            let open = Arc::clone(&cut);
            let accepting = thread::spawn(move || {
                for near in accepts.incoming() {
                    let (near, far) = (near.unwrap(), TcpStream::connect(&far).unwrap());
                    let mut open = open.lock();
                    let Some(open) = open.as_mut() else { return };
                    for (from, to) in [(&near, &far), (&far, &near)] {
                        let (mut from, mut to) =
                            (from.try_clone().unwrap(), to.try_clone().unwrap());
                        open.push(from.try_clone().unwrap());
                        thread::spawn(move || std::io::copy(&mut from, &mut to));
                    }
                }
            });
            Self { listener, address, cut, accepting }
        }

        /// Ends all connections, and returns the listener, which accepts no connection.
        fn cut(self) -> TcpListener {
            for stream in self.cut.lock().take().unwrap() {
                drop(stream.shutdown(Shutdown::Both));
            }
            drop(TcpStream::connect(self.address).unwrap());
            self.accepting.join().unwrap();
            self.listener
        }
    }

    /// Measures how long an agent waits for a killed registrar whose listener goes to `stranger`.
    fn waited<T>(stranger: impl FnOnce(TcpListener) -> T) -> Duration {
        let registrar = registrar(0);
        let way = Way::to(&registrar);
        let ticket = registrar.ticket().with_addresses(&[way.address.to_string()]);
        let deadline = Instant::now() + Duration::from_secs(30);
        let client = TaskClient::connect(&ticket, TaskId(0), None, deadline).unwrap();
        client.register_task(0, &crate::local_host_facts::host_facts(), deadline).unwrap();
        let (sender, ended) = std::sync::mpsc::channel();
        client.start_heartbeats(OUTAGE, move |order| drop(sender.send(order)));
        // Wait for the first heartbeat.
        thread::sleep(RECONNECT_INTERVAL);
        let began = Instant::now();
        let listens = stranger(way.cut());
        let lasted = match ended.recv_timeout(LONG) {
            Ok(order) => {
                let RegistrarOrder::Stop(verdict) = order else { panic!("a stop was expected") };
                assert!(verdict.reason.starts_with("lost the registrar"), "{}", verdict.reason);
                began.elapsed()
            }
            Err(_) => Duration::MAX,
        };
        drop(listens);
        lasted
    }

    /// Opens the same port again, like another process that takes the port once it is free.
    fn instead(listener: TcpListener) -> TcpListener {
        let address = listener.local_addr().unwrap();
        drop(listener);
        thread::sleep(OUTAGE);
        TcpListener::bind(address).unwrap()
    }

    #[test]
    fn another_process_at_the_registrars_port_is_not_the_registrar() {
        let silent = || waited(instead);
        let plain = || {
            waited(|listener| {
                let listener = instead(listener);
                thread::spawn(move || {
                    while let Ok((mut caller, _)) = listener.accept() {
                        drop(caller.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
                    }
                })
            })
        };
        let other = || {
            waited(|listener| {
                let port = instead(listener).local_addr().unwrap().port();
                registrar(port)
            })
        };
        thread::scope(|scope| {
            let ways = [
                ("silent", scope.spawn(silent)),
                ("plain", scope.spawn(plain)),
                ("other", scope.spawn(other)),
            ];
            // The kernel accepts connections for a stopped process.
            let stopped = waited(|listener| listener);
            for (name, lasted) in ways {
                let lasted = lasted.join().unwrap();
                assert!(lasted >= OUTAGE && lasted < LONG, "{name}: {lasted:?}");
            }
            assert_eq!(stopped, Duration::MAX, "one that is stopped is waited for");
        });
    }
}
