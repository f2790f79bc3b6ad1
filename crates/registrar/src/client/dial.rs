// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Search for the address at which the registrar answers.

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::error::{Error, Result};
use crate::server::LINK_STREAM_WINDOW_BYTES;
use crate::ticket::{CertificateFingerprint, Ticket};
use crate::tls::{PinnedCertVerifier, SERVER_NAME};

/// Head start of an address over the next one (RFC 8305). If all tasks of a large job connect at
/// once, answers are slow, and each further connection makes them slower.
const ADDRESS_STAGGER: Duration = Duration::from_millis(250);
/// Longest attempt to connect to one address.
// Longer than a few lost SYN packets, which Linux repeats after 1 and 3 s.
const ADDRESS_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of rounds in which every address must refuse before the registrar counts as gone.
// A registrar that restarts refuses connections for some tenths of a second, as long as the pauses
// between four rounds.
const MIN_REFUSED_ROUNDS: u32 = 4;

/// HTTP/2 window of a connection that carries links. It is so large that only the window of each
/// stream limits a link.
const LINK_CONNECTION_WINDOW_BYTES: u32 = 1 << 30;

struct ConnectFailure {
    reason: String,
    /// Whether another attempt could succeed.
    is_transient: bool,
}

/// Connects to the first address that answers with the right certificate; tries again until
/// `deadline`, or until every address has refused several times.
pub(super) async fn dial_registrar(
    ticket: &Ticket,
    deadline: Instant,
) -> Result<(Channel, String)> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(100);
    let mut round = 1;
    loop {
        let failures = match dial_all_addresses(ticket, deadline).await {
            Ok(connected) => return Ok(connected),
            Err(failures) => failures,
        };
        let hopeless = round >= MIN_REFUSED_ROUNDS
            && failures.iter().all(|(_, failure)| !failure.is_transient);
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
        // Jitter, so that thousands of tasks do not retry at the same moment.
        tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
        pause = (pause * 2).min(Duration::from_secs(1));
        round += 1;
    }
}

async fn dial_all_addresses(
    ticket: &Ticket,
    deadline: Instant,
) -> std::result::Result<(Channel, String), Vec<(String, ConnectFailure)>> {
    let mut attempts = JoinSet::new();
    let limit = ADDRESS_CONNECT_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()));
    for (place, address) in (0u32..).zip(ticket.registrar_addresses()) {
        let (address, fingerprint) = (address.clone(), ticket.fingerprint);
        attempts.spawn(async move {
            // The most likely address comes first in the ticket, so it gets its head start.
            tokio::time::sleep(ADDRESS_STAGGER * place).await;
            let connected =
                match tokio::time::timeout(limit, connect_to_address(&address, fingerprint, false))
                    .await
                {
                    Ok(connected) => connected,
                    Err(_) => Err(ConnectFailure {
                        reason: format!("no answer within {limit:.1?}"),
                        is_transient: true,
                    }),
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
                failures.push((
                    "?".to_owned(),
                    ConnectFailure { reason: error.to_string(), is_transient: false },
                ));
            }
        }
    }
    Err(failures)
}

async fn connect_to_address(
    address: &str,
    fingerprint: CertificateFingerprint,
    for_links: bool,
) -> std::result::Result<Channel, ConnectFailure> {
    let tls = ClientTlsConfig::new().domain_name(SERVER_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .and_then(|endpoint| {
            // The digest replaces a certificate authority: a job has none, and its certificate is
            // self-signed.
            endpoint.tls_config_with_verifier(tls, Arc::new(PinnedCertVerifier::new(fingerprint)))
        })
        .map_err(|error| classify_failure(&error))?
        .tcp_nodelay(true)
        .connect_timeout(ADDRESS_CONNECT_TIMEOUT)
        // A call may wait at the registrar for half a minute; without pings, a cut network would go
        // unnoticed.
        .http2_keep_alive_interval(Duration::from_secs(2))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true);
    let endpoint = if for_links {
        endpoint
            .initial_stream_window_size(LINK_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(LINK_CONNECTION_WINDOW_BYTES)
    } else {
        endpoint
    };
    endpoint.connect().await.map_err(|error| classify_failure(&error))
}

/// Opens a second connection for relayed links. A slow link does not use up the window of other
/// calls.
pub(super) async fn open_link_channel(ticket: &Ticket, address: &str) -> Result<Channel> {
    let started = Instant::now();
    let unreachable = |reason| Error::Unreachable {
        job: ticket.job_id().0.clone(),
        tried: vec![(address.to_owned(), reason)],
        elapsed: started.elapsed(),
    };
    match tokio::time::timeout(
        ADDRESS_CONNECT_TIMEOUT,
        connect_to_address(address, ticket.fingerprint, true),
    )
    .await
    {
        Ok(connected) => connected.map_err(|failure| unreachable(failure.reason)),
        Err(_) => Err(unreachable(format!("no answer within {ADDRESS_CONNECT_TIMEOUT:.1?}"))),
    }
}

/// Returns whether the registrar with this certificate answers at an address.
pub(super) async fn is_registrar_answering(
    address: &str,
    fingerprint: CertificateFingerprint,
) -> bool {
    connect_to_address(address, fingerprint, false).await.is_ok()
}

fn classify_failure(error: &tonic::transport::Error) -> ConnectFailure {
    let mut innermost = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        innermost = cause.to_string();
        source = cause.source();
    }
    // tonic gives the cause only as text. Another attempt would find the same wrong process.
    if innermost.contains("ApplicationVerificationFailure") {
        let reason =
            "what answers there has another certificate: not this job's registrar".to_owned();
        return ConnectFailure { reason, is_transient: false };
    }
    ConnectFailure { is_transient: !innermost.contains("onnection refused"), reason: innermost }
}
