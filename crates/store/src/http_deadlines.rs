// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Deadlines for HTTP requests by progress: a transfer may take as long as bytes arrive, and a
//! silent connection is given up. The backend repeats every failed attempt until its own timeout.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::credentials::{CredentialRefusal, CredentialSigner};
use crate::http_client::{PIECE_BYTES, PiecewiseClient, UploadProgress};
use crate::store_operation::{
    CopyState, note_copy_state, note_failed_attempt, note_refused_credential,
};

/// Longest wait for the next bytes.
// Six attempts fit into the default timeout of 3 minutes.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// Slowest accepted download over one connection, in bytes a second.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 64 << 10;

/// Returns the longest wait for the next bytes: several attempts fit into the timeout.
pub(crate) fn longest_silence(timeout: Duration) -> Duration {
    MAX_SILENCE.min(timeout / 6)
}

/// Pause before a request is sent again for which no fresh credential was found.
const EXPIRED_CREDENTIAL_PAUSE: Duration = Duration::from_millis(500);
/// Codes of services for a credential that was good and has expired.
const EXPIRY_CODES: &[&str] = &["ExpiredToken", "TokenRefreshRequired", "InvalidToken"];
/// Largest answer in which such a code is sought.
const MAX_REFUSAL_BYTES: usize = 64 << 10;

/// Makes clients with deadlines.
#[derive(Debug)]
pub(crate) struct DeadlineConnector {
    /// Longest time for repetitions of a request.
    timeout: Duration,
    /// Whether the user has set a deadline for whole requests, which then holds, too.
    has_own_timeout: bool,
    signer: Option<Arc<dyn CredentialSigner>>,
}

impl DeadlineConnector {
    pub(crate) fn new(timeout: Duration, has_own_timeout: bool) -> Self {
        Self { timeout, has_own_timeout, signer: None }
    }

    /// Returns the connector of a client that signs its requests again.
    pub(crate) fn with_signer(self, signer: Arc<dyn CredentialSigner>) -> Self {
        Self { signer: Some(signer), ..self }
    }
}

impl HttpConnector for DeadlineConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let options = options.clone();
        // A deadline for whole requests would end large transfers that make progress.
        let options = if self.has_own_timeout { options } else { options.with_timeout_disabled() };
        let client = PiecewiseClient::new(&options)?;
        let (timeout, signer) = (self.timeout, self.signer.clone());
        Ok(HttpClient::new(DeadlineClient { client, timeout, signer, accepted: AtomicU64::new(0) }))
    }
}

#[derive(Debug)]
struct DeadlineClient {
    client: PiecewiseClient,
    timeout: Duration,
    signer: Option<Arc<dyn CredentialSigner>>,
    /// Number of the last credential that the service has accepted, plus one.
    accepted: AtomicU64,
}

impl DeadlineClient {
    /// Returns the longest wait for the next piece of an upload, or for the answer.
    fn silence_limit(&self, request: &HttpRequest) -> Duration {
        // The system buffers megabytes of an upload, and takes no more of it for a while if the
        // connection is slow. A second attempt fits into the timeout.
        let is_upload = request.body().content_length() > PIECE_BYTES;
        let is_long = is_upload || is_long_running_request(request);
        if is_long { self.timeout / 2 } else { longest_silence(self.timeout) }
    }

    /// Sends a request, and gives it up if the service takes no piece of its body, or gives no
    /// answer after the last piece.
    async fn send_with_deadline(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let limit = self.silence_limit(&request);
        let progress = UploadProgress::new();
        let mut answer = std::pin::pin!(self.client.send(request, progress.clone()));
        loop {
            let deadline = progress.deadline(limit);
            tokio::select! {
                answer = &mut answer => return answer,
                () = sleep_until(deadline) => {}
            }
            // The connection may have taken another piece during the sleep.
            if progress.deadline(limit) <= Instant::now() {
                return Err(SilentServiceError { what: "no progress", limit }.into_http_error());
            }
        }
    }
}

/// Returns whether the service does long work before it answers: it copies an object, or joins the
/// parts of one.
fn is_long_running_request(request: &HttpRequest) -> bool {
    // `x-amz-copy-source`, `x-goog-copy-source` or `x-ms-copy-source`.
    let copies = request.headers().keys().any(|name| name.as_str().ends_with("-copy-source"));
    let query = request.uri().query().unwrap_or_default();
    // S3 joins the parts of an upload by POST, Azure by PUT of a list of blocks.
    let joins = request.method() == "POST" && query.contains("uploadId=")
        || query.contains("comp=blocklist");
    copies || joins
}

/// Returns whether a request reads the content of a file, in contrast to a listing.
fn is_file_read(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    // The first parameter is the one of S3, the second one of Azure.
    let lists = query.contains("list-type=") || query.contains("comp=list");
    request.method() == "GET" && !lists
}

/// A service that is silent or too slow.
#[derive(Debug, thiserror::Error)]
#[error("{what} within {limit:?}")]
struct SilentServiceError {
    what: &'static str,
    limit: Duration,
}

impl SilentServiceError {
    /// Returns an error that the backend repeats.
    fn into_http_error(self) -> HttpError {
        HttpError::new(HttpErrorKind::Request, self)
    }
}

/// Returns the text of an error and of its sources, the innermost last.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let inner = error.to_string();
        // Many errors repeat the text of their source.
        if !text.contains(&inner) {
            text = format!("{text}: {inner}");
        }
        next = error.source();
    }
    text
}

/// Returns whether an answer refuses the credential, with the same answer again.
async fn detect_credential_refusal(
    answer: HttpResponse,
    is_head: bool,
) -> Result<(HttpResponse, Option<CredentialRefusal>), HttpError> {
    let status = answer.status().as_u16();
    if !matches!(status, 400 | 401 | 403) {
        return Ok((answer, None));
    }
    let (parts, body) = answer.into_parts();
    let body = body.bytes().await?;
    let text = String::from_utf8_lossy(body.get(..MAX_REFUSAL_BYTES).unwrap_or(body.as_ref()));
    // Azure has the code in a header, because a HEAD has no body.
    let code = parts.headers.get("x-ms-error-code").and_then(|code| code.to_str().ok());
    let has_code = EXPIRY_CODES.iter().any(|code| text.contains(code))
        || code.is_some_and(|code| code == "AuthenticationFailed");
    // S3 answers 400 to an expired token, and a HEAD has no room for the code.
    let says_expired = has_code || status == 401 || is_head && status == 400;
    let refusal = (says_expired || status == 403).then_some(CredentialRefusal { says_expired });
    Ok((HttpResponse::from_parts(parts, body.into()), refusal))
}

impl DeadlineClient {
    /// Sends a request that is signed by the credential in use. If the service refuses the
    /// credential, the next one is tried once. If an accepted credential has expired and there is
    /// no other one yet, the request waits for it like for a busy service.
    async fn call_signed(
        &self,
        signer: &dyn CredentialSigner,
        mut request: HttpRequest,
    ) -> Result<HttpResponse, HttpError> {
        // The backend does not repeat errors of this kind, and the renewal has made its own
        // attempts.
        let failed = |error| HttpError::new(HttpErrorKind::Unknown, error);
        let Some(mut signature) = signer.sign(&mut request).await.map_err(failed)? else {
            return self.call_once(request).await;
        };
        let started = Instant::now();
        let is_head = request.method() == "HEAD";
        let mut was_replaced = false;
        loop {
            let answer = self.call_once(request.clone()).await?;
            let (answer, refusal) = detect_credential_refusal(answer, is_head).await?;
            let Some(refusal) = refusal else {
                if answer.status().is_success() {
                    // Relaxed: only whether it is 0 counts.
                    self.accepted.store(signature.number + 1, Ordering::Relaxed);
                }
                return Ok(answer);
            };
            let may_wait = refusal.says_expired
                && !signature.is_fixed
                // A credential that was never accepted is wrong: time does not help.
                && self.accepted.load(Ordering::Relaxed) > 0
                && started.elapsed() < self.timeout;
            let mut reason = String::new();
            if !was_replaced || may_wait {
                match signer.sign_after_refusal(&mut request, &signature, &refusal).await {
                    Ok(Some(next)) => {
                        signature = next;
                        if was_replaced {
                            sleep(EXPIRED_CREDENTIAL_PAUSE).await;
                        }
                        was_replaced = true;
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) => reason = format!("; {error}"),
                }
                if may_wait {
                    let origin = &signature.origin;
                    note_failed_attempt(&format!(
                        "the credentials from {origin} have expired{reason}"
                    ));
                    sleep(EXPIRED_CREDENTIAL_PAUSE).await;
                    continue;
                }
            }
            let what = if refusal.says_expired { "has expired or is wrong" } else { "was refused" };
            let origin = signature.origin;
            note_refused_credential(format!("the credential from {origin} {what}{reason}"));
            return Ok(answer);
        }
    }
}

#[async_trait]
impl HttpService for DeadlineClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        match &self.signer {
            Some(signer) => self.call_signed(signer.as_ref(), request).await,
            None => self.call_once(request).await,
        }
    }
}

impl DeadlineClient {
    async fn call_once(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_file_content = is_file_read(&request);
        let has_range = request.headers().contains_key("range");
        // The backend repeats these errors for every request. Callers that create files know that
        // an earlier attempt may have succeeded.
        let answer = self.send_with_deadline(request).await;
        let response = answer.inspect_err(|error| note_failed_attempt(&error_chain(error)))?;
        let status = response.status();
        // The backend takes the answer for the rest of an interrupted file, without a look.
        if has_range && status.as_u16() == 200 {
            return Err(HttpError::new(HttpErrorKind::Unknown, IgnoredRangeError));
        }
        if status.is_server_error() || matches!(status.as_u16(), 408 | 429) {
            note_failed_attempt(&format!("status {status}"));
        }
        let (parts, body) = response.into_parts();
        // Azure may answer before a copy is made, and the backend does not look at it.
        let text = |name| parts.headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(status) = text("x-ms-copy-status") {
            let progress = text("x-ms-copy-progress").unwrap_or_default().to_owned();
            note_copy_state(CopyState { status: status.to_owned(), progress });
        }
        let body = HttpResponseBody::new(DeadlineBody::new(body, longest_silence(self.timeout)));
        if is_file_content {
            return Ok(HttpResponse::from_parts(parts, body));
        }
        // The backend continues the content of a file, and nothing else, after an interruption.
        let whole = body.bytes().await;
        let whole = whole.map_err(|error| HttpError::new(HttpErrorKind::Request, error))?;
        Ok(HttpResponse::from_parts(parts, whole.into()))
    }
}

/// A service answered a request for a part of a file with the whole file.
#[derive(Debug, thiserror::Error)]
#[error("the service ignored the range of a request, and sent the file from its beginning")]
struct IgnoredRangeError;

/// A body that fails if it is silent, or slower than [`MIN_BYTES_PER_SECOND`] on average.
struct DeadlineBody {
    inner: HttpResponseBody,
    silence: Duration,
    /// First poll, and bytes since then.
    started: Option<Instant>,
    received: u64,
    /// End of the wait for the next bytes, while there is one.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl DeadlineBody {
    fn new(inner: HttpResponseBody, silence: Duration) -> Self {
        Self { inner, silence, started: None, received: 0, deadline: None }
    }

    /// Returns the remaining time for the next bytes.
    fn remaining_time(&mut self) -> Duration {
        let started = *self.started.get_or_insert_with(Instant::now);
        // The limit is an average: bytes that came early allow a pause later.
        let earned = Duration::from_secs(self.received / MIN_BYTES_PER_SECOND);
        self.silence.min((self.silence + earned).saturating_sub(started.elapsed()))
    }
}

impl Body for DeadlineBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.inner).poll_frame(context) {
            this.deadline = None;
            match &frame {
                Some(Ok(frame)) => {
                    this.received += frame.data_ref().map_or(0, |data| data.len() as u64);
                }
                Some(Err(error)) => note_failed_attempt(&error_chain(error)),
                None => {}
            }
            return Poll::Ready(frame);
        }
        let remaining = this.remaining_time();
        let deadline = this.deadline.get_or_insert_with(|| Box::pin(sleep(remaining)));
        if deadline.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let silent =
            SilentServiceError { what: "too few bytes of the answer", limit: this.silence };
        note_failed_attempt(&silent.to_string());
        Poll::Ready(Some(Err(silent.into_http_error())))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
