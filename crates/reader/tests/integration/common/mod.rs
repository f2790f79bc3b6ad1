// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A bucket that answers slowly, or not at all.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use farandole_store::{BackendOptions, Store, configure_options};

/// The bucket's reaction to a request for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Answers.
    Fine,
    /// Answers with this status.
    Status(u16),
    /// Answers so many times with 500 and then as it should.
    Shaky(u64),
}

#[derive(Debug)]
struct Inside {
    files: Mutex<BTreeMap<String, Bytes>>,
    delay: Mutex<Duration>,
    mood: Mutex<Mood>,
    requests: AtomicU64,
    bytes: AtomicU64,
    closed: AtomicBool,
}

/// An S3 bucket in this process, on a port of its own: it knows reading, whole or by ranges.
#[derive(Debug)]
pub(crate) struct Bucket {
    inside: Arc<Inside>,
    port: u16,
    thread: Option<JoinHandle<()>>,
    pub(crate) url: String,
}

impl Bucket {
    /// A bucket with the files that a store has.
    pub(crate) fn of(name: &str, store: &Store) -> Self {
        let files = store.list("").unwrap().into_iter();
        let files =
            files.map(|entry| (entry.path.clone(), store.read(&entry.path).unwrap())).collect();
        let inside = Arc::new(Inside {
            files: Mutex::new(files),
            delay: Mutex::new(Duration::ZERO),
            mood: Mutex::new(Mood::Fine),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::clone(&inside);
        let accept = move || {
            for stream in listener.incoming() {
                if shared.closed.load(Ordering::Relaxed) {
                    return;
                }
                let (shared, stream) = (Arc::clone(&shared), stream.unwrap());
                std::thread::spawn(move || serve(&shared, stream));
            }
        };
        let url = format!("s3://{name}");
        let options = [
            ("endpoint_url", format!("http://127.0.0.1:{port}")),
            ("anon", "true".to_owned()),
            ("region_name", "here".to_owned()),
        ];
        configure_options(
            &url,
            BackendOptions(
                options.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            ),
        );
        Self { inside, port, thread: Some(std::thread::spawn(accept)), url }
    }

    pub(crate) fn set_delay(&self, delay: Duration) {
        *self.inside.delay.lock().unwrap() = delay;
    }

    pub(crate) fn set_mood(&self, mood: Mood) {
        *self.inside.mood.lock().unwrap() = mood;
    }

    pub(crate) fn put(&self, file: &str, bytes: Bytes) {
        self.inside.files.lock().unwrap().insert(file.to_owned(), bytes);
    }

    pub(crate) fn remove(&self, file: &str) {
        self.inside.files.lock().unwrap().remove(file).unwrap();
    }

    /// Requests answered, and bytes of files sent.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.inside.requests.load(Ordering::Relaxed), self.inside.bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        self.inside.closed.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The path and the range of a request; none when the connection ends.
fn request(stream: &mut BufReader<TcpStream>) -> Option<(String, Option<Range<usize>>)> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.split('?').next()?.to_owned();
    let mut range = None;
    loop {
        line.clear();
        stream.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            return Some((path, range));
        }
        if let Some((first, last)) = line
            .to_ascii_lowercase()
            .strip_prefix("range: bytes=")
            .and_then(|text| text.trim().split_once('-'))
        {
            range = Some(first.parse().ok()?..last.parse::<usize>().ok()? + 1);
        }
    }
}

fn serve(inside: &Inside, stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let mut reader = BufReader::new(stream);
    while let Some((path, range)) = request(&mut reader) {
        // Nothing is locked meanwhile: requests wait beside each other.
        let delay = *inside.delay.lock().unwrap();
        std::thread::sleep(delay);
        inside.requests.fetch_add(1, Ordering::Relaxed);
        let mood = {
            let mut mood = inside.mood.lock().unwrap();
            let now = *mood;
            if let Mood::Shaky(times) = now {
                *mood = if times > 1 { Mood::Shaky(times - 1) } else { Mood::Fine };
            }
            now
        };
        let file = path.trim_start_matches('/').split_once('/').map_or("", |(_, file)| file);
        let found = inside.files.lock().unwrap().get(file).cloned();
        let status = match (mood, &found) {
            (Mood::Status(status), _) => status,
            (Mood::Shaky(_), _) => 500,
            (Mood::Fine, None) => 404,
            (Mood::Fine, Some(_)) => 200,
        };
        let told = if let (200, Some(bytes)) = (status, found) {
            let all = bytes.len();
            let (line, extra, bytes) = match range {
                Some(range) => {
                    let range = range.start..range.end.min(all);
                    let extra =
                        format!("Content-Range: bytes {}-{}/{all}\r\n", range.start, range.end - 1);
                    ("206 Partial Content", extra, bytes.slice(range))
                }
                None => ("200 OK", String::new(), bytes),
            };
            inside.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            let head = format!(
                "HTTP/1.1 {line}\r\n{extra}Content-Length: {}\r\nETag: \"x\"\r\n\
                 Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
                bytes.len()
            );
            writer.write_all(head.as_bytes()).and_then(|()| writer.write_all(&bytes))
        } else {
            writer.write_all(
                format!("HTTP/1.1 {status} Said so\r\nContent-Length: 0\r\n\r\n").as_bytes(),
            )
        };
        if told.is_err() {
            return;
        }
    }
}
