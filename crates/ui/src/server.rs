// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The server: HTTP on loopback, in a separate thread.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONNECTION, HeaderValue, IF_NONE_MATCH};
use hyper::http::StatusCode;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::{Semaphore, oneshot};

use crate::answer::ViewerSite;
use crate::catalog::RunCatalog;
use crate::connection_slots::{ViewerConnectionSlot, ViewerConnectionSlots};
use crate::curves::SeriesCache;
use crate::error::{Error, Result};
use crate::reply::ViewerReply;

/// Random bytes of a token: 128 bits cannot be guessed.
const TOKEN_BYTES: usize = 16;
/// Requests that are answered at the same time; further ones wait.
const MAX_CONCURRENT_REQUESTS: usize = 8;
/// Connections that are open at the same time.
const MAX_CONNECTIONS: usize = 128;
/// Longest life of a connection before a request on it has the token.
const UNPROVEN_CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for a client with the token to send the headers of its next request.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a failed attempt to accept a connection.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Between two messages about that.
const ACCEPT_ERROR_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The content of a viewer, and its address.
#[derive(Clone, Debug)]
pub struct ViewerSettings {
    /// Stores, or directories of runs, as paths or URLs.
    pub stores: Vec<String>,
    /// Directory with `viewer.js` and `viewer.css`.
    pub page: PathBuf,
    /// Port on loopback; 0 is any.
    pub port: u16,
}

/// A running server; it ends when it is dropped.
#[derive(Debug)]
pub struct RunViewer {
    token: String,
    address: SocketAddr,
    stop_sender: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RunViewer {
    /// Starts the server. No store is touched before the page asks.
    ///
    /// # Errors
    /// No store, text that is none, a page that is not installed, a port that is taken.
    pub fn start_server(settings: &ViewerSettings) -> Result<Self> {
        if settings.stores.is_empty() {
            return Err(Error::NoStore);
        }
        let token = random_token();
        let site = Arc::new(ViewerSite {
            token: token.clone(),
            script: read_page_file(&settings.page, "viewer.js")?,
            style: read_page_file(&settings.page, "viewer.css")?,
            catalog: RunCatalog::open(&settings.stores)?,
            series_cache: SeriesCache::default(),
        });
        let refuse = |source| Error::Listen { port: settings.port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, settings.port)).map_err(refuse)?;
        // Tokio demands it of a listener that it takes over.
        listener.set_nonblocking(true).map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        // One thread is enough: answers are computed on other threads.
        let runtime = Builder::new_current_thread().enable_all().build().map_err(refuse)?;
        let (ends, ended) = oneshot::channel();
        let serve = move || {
            runtime.block_on(async move {
                tokio::select! {
                    () = accept_connections(listener, site) => {}
                    // The end of this block drops the runtime, and so closes all connections.
                    _ = ended => {}
                }
            });
        };
        let thread = std::thread::Builder::new()
            .name("farandole-ui".to_owned())
            .spawn(serve)
            .map_err(refuse)?;
        Ok(Self { token, address, stop_sender: Some(ends), thread: Some(thread) })
    }

    /// Returns the link, with the token.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.address, self.path())
    }

    /// Returns the link's path, which proxies put behind a prefix of theirs.
    pub fn path(&self) -> String {
        format!("/{}/", self.token)
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Stops the server. When this returns, the port is closed.
    pub fn close(&mut self) {
        drop(self.stop_sender.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            drop(thread.join());
        }
    }
}

impl Drop for RunViewer {
    fn drop(&mut self) {
        self.close();
    }
}

fn read_page_file(directory: &Path, name: &str) -> Result<Bytes> {
    let path = directory.join(name);
    std::fs::read(&path).map(Bytes::from).map_err(|source| Error::Page { path, source })
}

fn random_token() -> String {
    rand::random::<[u8; TOKEN_BYTES]>().iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn accept_connections(listener: TcpListener, site: Arc<ViewerSite>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let places = ViewerConnectionSlots::new(MAX_CONNECTIONS);
    let workers = Arc::new(Semaphore::new(MAX_CONCURRENT_REQUESTS));
    let mut logged_at: Option<Instant> = None;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // A connection without a place is closed.
                if let Some((place, unseated)) = places.take_slot() {
                    tokio::spawn(serve_connection(
                        stream,
                        Arc::clone(&site),
                        Arc::clone(&workers),
                        place,
                        unseated,
                    ));
                }
            }
            // Out of descriptors, or the client has disconnected.
            Err(error) => {
                if logged_at
                    .is_none_or(|logged_at| logged_at.elapsed() >= ACCEPT_ERROR_LOG_INTERVAL)
                {
                    logged_at = Some(Instant::now());
                    tracing::error!(%error, "the run viewer cannot accept connections; it tries \
                                             again");
                }
                // Without descriptors, `accept` fails at once, and the loop would use up a core.
                tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
            }
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    site: Arc<ViewerSite>,
    workers: Arc<Semaphore>,
    place: ViewerConnectionSlot,
    unseated: oneshot::Receiver<()>,
) {
    let place = Arc::new(place);
    let service = service_fn(move |request: Request<Incoming>| {
        let (site, workers, place) = (Arc::clone(&site), Arc::clone(&workers), Arc::clone(&place));
        async move { Ok::<_, Infallible>(respond_to_request(&request, site, workers, &place).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_TIMEOUT);
    let served = http.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // An error here means that the browser has closed the connection.
        _ = served => {}
        () = wait_until_evicted(unseated) => {}
    }
}

/// Returns when a connection that is not proven has to be closed; never for a proven one.
async fn wait_until_evicted(unseated: oneshot::Receiver<()>) {
    if let Ok(Ok(())) = tokio::time::timeout(UNPROVEN_CONNECTION_TIMEOUT, unseated).await {
        std::future::pending::<()>().await;
    }
}

async fn respond_to_request(
    request: &Request<Incoming>,
    site: Arc<ViewerSite>,
    workers: Arc<Semaphore>,
    place: &ViewerConnectionSlot,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    if site.path_after_token(&path).is_none() {
        // A client without the token gets neither a thread nor another request.
        let mut refused = site.answer_request(&path, "").into_response(None);
        refused.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return refused;
    }
    place.mark_token_proven();
    // No address changes anything.
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut refused = ViewerReply::failure_reply(StatusCode::METHOD_NOT_ALLOWED, "only GET")
            .into_response(None);
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    let query = request.uri().query().unwrap_or_default().to_owned();
    let seen =
        request.headers().get(IF_NONE_MATCH).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
    // Before the thread starts, so that waiting requests have none.
    let permit = workers.acquire_owned().await;
    let (logged_at, answer) = oneshot::channel();
    // Stores block, and they must not be called on a thread of a runtime.
    let work = move || {
        let reply = site.answer_request(&path, &query);
        // Comes before the transfer: a slow browser must not keep others waiting.
        drop(permit);
        // The receiver is gone if the browser has closed the connection.
        drop(logged_at.send(reply));
    };
    let started = std::thread::Builder::new().name("farandole-ui-answer".to_owned()).spawn(work);
    let reply = match started {
        Ok(_) => answer.await.ok(),
        Err(_) => None,
    };
    let failed = || {
        ViewerReply::failure_reply(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request could not be answered",
        )
    };
    reply.unwrap_or_else(failed).into_response(seen.as_deref())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    fn ask(port: u16, request: &str) -> String {
        let mut stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn open(viewer: &RunViewer) -> std::net::TcpStream {
        let stream = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, viewer.port())).unwrap();
        stream.set_read_timeout(Some(4 * UNPROVEN_CONNECTION_TIMEOUT)).unwrap();
        stream
    }

    /// Returns the first answer to a request that leaves the connection open.
    fn head(stream: &mut std::net::TcpStream, request: &str) -> String {
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = vec![0; 64 << 10];
        let read = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    }

    fn viewer() -> (RunViewer, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("viewer.js"), "").unwrap();
        std::fs::write(folder.path().join("viewer.css"), "").unwrap();
        (RunViewer::start_server(&settings(folder.path())).unwrap(), folder)
    }

    fn settings(folder: &Path) -> ViewerSettings {
        ViewerSettings {
            stores: vec![folder.to_string_lossy().into_owned()],
            page: folder.to_owned(),
            port: 0,
        }
    }

    #[test]
    fn a_viewer_listens_on_loopback_until_it_is_closed() {
        let (mut viewer, _folder) = viewer();
        assert!(viewer.url().starts_with(&format!("http://127.0.0.1:{}/", viewer.port())));
        assert_eq!(viewer.path().len(), 2 * TOKEN_BYTES + 2);
        assert!(ask(viewer.port(), &format!("GET {}", viewer.path())).starts_with("HTTP/1.1 200"));
        assert!(
            ask(viewer.port(), &format!("GET {}api/runs", viewer.path())).contains("\"runs\":[]")
        );
        assert!(ask(viewer.port(), "GET /").starts_with("HTTP/1.1 404"));
        assert!(ask(viewer.port(), &format!("POST {}", viewer.path())).starts_with("HTTP/1.1 405"));
        assert!(ask(viewer.port(), "POST /").starts_with("HTTP/1.1 404"));
        let port = viewer.port();
        viewer.close();
        assert!(std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err());
    }

    #[test]
    fn strangers_that_take_every_place_do_not_keep_the_page_from_its_owner() {
        let (viewer, _folder) = viewer();
        let mut owners = open(&viewer);
        let page = format!("HEAD {} HTTP/1.1\r\nHost: x\r\n\r\n", viewer.path());
        assert!(head(&mut owners, &page).starts_with("HTTP/1.1 200"));
        let strangers: Vec<_> = (0..2 * MAX_CONNECTIONS).map(|_| open(&viewer)).collect();
        let started = Instant::now();
        assert!(ask(viewer.port(), &format!("GET {}", viewer.path())).starts_with("HTTP/1.1 200"));
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        assert!(
            head(&mut owners, &page).starts_with("HTTP/1.1 200"),
            "the owner's connection was closed"
        );
        drop(strangers);
    }

    #[test]
    fn a_connection_without_the_token_ends_after_one_request_or_five_seconds() {
        let (viewer, _folder) = viewer();
        let (mut silent, mut slow) = (open(&viewer), open(&viewer));
        let started = Instant::now();
        let answer = head(&mut open(&viewer), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
        for letter in "GET / HTTP/1.1".chars() {
            if write!(slow, "{letter}").is_err() {
                break;
            }
            std::thread::sleep(UNPROVEN_CONNECTION_TIMEOUT / 10);
        }
        for stream in [&mut silent, &mut slow] {
            stream.set_read_timeout(Some(2 * UNPROVEN_CONNECTION_TIMEOUT)).unwrap();
            match stream.read(&mut [0]) {
                Ok(read) => assert_eq!(read, 0, "it is answered"),
                Err(error) => {
                    assert_eq!(
                        error.kind(),
                        std::io::ErrorKind::ConnectionReset,
                        "it is still open"
                    )
                }
            }
        }
        assert!(started.elapsed() < 4 * UNPROVEN_CONNECTION_TIMEOUT, "{:?}", started.elapsed());
    }

    #[test]
    fn tokens_differ() {
        assert_ne!(random_token(), random_token());
    }

    #[test]
    fn a_page_that_is_not_installed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = RunViewer::start_server(&settings(folder.path())).unwrap_err();
        assert!(error.to_string().ends_with("viewer.js"), "{error}");
        let none = ViewerSettings { stores: Vec::new(), ..settings(folder.path()) };
        assert!(matches!(RunViewer::start_server(&none), Err(Error::NoStore)));
    }
}
