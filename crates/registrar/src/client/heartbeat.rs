// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Heartbeats of an agent, and the registrar's order to stop.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Caller, Cancel, dial};
use crate::exit::Verdict;
use crate::generated as wire;
use crate::ticket::Fingerprint;
use crate::wire::PROTOCOL_VERSION;

/// Time between two signs of life.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two attempts to connect again.
const PAUSE: Duration = Duration::from_millis(200);

/// Factor by which a registrar is awaited longer if its process is stopped.
const STOPPED: u32 = 8;
/// Longest time for its kernel to accept a connection.
const KNOCK: Duration = Duration::from_secs(1);
/// The least time that an attempt to connect has.
const ATTEMPT: Duration = Duration::from_secs(2);

type OnEnd = Box<dyn FnOnce(Verdict) + Send>;

/// The arguments of an agent's registration, after it has registered.
pub(super) type Offer = Arc<Mutex<Option<wire::RegisterRequest>>>;

/// An agent's watch of the registrar.
pub(super) struct Watch {
    pub(super) caller: Caller,
    pub(super) address: String,
    /// The digest of the registrar's certificate.
    pub(super) fingerprint: Fingerprint,
    pub(super) session: u64,
    pub(super) offer: Offer,
    /// Longest outage of the registrar.
    pub(super) patience: Duration,
    /// Cancelled when the registrar is given up.
    pub(super) lost: Cancel,
}

impl Watch {
    /// Beats for as long as the client lives. `on_end` is called at most once: when the registrar
    /// says so, when it has been gone for `patience`, or when it has been stopped for some times as
    /// long.
    pub(super) async fn beat(self, on_end: OnEnd) {
        let Self { caller, address, fingerprint, session, offer, patience, lost } = self;
        let mut on_end = Some(on_end);
        let mut heard = Instant::now();
        // Whether no process has listened at some time since then.
        let mut ended = false;
        loop {
            // An attempt to connect may take seconds, and must not make the patience longer.
            let began = Instant::now();
            let by = (heard + patience).max(began + ATTEMPT);
            let reason = match session_of_beats(&caller, session, by, &mut on_end).await {
                Ok(lasted) => {
                    (heard, ended) = (lasted, false);
                    "it closed the connection".to_owned()
                }
                Err(status) => {
                    // If this fails at once, no process listens; a stopped process is not asked
                    // more often for that.
                    ended = ended || (began.elapsed() < KNOCK && is_refused(&address).await);
                    status.message().to_owned()
                }
            };
            let silent = heard.elapsed();
            if silent >= STOPPED * patience
                || (silent >= patience && !may_live(&address, fingerprint, ended).await)
            {
                lost.cancel();
                if let Some(on_end) = on_end.take() {
                    let reason =
                        format!("lost the registrar for {:.1?}: {reason}", heard.elapsed());
                    // The driver may be back by the next question.
                    on_end(Verdict { reason, cause: None, retry: true });
                }
                return;
            }
            tokio::time::sleep(PAUSE).await;
            let by = (heard + patience).max(Instant::now() + ATTEMPT);
            // One that is late is made again after the next attempt.
            drop(tokio::time::timeout_at(by.into(), offer_again(&caller, &offer)).await);
        }
    }
}

/// Returns whether no process listens at an address.
async fn is_refused(address: &str) -> bool {
    let knock = tokio::time::timeout(KNOCK, tokio::net::TcpStream::connect(address));
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    knock.await.is_ok_and(|answer| answer.err().is_some_and(refused))
}

/// Returns whether the registrar may still live. For a stopped process, the kernel accepts
/// connections, which then stay silent. For a process that has ended, and for a host that is gone
/// or cut off, connections are not accepted, unless another process has the port: that one has
/// another certificate or none, or is silent and came after the registrar had `ended`.
async fn may_live(address: &str, fingerprint: Fingerprint, ended: bool) -> bool {
    let knock = tokio::time::timeout(KNOCK, tokio::net::TcpStream::connect(address));
    if !knock.await.is_ok_and(|answer| answer.is_ok()) {
        return false;
    }
    let answer = tokio::time::timeout(ATTEMPT, dial::answers(address, fingerprint));
    answer.await.unwrap_or(!ended)
}

/// A registrar that saw the connection break has forgotten a task that waits for its rank; one that
/// runs it has not, and repeating a registration changes nothing there.
async fn offer_again(caller: &Caller, offer: &Offer) {
    let Some(request) = offer.lock().clone() else { return };
    if let Ok(reply) = caller.stub().register(caller.request(request)).await {
        caller.generation.store(reply.into_inner().generation, Ordering::Release);
    }
}

/// Beats over one connection, which must stand `by` then, until it ends; returns when it did.
async fn session_of_beats(
    caller: &Caller,
    session: u64,
    by: Instant,
    on_end: &mut Option<OnEnd>,
) -> Result<Instant, Status> {
    let (sender, receiver) = mpsc::channel(1);
    let one = wire::Beat { protocol_version: PROTOCOL_VERSION, session };
    sender.try_send(one).map_err(|error| Status::internal(error.to_string()))?;
    let request = caller.request(ReceiverStream::new(receiver));
    let mut stub = caller.stub();
    let Ok(connected) = tokio::time::timeout_at(by.into(), stub.heartbeat(request)).await else {
        return Err(Status::deadline_exceeded("it does not answer"));
    };
    let mut directives = connected?.into_inner();
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            _ = interval.tick() => {
                // Full: the last one has not left yet, which the connection's own keep-alive will
                // judge.
                if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(one) {
                    return Ok(Instant::now());
                }
            }
            directive = directives.message() => match directive {
                Ok(Some(directive)) => {
                    if let (Some(stop), Some(on_end)) = (directive.stop, on_end.take()) {
                        on_end(stop.into());
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
    use crate::client::Client;
    use crate::server::{Options, Registrar};

    const OUTAGE: Duration = Duration::from_millis(1500);
    /// The limit of an outage and of the attempts under way at its end; less than the wait for a
    /// stopped registrar.
    const LONG: Duration = Duration::from_secs(9);

    fn registrar(first: u16) -> Registrar {
        let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
        let (host, ports) = (Some("127.0.0.1".to_owned()), PortRange { first, last: first });
        let options = Options { host, port_range: ports, ..Options::from_config(1, &config) };
        Registrar::start(options).unwrap()
    }

    /// A way to the registrar: when it is cut, that looks as if the registrar was killed.
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
            let (cut, far) =
                (Arc::new(Mutex::new(Some(Vec::new()))), registrar.ticket().addresses()[0].clone());
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

        /// Ends all connections; what still listens, and accepts nothing.
        fn cut(self) -> TcpListener {
            for stream in self.cut.lock().take().unwrap() {
                drop(stream.shutdown(Shutdown::Both));
            }
            drop(TcpStream::connect(self.address).unwrap());
            self.accepting.join().unwrap();
            self.listener
        }
    }

    /// Measures how long an agent waits for a registrar that is killed, and in whose place
    /// `stranger` listens then.
    fn waited<T>(stranger: impl FnOnce(TcpListener) -> T) -> Duration {
        let registrar = registrar(0);
        let way = Way::to(&registrar);
        let ticket = registrar.ticket().readdressed(&[way.address.to_string()]);
        let deadline = Instant::now() + Duration::from_secs(30);
        let client = Client::connect(&ticket, TaskId(0), None, deadline).unwrap();
        client.register(0, &crate::host::facts(), deadline).unwrap();
        let (told, ended) = std::sync::mpsc::channel();
        client.watch(OUTAGE, move |verdict| drop(told.send(verdict)));
        // Until it beats.
        thread::sleep(PAUSE);
        let began = Instant::now();
        let listens = stranger(way.cut());
        let lasted = match ended.recv_timeout(LONG) {
            Ok(verdict) => {
                assert!(verdict.reason.starts_with("lost the registrar"), "{}", verdict.reason);
                began.elapsed()
            }
            Err(_) => Duration::MAX,
        };
        drop(listens);
        lasted
    }

    /// Another process takes the port, once it is free.
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
            // The kernel takes connections for a process that is stopped.
            let stopped = waited(|listener| listener);
            for (name, lasted) in ways {
                let lasted = lasted.join().unwrap();
                assert!(lasted >= OUTAGE && lasted < LONG, "{name}: {lasted:?}");
            }
            assert_eq!(stopped, Duration::MAX, "one that is stopped is waited for");
        });
    }
}
