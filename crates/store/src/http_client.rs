// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The HTTP client of a backend. It sends the body of a request in small pieces and records when
//! the connection took each of them, which the client of `object_store` does not show.

use std::fmt::Display;
use std::net::ToSocketAddrs as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::client::{
    HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
};
use object_store::{ClientConfigKey, ClientOptions};
use rand::seq::SliceRandom as _;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{ClientBuilder, NoProxy, Proxy};
use tokio::time::Instant;

/// Bytes that the connection takes at once.
// Small, so that even a slow connection takes a piece within the longest silence.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Begin of an upload, and the time at which the connection took its last piece.
#[derive(Clone, Debug)]
pub(crate) struct UploadProgress(Arc<Mutex<UploadTimes>>);

#[derive(Clone, Copy, Debug)]
struct UploadTimes {
    started: Instant,
    last_piece: Instant,
    has_ended: bool,
}

impl UploadProgress {
    pub(crate) fn new() -> Self {
        let started = Instant::now();
        Self(Arc::new(Mutex::new(UploadTimes { started, last_piece: started, has_ended: false })))
    }

    fn record_sent_piece(&self, has_ended: bool) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (times.last_piece, times.has_ended) = (Instant::now(), has_ended);
    }

    /// Returns the end of the wait for the next piece, or for the answer after the last piece.
    ///
    /// The system buffers some of the last pieces. A connection that took the body slowly also
    /// delivers these slowly, so the wait for the answer may last as much longer as the body did.
    pub(crate) fn deadline(&self, silence: Duration) -> Instant {
        let times = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sending =
            if times.has_ended { times.last_piece - times.started } else { Duration::ZERO };
        times.last_piece + silence + sending
    }
}

/// A body that is sent in pieces.
struct PiecewiseBody {
    inner: HttpRequestBody,
    /// The rest of the current frame.
    rest: Bytes,
    sent: u64,
    total: u64,
    progress: UploadProgress,
}

impl Body for PiecewiseBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        while this.rest.is_empty() {
            match Pin::new(&mut this.inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => this.rest = frame.into_data().unwrap_or_default(),
                other => return other,
            }
        }
        let piece = this.rest.split_to(PIECE_BYTES.min(this.rest.len()));
        this.sent += piece.len() as u64;
        // The connection asks for a frame when it has room, so this is the progress of the
        // transfer.
        this.progress.record_sent_piece(this.sent >= this.total);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.sent >= self.total
    }

    fn size_hint(&self) -> SizeHint {
        // With an exact size, the client sends `Content-Length`, which S3 demands of an upload.
        SizeHint::with_exact(self.total - self.sent)
    }
}

/// Sends requests.
#[derive(Clone, Debug)]
pub(crate) struct PiecewiseClient(reqwest::Client);

impl PiecewiseClient {
    /// Makes the client that `object_store` would make of the same options.
    ///
    /// # Errors
    /// An option with a wrong value.
    pub(crate) fn new(options: &ClientOptions) -> object_store::Result<Self> {
        build_client(options).map(Self)
    }

    /// Sends a request, and records the progress of its body.
    pub(crate) async fn send(
        &self,
        request: HttpRequest,
        progress: UploadProgress,
    ) -> Result<HttpResponse, HttpError> {
        // The caller decides about repetitions, for every error alike.
        let failed = |error: reqwest::Error| HttpError::new(HttpErrorKind::Request, error);
        let (parts, body) = request.into_parts();
        let url = parts
            .uri
            .to_string()
            .parse()
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, InvalidUrl(error)))?;
        let mut request = reqwest::Request::new(parts.method, url);
        *request.headers_mut() = parts.headers;
        let total = body.content_length();
        *request.body_mut() = Some(match body.as_bytes() {
            Some(bytes) if total <= PIECE_BYTES => bytes.clone().into(),
            _ => reqwest::Body::wrap(PiecewiseBody {
                inner: body,
                rest: Bytes::new(),
                sent: 0,
                total: total as u64,
                progress,
            }),
        });
        let answer = self.0.execute(request).await.map_err(failed)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = HttpResponseBody::new(AnswerBody(reqwest::Body::from(answer)));
        let mut answer = HttpResponse::new(body);
        (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
        Ok(answer)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("not a URL: {0}")]
struct InvalidUrl(<reqwest::Url as std::str::FromStr>::Err);

/// The body of an answer, with errors of the backend's type.
struct AnswerBody(reqwest::Body);

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let failed = |error| HttpError::new(HttpErrorKind::Request, error);
        Pin::new(&mut self.0).poll_frame(context).map(|frame| frame.map(|f| f.map_err(failed)))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// Reads the value of an option.
fn parse_option<T>(
    options: &ClientOptions,
    key: ClientConfigKey,
    parse: impl Fn(&str) -> Option<T>,
) -> object_store::Result<Option<T>> {
    let Some(text) = options.get_config_value(&key) else { return Ok(None) };
    let value = parse(&text);
    // The value may be a secret, given by mistake.
    value
        .map(Some)
        .ok_or_else(|| http_client_error(format!("the option {key:?} has a wrong value")))
}

fn http_client_error(error: impl Display) -> object_store::Error {
    object_store::Error::Generic { store: "HTTP client", source: error.to_string().into() }
}

fn parse_flag(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" | "y" => Some(true),
        "0" | "false" | "off" | "no" | "n" => Some(false),
        _ => None,
    }
}

fn build_client(options: &ClientOptions) -> object_store::Result<reqwest::Client> {
    let flag = |key| parse_option(options, key, parse_flag).map(Option::unwrap_or_default);
    let duration = |key| parse_option(options, key, |text| humantime::parse_duration(text).ok());
    let mut builder = ClientBuilder::new();
    let agent = options.get_config_value(&ClientConfigKey::UserAgent);
    builder = builder.user_agent(agent.unwrap_or_else(|| DEFAULT_USER_AGENT.to_owned()));
    if let Some(headers) = options.get_default_headers() {
        builder = builder.default_headers(headers.clone());
    }
    if let Some(url) = options.get_config_value(&ClientConfigKey::ProxyUrl) {
        // The error would contain the password of the proxy.
        let proxy = Proxy::all(url).map_err(|_| http_client_error("proxy_url is not a URL"))?;
        let excludes = options.get_config_value(&ClientConfigKey::ProxyExcludes);
        builder = builder.proxy(proxy.no_proxy(excludes.and_then(|e| NoProxy::from_string(&e))));
        if let Some(pem) = options.get_config_value(&ClientConfigKey::ProxyCaCertificate) {
            let certificate = reqwest::tls::Certificate::from_pem(pem.as_bytes());
            builder = builder.add_root_certificate(certificate.map_err(http_client_error)?);
        }
    }
    if let Some(limit) = duration(ClientConfigKey::Timeout)? {
        builder = builder.timeout(limit);
    }
    if let Some(limit) = duration(ClientConfigKey::ConnectTimeout)? {
        builder = builder.connect_timeout(limit);
    }
    if let Some(limit) = duration(ClientConfigKey::PoolIdleTimeout)? {
        builder = builder.pool_idle_timeout(limit);
    }
    let count = parse_option(options, ClientConfigKey::PoolMaxIdlePerHost, |t| t.parse().ok())?;
    if let Some(count) = count {
        builder = builder.pool_max_idle_per_host(count);
    }
    builder = apply_http2_options(builder, options)?;
    if flag(ClientConfigKey::AllowInvalidCertificates)? {
        builder = builder.danger_accept_invalid_certs(true);
    }
    if flag(ClientConfigKey::RandomizeAddresses)? {
        builder = builder.dns_resolver(Arc::new(ShuffledAddresses));
    }
    // A compressed answer would hide the size of a file.
    let builder = builder.no_gzip().no_brotli().no_zstd().no_deflate();
    let builder = builder.https_only(!flag(ClientConfigKey::AllowHttp)?);
    builder.build().map_err(http_client_error)
}

fn apply_http2_options(
    mut builder: ClientBuilder,
    options: &ClientOptions,
) -> object_store::Result<ClientBuilder> {
    let flag = |key| parse_option(options, key, parse_flag).map(Option::unwrap_or_default);
    let duration = |key| parse_option(options, key, |text| humantime::parse_duration(text).ok());
    if let Some(interval) = duration(ClientConfigKey::Http2KeepAliveInterval)? {
        builder = builder.http2_keep_alive_interval(interval);
    }
    if let Some(limit) = duration(ClientConfigKey::Http2KeepAliveTimeout)? {
        builder = builder.http2_keep_alive_timeout(limit);
    }
    let size =
        parse_option(options, ClientConfigKey::Http2MaxFrameSize, |t| t.parse::<u32>().ok())?;
    builder = builder.http2_max_frame_size(size);
    if flag(ClientConfigKey::Http2KeepAliveWhileIdle)? {
        builder = builder.http2_keep_alive_while_idle(true);
    }
    if flag(ClientConfigKey::Http1Only)? {
        builder = builder.http1_only();
    }
    if flag(ClientConfigKey::Http2Only)? {
        builder = builder.http2_prior_knowledge();
    }
    Ok(builder)
}

const DEFAULT_USER_AGENT: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));

/// Resolves names to addresses in random order, so that requests spread over the hosts of a
/// service.
#[derive(Debug)]
struct ShuffledAddresses;

impl Resolve for ShuffledAddresses {
    fn resolve(&self, name: Name) -> Resolving {
        let resolve = move || {
            let mut found = (name.as_str(), 0).to_socket_addrs()?.collect::<Vec<_>>();
            found.shuffle(&mut rand::rng());
            std::io::Result::Ok(Box::new(found.into_iter()) as Addrs)
        };
        Box::pin(async move { Ok(tokio::task::spawn_blocking(resolve).await??) })
    }
}

/// Returns whether an endpoint is plain HTTP. A user who gives `http://` accepts that.
pub(crate) fn is_plain_http(endpoint: Option<&String>) -> bool {
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_the_backend_is_read() {
        let options = [
            (ClientConfigKey::ConnectTimeout, "3s"),
            (ClientConfigKey::Timeout, "1m"),
            (ClientConfigKey::PoolIdleTimeout, "2s"),
            (ClientConfigKey::PoolMaxIdlePerHost, "3"),
            (ClientConfigKey::Http2KeepAliveInterval, "2s"),
            (ClientConfigKey::Http2KeepAliveTimeout, "2s"),
            (ClientConfigKey::Http2MaxFrameSize, "20000"),
            (ClientConfigKey::ProxyUrl, "http://user:hidden@host:1"),
            (ClientConfigKey::AllowHttp, "yes"),
            (ClientConfigKey::UserAgent, "mine"),
        ];
        let good = options
            .iter()
            .fold(ClientOptions::new(), |options, (key, value)| options.with_config(*key, *value));
        build_client(&good).unwrap();
        let any_text = [ClientConfigKey::UserAgent, ClientConfigKey::ProxyUrl];
        for (key, _) in options.iter().filter(|(key, _)| !any_text.contains(key)) {
            let wrong = ClientOptions::new().with_config(*key, "hidden: \u{1}");
            let error = build_client(&wrong).unwrap_err().to_string();
            assert!(!error.contains("hidden"), "{error}");
        }
    }

    #[tokio::test]
    async fn silence_counts_from_the_last_piece_and_a_slow_body_allows_a_slow_end() {
        let (silence, start) = (Duration::from_secs(30), Instant::now());
        let progress = UploadProgress::new();
        let payload = object_store::PutPayload::from(vec![0; 3 * PIECE_BYTES + 1]);
        let mut body = PiecewiseBody {
            inner: payload.into(),
            rest: Bytes::new(),
            sent: 0,
            total: 3 * PIECE_BYTES as u64 + 1,
            progress: progress.clone(),
        };
        let mut sizes = Vec::new();
        for number in 1..=4 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let before = Instant::now();
            let frame = std::future::poll_fn(|c| Pin::new(&mut body).poll_frame(c)).await;
            sizes.push(frame.unwrap().unwrap().into_data().unwrap().len());
            // The time that the body took counts after its end.
            let (earliest, latest) = if number == 4 {
                (before + (before - start), Instant::now() + start.elapsed())
            } else {
                (before, Instant::now())
            };
            let slack = Duration::from_millis(1);
            let deadline = progress.deadline(silence);
            assert!(earliest + silence - slack <= deadline && deadline <= latest + silence);
        }
        assert_eq!(sizes, [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 1]);
        assert!(body.is_end_stream());
    }
}
