// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! HDFS as patient as the other services: what passes (name nodes that change places, connections
//! that break) is asked again with growing pauses, every answer has a deadline, and refusals name
//! the service without a Java stack.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use hdfs_native::HdfsError;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    RenameOptions, Result,
};
use tokio::time::{Instant, sleep, timeout};

/// Pause after the first failure; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Until one of several name nodes has taken over.
const NAME_SERVICE: Duration = Duration::from_secs(60);
/// Until a single name node is up again.
const NAME_NODE: Duration = Duration::from_secs(16);
/// An answer without data takes no longer.
const ANSWER: Duration = Duration::from_secs(30);
/// Data comes no slower, in bytes a second.
const SLOWEST: u64 = 256 << 10;
/// Deletions on their way at once.
const AT_ONCE: usize = 10;

/// The error of a name node for a file that is missing, also for one deleted after it was
/// opened.
const MISSING: &str = "FileNotFoundException";

/// Temporary errors of name nodes.
const PASSING: [&str; 4] =
    ["StandbyException", "RetriableException", "SafeModeException", "RetryCacheEntry"];
/// Errors of name nodes about missing permissions.
const REFUSALS: [&str; 2] = ["AccessControlException", "AuthorizationException"];

/// The process whose reads have left connections to data nodes behind, which the client keeps for a
/// while and gives to the next reader, in forked children, too; 0 before the first.
static READER: AtomicU32 = AtomicU32::new(0);

/// Refuses to read by connections that belong to the process this one was forked from: both would
/// wait for ever.
fn check_reader() -> Result<()> {
    let me = std::process::id();
    match READER.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Err(reader) if reader != me => Err(generic(
            "this process was forked from one that had read from HDFS, whose connections cannot be \
             shared: start it by spawn or forkserver",
        )),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns whether a file is called as uploads to HDFS are before their end: `.name.tmp.1`.
pub(crate) fn is_leaving(name: &str) -> bool {
    let number =
        name.strip_prefix('.').and_then(|name| name.rsplit_once(".tmp.")).map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// A backend that is asked again.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    inner: Arc<S>,
    /// Longest wait for a transient failure to pass.
    patience: Duration,
    /// Longest time for an answer without data.
    answer: Duration,
}

impl<S> Clone for Patient<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), ..*self }
    }
}

impl<S: ObjectStore> Patient<S> {
    /// `root` is the URL without a path: one that names no port is a name service.
    pub(crate) fn new(inner: S, root: &str) -> Self {
        let authority = root.split_once("://").map_or("", |(_, authority)| authority);
        let patience = if authority.contains(':') { NAME_NODE } else { NAME_SERVICE };
        Self { inner: Arc::new(inner), patience, answer: ANSWER }
    }

    /// Asks until there is an answer that stays. `bytes` travel with it.
    async fn ask<T, F>(&self, bytes: u64, mut question: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
        let limit = self.answer + Duration::from_secs(bytes / SLOWEST);
        loop {
            let error = match timeout(limit, question()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => return Err(generic(format!("no answer within {limit:?}"))),
            };
            if !passes(&error) || started.elapsed() + pause > self.patience {
                return Err(told(error));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Returns the error of HDFS, if it is one.
fn said(error: &Error) -> Option<&HdfsError> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(said) = error.downcast_ref() {
            return Some(said);
        }
        next = error.source();
    }
    None
}

/// Returns whether the same question may have another answer soon.
fn passes(error: &Error) -> bool {
    use std::io::ErrorKind;
    match said(error) {
        Some(HdfsError::RPCError(class, _) | HdfsError::FatalRPCError(class, _)) => {
            PASSING.iter().any(|name| class.ends_with(name))
        }
        Some(HdfsError::IOError(error)) => matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::NotConnected
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
                | ErrorKind::TimedOut
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
        ),
        Some(HdfsError::DataTransferError(_) | HdfsError::ChecksumError) => true,
        _ => false,
    }
}

fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "HDFS", source: source.into() }
}

/// Returns the error as the other services would put it.
pub(crate) fn told(error: Error) -> Error {
    let path = String::new();
    match said(&error) {
        Some(HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text)) => {
            let class = class.rsplit('.').next().unwrap_or(class);
            let text = format!("{class}: {}", text.lines().next().unwrap_or_default());
            if REFUSALS.contains(&class) {
                Error::PermissionDenied { path, source: text.into() }
            } else if class == MISSING {
                Error::NotFound { path, source: text.into() }
            } else {
                generic(text)
            }
        }
        Some(HdfsError::GSSAPIError(_, _, text)) => {
            let text = format!("no Kerberos ticket that serves (kinit gets one): {}", text.trim());
            Error::Unauthenticated { path, source: text.into() }
        }
        Some(error @ (HdfsError::SASLError(_) | HdfsError::NoSASLMechanism)) => {
            Error::Unauthenticated { path, source: error.to_string().into() }
        }
        Some(HdfsError::InvalidArgument(text)) if text.contains("NameNode") => generic(
            "no name nodes are known by this name: HADOOP_CONF_DIR or storage options tell of them",
        ),
        _ => error,
    }
}

impl<S> fmt::Display for Patient<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HDFS")
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Patient<S> {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let bytes = payload.content_length() as u64;
        let mut asked = 0;
        let put = || {
            asked += 1;
            self.inner.put_opts(location, payload.clone(), opts.clone())
        };
        let result = self.ask(bytes, put).await;
        // The answer to the first question may have been lost with its connection.
        if opts.mode == PutMode::Create
            && asked > 1
            && matches!(result, Err(Error::AlreadyExists { .. }))
            && self.get_opts(location, GetOptions::default()).await?.bytes().await?
                == Bytes::from(payload)
        {
            return Ok(PutResult { e_tag: None, version: None });
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.ask(0, || self.inner.put_multipart_opts(location, opts.clone())).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if !options.head {
            check_reader()?;
        }
        self.ask(0, || self.inner.get_opts(location, options.clone())).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        check_reader()?;
        let bytes = ranges.iter().map(length).sum();
        self.ask(bytes, || self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        let delete = move |location: Result<Path>| {
            let this = this.clone();
            async move {
                let location = location?;
                this.ask(0, || this.inner.delete(&location)).await?;
                Ok(location)
            }
        };
        locations.map(delete).buffered(AT_ONCE).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.cloned());
        let found = async move {
            let found =
                this.ask(0, || this.inner.list(prefix.as_ref()).try_collect::<Vec<_>>()).await?;
            Ok::<_, Error>(stream::iter(found.into_iter().map(Ok)))
        };
        stream::once(found).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.ask(0, || self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await.map_err(told)
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await.map_err(told)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use object_store::memory::InMemory;

    use super::*;

    /// A store in memory that says these things before it answers; the last of them come first.
    #[derive(Debug, Default)]
    struct Moody {
        inner: InMemory,
        errors: Mutex<Vec<HdfsError>>,
        /// Whether it does what it was asked before it says so.
        after: bool,
    }

    impl fmt::Display for Moody {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("moody")
        }
    }

    impl Moody {
        fn mood(&self) -> Result<()> {
            self.errors.lock().unwrap().pop().map_or(Ok(()), |error| Err(generic(error)))
        }
    }

    #[async_trait]
    impl ObjectStore for Moody {
        async fn put_opts(
            &self,
            at: &Path,
            payload: PutPayload,
            opts: PutOptions,
        ) -> Result<PutResult> {
            if self.after {
                let result = self.inner.put_opts(at, payload, opts).await;
                return self.mood().and(result);
            }
            self.mood()?;
            self.inner.put_opts(at, payload, opts).await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            opts: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.mood()?;
            self.inner.put_multipart_opts(at, opts).await
        }

        async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
            self.mood()?;
            self.inner.get_opts(at, options).await
        }

        fn delete_stream(
            &self,
            at: BoxStream<'static, Result<Path>>,
        ) -> BoxStream<'static, Result<Path>> {
            match self.mood() {
                Ok(()) => self.inner.delete_stream(at),
                Err(error) => stream::once(async { Err(error) }).boxed(),
            }
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            match self.mood() {
                Ok(()) => self.inner.list(prefix),
                Err(error) => {
                    self.inner.list(prefix).chain(stream::once(async { Err(error) })).boxed()
                }
            }
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.mood()?;
            self.inner.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.mood()?;
            self.inner.copy_opts(from, to, options).await
        }
    }

    fn standby() -> HdfsError {
        HdfsError::RPCError(
            "org.apache.hadoop.ipc.StandbyException".into(),
            "not me\n\tat Java".into(),
        )
    }

    fn refused() -> HdfsError {
        HdfsError::IOError(std::io::ErrorKind::ConnectionRefused.into())
    }

    fn says(store: &Patient<Moody>, errors: impl IntoIterator<Item = HdfsError>) {
        store.inner.errors.lock().unwrap().extend(errors);
    }

    #[tokio::test]
    async fn temporary_errors_are_retried_for_every_call() {
        let store = Patient::new(Moody::default(), "hdfs://service");
        let at = Path::from("a/b");
        says(&store, [standby(), refused()]);
        store.put(&at, "text".into()).await.unwrap();
        says(&store, [standby(), refused()]);
        assert_eq!(store.get(&at).await.unwrap().bytes().await.unwrap(), "text");
        says(&store, [standby()]);
        assert_eq!(store.get_ranges(&at, &[0..1, 2..4]).await.unwrap(), ["t", "xt"]);
        says(&store, [refused()]);
        let listed: Vec<ObjectMeta> = store.list(None).try_collect().await.unwrap();
        assert_eq!(listed.len(), 1, "a listing that broke off begins anew");
        says(&store, [refused()]);
        assert_eq!(store.list_with_delimiter(None).await.unwrap().common_prefixes.len(), 1);
        says(&store, [refused()]);
        store.delete(&at).await.unwrap();
        says(&store, [standby()]);
        store.put_multipart(&at).await.unwrap().abort().await.unwrap();
    }

    #[tokio::test]
    async fn a_lasting_error_is_returned_after_the_retries() {
        let told = |root| Patient::new(Moody::default(), root).patience;
        assert!(told("hdfs://service") > told("hdfs://node:8020"), "one of several takes over");
        let store = Patient {
            patience: FIRST_PAUSE * 8,
            ..Patient::new(Moody::default(), "hdfs://service")
        };
        says(&store, std::iter::repeat_with(standby).take(1000));
        let started = Instant::now();
        let error = store.head(&Path::from("x")).await.unwrap_err().to_string();
        assert!(started.elapsed() >= FIRST_PAUSE * 7, "after pauses of one, two and four");
        assert_eq!(store.inner.errors.lock().unwrap().len(), 1000 - 4);
        assert!(error.contains("StandbyException: not me") && !error.contains("Java"), "{error}");
    }

    #[tokio::test]
    async fn of_many_creators_one_succeeds_though_its_answer_was_lost() {
        let lossy = Moody { after: true, ..Moody::default() };
        let store = Patient::new(lossy, "hdfs://service");
        let (at, create) = (Path::from("lease"), PutOptions::from(PutMode::Create));
        says(&store, [refused()]);
        store.put_opts(&at, "mine".into(), create.clone()).await.unwrap();
        says(&store, [refused()]);
        let other = store.put_opts(&at, "other".into(), create).await.unwrap_err();
        assert!(matches!(other, Error::AlreadyExists { .. }), "{other}");
    }

    #[tokio::test]
    async fn refusals_are_reported_at_once_like_those_of_other_services() {
        let store = Patient::new(Moody::default(), "hdfs://service");
        let at = Path::from("x");
        let class = "org.apache.hadoop.security.AccessControlException";
        let denied =
            || HdfsError::RPCError(class.into(), "Permission denied: user=a\n\tat Java".into());
        says(&store, [HdfsError::NoSASLMechanism, HdfsError::NoSASLMechanism, denied()]);
        let error = store.head(&at).await.unwrap_err();
        assert!(
            matches!(error, Error::PermissionDenied { .. }) && !error.to_string().contains("Java"),
            "{error}"
        );
        assert!(matches!(store.head(&at).await.unwrap_err(), Error::Unauthenticated { .. }));
        assert_eq!(store.inner.errors.lock().unwrap().len(), 1, "each was asked for once");
    }

    #[test]
    fn rests_of_uploads_are_distinguished_from_files() {
        assert!(is_leaving(".part-0.parquet.tmp.12"));
        for file in ["part-0.tmp.1", ".x.tmp.", ".x.tmp.a1", ".x", ".tmp.1"] {
            assert!(!is_leaving(file), "{file}");
        }
    }

    #[tokio::test]
    async fn silence_ends() {
        let answer = Duration::from_millis(50);
        let store = Patient { answer, ..Patient::new(Moody::default(), "hdfs://service") };
        let error = store.ask(0, std::future::pending::<Result<()>>).await.unwrap_err();
        assert!(error.to_string().contains("no answer within 50ms"), "{error}");
        let error = store.ask(SLOWEST, std::future::pending::<Result<()>>).await.unwrap_err();
        assert!(
            error.to_string().contains("no answer within 1.05s"),
            "data may take longer: {error}"
        );
    }

    #[test]
    fn a_file_that_vanishes_between_its_opening_and_its_reading_is_missing() {
        let class = "java.io.FileNotFoundException".to_owned();
        let text = "File does not exist: /x\n\tat java.lang.Thread.run".to_owned();
        let error = told(generic(HdfsError::RPCError(class, text)));
        assert!(matches!(error, Error::NotFound { .. }), "{error}");
    }
}
