// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finding the address at which the registrar answers.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::error::{Error, Result};
use crate::server::STREAM_WINDOW;
use crate::ticket::{Fingerprint, Ticket};
use crate::tls::{Pinned, SERVER_NAME};

/// Head start of an address over the one after it (RFC 8305). Where all of a large job connect at
/// once, answers take a while, and every connection more makes them take longer.
const STAGGER: Duration = Duration::from_millis(250);
/// The longest one address may take.
const ONE_ADDRESS: Duration = Duration::from_secs(5);
/// Rounds over all addresses that must all be refused before the registrar counts as gone.
const ROUNDS: u32 = 4;

/// Bytes of links that may be on their way here, on one connection: each has room of its own.
const CONNECTION_WINDOW: u32 = 1 << 30;

struct Failure {
    reason: String,
    /// Whether asking again could help.
    passing: bool,
}

/// Connects to the first address that answers with the right certificate; tries again until
/// `deadline`, or until every address has refused several times.
pub(super) async fn dial(ticket: &Ticket, deadline: Instant) -> Result<(Channel, String)> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(100);
    let mut round = 1;
    loop {
        let failures = match every_address(ticket, deadline).await {
            Ok(connected) => return Ok(connected),
            Err(failures) => failures,
        };
        let hopeless = round >= ROUNDS && failures.iter().all(|(_, failure)| !failure.passing);
        if hopeless || Instant::now() + pause >= deadline {
            return Err(Error::Unreachable {
                job: ticket.job_id().0.clone(),
                tried: failures
                    .into_iter()
                    .map(|(address, failure)| (address, failure.reason))
                    .collect(),
                elapsed: started.elapsed(),
            });
        }
        // Jitter, so that thousands of tasks do not ask in step.
        tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
        pause = (pause * 2).min(Duration::from_secs(1));
        round += 1;
    }
}

async fn every_address(
    ticket: &Ticket,
    deadline: Instant,
) -> std::result::Result<(Channel, String), Vec<(String, Failure)>> {
    let mut attempts = JoinSet::new();
    let limit = ONE_ADDRESS.min(deadline.saturating_duration_since(Instant::now()));
    for (place, address) in (0u32..).zip(ticket.addresses()) {
        let (address, fingerprint) = (address.clone(), ticket.fingerprint);
        attempts.spawn(async move {
            tokio::time::sleep(STAGGER * place).await;
            let connected = match tokio::time::timeout(limit, connect(&address, fingerprint, false))
                .await
            {
                Ok(connected) => connected,
                Err(_) => {
                    Err(Failure { reason: format!("no answer within {limit:.1?}"), passing: true })
                }
            };
            (address, connected)
        });
    }
    let mut failures = Vec::new();
    while let Some(attempt) = attempts.join_next().await {
        match attempt {
            Ok((address, Ok(channel))) => return Ok((channel, address)),
            Ok((address, Err(failure))) => failures.push((address, failure)),
            Err(error) => {
                failures
                    .push(("?".to_owned(), Failure { reason: error.to_string(), passing: false }));
            }
        }
    }
    Err(failures)
}

async fn connect(
    address: &str,
    fingerprint: Fingerprint,
    for_links: bool,
) -> std::result::Result<Channel, Failure> {
    let tls = ClientTlsConfig::new().domain_name(SERVER_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .and_then(|endpoint| {
            endpoint.tls_config_with_verifier(tls, Arc::new(Pinned::new(fingerprint)))
        })
        .map_err(|error| failure(&error))?
        .tcp_nodelay(true)
        .connect_timeout(ONE_ADDRESS)
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    let endpoint = if for_links {
        endpoint
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
    } else {
        endpoint
    };
    endpoint.connect().await.map_err(|error| failure(&error))
}

/// Connects once more, for links that share the connection: a slow one does not take the room of
/// the others.
pub(super) async fn again(ticket: &Ticket, address: &str) -> Result<Channel> {
    let started = Instant::now();
    let unreachable = |reason| Error::Unreachable {
        job: ticket.job_id().0.clone(),
        tried: vec![(address.to_owned(), reason)],
        elapsed: started.elapsed(),
    };
    match tokio::time::timeout(ONE_ADDRESS, connect(address, ticket.fingerprint, true)).await {
        Ok(connected) => connected.map_err(|failure| unreachable(failure.reason)),
        Err(_) => Err(unreachable(format!("no answer within {ONE_ADDRESS:.1?}"))),
    }
}

/// Returns whether the registrar with this certificate answers at an address.
pub(super) async fn answers(address: &str, fingerprint: Fingerprint) -> bool {
    connect(address, fingerprint, false).await.is_ok()
}

fn failure(error: &tonic::transport::Error) -> Failure {
    let mut innermost = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        innermost = cause.to_string();
        source = cause.source();
    }
    if innermost.contains("ApplicationVerificationFailure") {
        let reason =
            "what answers there has another certificate: not this job's registrar".to_owned();
        return Failure { reason, passing: false };
    }
    Failure { passing: !innermost.contains("onnection refused"), reason: innermost }
}
