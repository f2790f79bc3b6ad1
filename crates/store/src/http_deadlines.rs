// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Deadlines for HTTP requests by progress: a transfer may take as long as bytes arrive, and a
//! silent connection is given up. The backend repeats every failed attempt until its own timeout.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use tokio::time::{Instant, Sleep, sleep};

use crate::store_operation::note_failed_attempt;

/// Longest wait for the next bytes.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// Slowest accepted transfer of one connection, in bytes a second. A part of 8 MiB may take two
/// minutes.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 64 << 10;

/// Returns the longest wait for the next bytes: several attempts fit into the timeout.
pub(crate) fn longest_silence(timeout: Duration) -> Duration {
    MAX_SILENCE.min(timeout / 6)
}

/// Makes clients with deadlines.
#[derive(Debug)]
pub(crate) struct DeadlineConnector {
    /// Longest time for repetitions of a request.
    pub(crate) timeout: Duration,
    /// Whether the user has set a deadline for whole requests, which then holds, too.
    pub(crate) has_own_timeout: bool,
}

impl HttpConnector for DeadlineConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let options = options.clone();
        let options = if self.has_own_timeout { options } else { options.with_timeout_disabled() };
        let client = ReqwestConnector::default().connect(&options)?;
        Ok(HttpClient::new(DeadlineClient { client, timeout: self.timeout }))
    }
}

#[derive(Debug)]
struct DeadlineClient {
    client: HttpClient,
    timeout: Duration,
}

impl DeadlineClient {
    /// Returns the longest wait for the status line of an answer.
    fn answer_limit(&self, request: &HttpRequest) -> Duration {
        if is_long_work(request) {
            // A second attempt fits into the timeout.
            return self.timeout / 2;
        }
        let bytes = request.body().content_length() as u64;
        longest_silence(self.timeout) + Duration::from_secs(bytes / MIN_BYTES_PER_SECOND)
    }
}

/// Returns whether the service does long work before it answers: it copies an object, or joins the
/// parts of one.
fn is_long_work(request: &HttpRequest) -> bool {
    let copies = request.headers().keys().any(|name| name.as_str().ends_with("-copy-source"));
    let query = request.uri().query().unwrap_or_default();
    let joins = request.method() == "POST" && query.contains("uploadId=")
        || query.contains("comp=blocklist");
    copies || joins
}

/// Returns whether a request reads the content of a file, in contrast to a listing.
fn is_file_read(request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    let lists = query.contains("list-type=") || query.contains("comp=list");
    request.method() == "GET" && !lists
}

/// A service that is silent or too slow.
#[derive(Debug, thiserror::Error)]
#[error("{what} within {limit:?}")]
struct SilentService {
    what: &'static str,
    limit: Duration,
}

impl SilentService {
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
        if !text.contains(&inner) {
            text = format!("{text}: {inner}");
        }
        next = error.source();
    }
    text
}

#[async_trait]
impl HttpService for DeadlineClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let limit = self.answer_limit(&request);
        let is_file_content = is_file_read(&request);
        let has_range = request.headers().contains_key("range");
        let answer = match tokio::time::timeout(limit, self.client.execute(request)).await {
            // The backend repeats errors of this kind for every request. Callers that create files
            // know that an earlier attempt may have succeeded.
            Ok(answer) => answer.map_err(|error| HttpError::new(HttpErrorKind::Request, error)),
            Err(_) => Err(SilentService { what: "no answer", limit }.into_http_error()),
        };
        let response = answer.inspect_err(|error| note_failed_attempt(&error_chain(error)))?;
        let status = response.status();
        // The backend takes the answer for the rest of an interrupted file, without a look.
        if has_range && status.as_u16() == 200 {
            return Err(HttpError::new(HttpErrorKind::Unknown, IgnoredRange));
        }
        if status.is_server_error() || matches!(status.as_u16(), 408 | 429) {
            note_failed_attempt(&format!("status {status}"));
        }
        let (parts, body) = response.into_parts();
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
struct IgnoredRange;

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
        let silent = SilentService { what: "too few bytes of the answer", limit: this.silence };
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
