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

use super::{Caller, Cancel};
use crate::exit::Verdict;
use crate::generated as wire;
use crate::wire::PROTOCOL_VERSION;

/// Time between two signs of life.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two attempts to connect again.
const PAUSE: Duration = Duration::from_millis(200);

/// How many times as long a registrar is waited for whose process is stopped.
const STOPPED: u32 = 8;
/// How long its kernel may take to say that somebody listens.
const KNOCK: Duration = Duration::from_secs(1);
/// The least time that an attempt to connect has.
const ATTEMPT: Duration = Duration::from_secs(2);

type OnEnd = Box<dyn FnOnce(Verdict) + Send>;

/// What an agent has registered with, once it has.
pub(super) type Offer = Arc<Mutex<Option<wire::RegisterRequest>>>;

/// What an agent watches the registrar with.
pub(super) struct Watch {
    pub(super) caller: Caller,
    pub(super) address: String,
    pub(super) session: u64,
    pub(super) offer: Offer,
    /// How long the registrar may be gone.
    pub(super) patience: Duration,
    /// Cancelled when the registrar is given up.
    pub(super) lost: Cancel,
}

impl Watch {
    /// Beats for as long as the client lives. `on_end` is called at most once: when the registrar says so, when it has
    /// been gone for `patience`, or when it has been stopped for some times as long.
    pub(super) async fn beat(self, on_end: OnEnd) {
        let Self { caller, address, session, offer, patience, lost } = self;
        let mut on_end = Some(on_end);
        let mut heard = Instant::now();
        loop {
            // An attempt to connect may take seconds, and must not make the patience longer.
            let by = (heard + patience).max(Instant::now() + ATTEMPT);
            let reason = match session_of_beats(&caller, session, by, &mut on_end).await {
                Ok(lasted) => {
                    heard = lasted;
                    "it closed the connection".to_owned()
                }
                Err(status) => status.message().to_owned(),
            };
            let silent = heard.elapsed();
            if silent >= STOPPED * patience || (silent >= patience && !listens(&address).await) {
                lost.cancel();
                if let Some(on_end) = on_end.take() {
                    let reason = format!("lost the registrar for {:.1?}: {reason}", heard.elapsed());
                    // The driver may be back by the time that somebody asks again.
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

/// Whether somebody listens at an address. Of a process that is stopped the kernel says so; of one that has ended, of a
/// host that is gone or cut off, nobody does.
async fn listens(address: &str) -> bool {
    let knock = tokio::time::timeout(KNOCK, tokio::net::TcpStream::connect(address));
    knock.await.is_ok_and(|answer| answer.is_ok())
}

/// A registrar that saw the connection break has forgotten a task that waits for its rank; one that runs it has not,
/// and repeating a registration changes nothing there.
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
                // Full: the last one has not left yet, which the connection's own keep-alive will judge.
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
