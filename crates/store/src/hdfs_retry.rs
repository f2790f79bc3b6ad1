// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Gives HDFS the same retries and deadlines as the other services. Transient failures (a failover
//! of name nodes, broken connections) are retried with growing pauses, every answer has a deadline,
//! and errors name the service without a Java stack trace.

use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use crate::hdfs_failures::{
    RetryClock, RetryingHdfs, generic_error, transfer_timeout, translate_error, within,
};
use crate::hdfs_upload::{HdfsUpload, StreamedFile, UploadStep};

/// Longest time for the first byte of an answer.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Most concurrent deletions.
const MAX_CONCURRENT_DELETIONS: usize = 10;

/// The process that has read from HDFS, or 0. The client keeps connections to data nodes open for a
/// while and gives them to the next reader, even in forked children.
static READER_PROCESS_ID: AtomicU32 = AtomicU32::new(0);

/// Returns an error if this process was forked after a read. It would share connections with its
/// parent, and both would wait for ever.
fn check_not_forked_after_read() -> Result<()> {
    let me = std::process::id();
    // Relaxed: only the number itself is compared, and a fork copies it with the memory.
    match READER_PROCESS_ID.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
        Err(reader) if reader != me => Err(generic_error(
            "this process was forked from one that had read from HDFS, whose connections cannot be \
             shared: start it by spawn or forkserver",
        )),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns whether a file has the name of an unfinished upload to HDFS: `.name.tmp.1`.
pub(crate) fn is_partial_upload(name: &str) -> bool {
    let number =
        name.strip_prefix('.').and_then(|name| name.rsplit_once(".tmp.")).map(|(_, number)| number);
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

impl<S: ObjectStore> RetryingHdfs<S> {
    /// Wraps `inner`, whose requests are repeated for `timeout`: name nodes fail over within a
    /// minute, and restart within several.
    pub(crate) fn new(inner: S, timeout: Duration) -> Self {
        // Several attempts must fit into the timeout.
        let answer_timeout = MAX_ANSWER_TIMEOUT.min(timeout / 6);
        Self { inner: Arc::new(inner), retry_timeout: timeout, answer_timeout }
    }

    /// Repeats a request until it succeeds or fails permanently. `bytes` are transferred with it.
    async fn ask_with_retries<T, F>(&self, bytes: u64, mut question: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let limit = transfer_timeout(self.answer_timeout, bytes);
        self.retry_while_progressing(&AtomicU64::new(0), || within(limit, question())).await
    }

    /// Repeats a request, which limits its time itself and records in `reached` how far it comes.
    async fn retry_while_progressing<T, F>(
        &self,
        reached: &AtomicU64,
        mut question: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut clock = RetryClock::new(self.retry_timeout);
        loop {
            reached.store(0, Ordering::Relaxed);
            match question().await {
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    clock.wait_before_retry(error, reached.load(Ordering::Relaxed)).await?
                }
            }
        }
    }
}

/// Collects the items of a stream, with `limit` for each item; records their number.
async fn collect_within<T>(
    limit: Duration,
    reached: &AtomicU64,
    items: impl Stream<Item = Result<T>>,
) -> Result<Vec<T>> {
    let mut items = pin!(items);
    let mut found = Vec::new();
    while let Some(item) = within(limit, items.try_next()).await? {
        found.push(item);
        reached.fetch_add(1, Ordering::Relaxed);
    }
    Ok(found)
}

impl<S> fmt::Display for RetryingHdfs<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HDFS")
    }
}

fn range_length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for RetryingHdfs<S> {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        if matches!(opts.mode, PutMode::Overwrite) {
            let mut file = StreamedFile::new(self, location, PutMultipartOptions::default());
            file.retain_content_for_retry();
            file.run_step(&UploadStep::Part(payload)).await?;
            file.run_step(&UploadStep::End).await?;
            return Ok(PutResult { e_tag: None, version: None });
        }
        // Only small files are created.
        let bytes = payload.content_length() as u64;
        let mut asked = 0;
        let put = || {
            asked += 1;
            self.inner.put_opts(location, payload.clone(), opts.clone())
        };
        let result = self.ask_with_retries(bytes, put).await;
        // The first request may have succeeded although its answer was lost. Then the file has
        // exactly this content.
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
        let mut file = StreamedFile::new(self, location, opts);
        file.run_step(&UploadStep::Begin).await?;
        Ok(Box::new(HdfsUpload::start(file)))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        // The name node answers `head`: only reads have connections to data nodes.
        if !options.head {
            check_not_forked_after_read()?;
        }
        let Some(GetRange::Bounded(range)) = options.range.clone() else {
            return self
                .ask_with_retries(0, || self.inner.get_opts(location, options.clone()))
                .await;
        };
        // The connection may break in the content, so a part is read and repeated as a whole.
        let read = || async {
            let answer = self.inner.get_opts(location, options.clone()).await?;
            let (meta, range, attributes) =
                (answer.meta.clone(), answer.range.clone(), answer.attributes.clone());
            let content = answer.bytes().await?;
            let payload = GetResultPayload::Stream(stream::iter([Ok(content)]).boxed());
            Ok(GetResult { payload, meta, range, attributes })
        };
        self.ask_with_retries(range_length(&range), read).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        check_not_forked_after_read()?;
        let bytes = ranges.iter().map(range_length).sum();
        self.ask_with_retries(bytes, || self.inner.get_ranges(location, ranges)).await
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
                this.ask_with_retries(0, || this.inner.delete(&location)).await?;
                Ok(location)
            }
        };
        locations.map(delete).buffered(MAX_CONCURRENT_DELETIONS).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.cloned());
        let found = async move {
            // A large tree needs a request for each directory, so each answer has its own deadline.
            let reached = AtomicU64::new(0);
            let list = || {
                let entries = this.inner.list(prefix.as_ref());
                collect_within(this.answer_timeout, &reached, entries)
            };
            let found = this.retry_while_progressing(&reached, list).await?;
            Ok::<_, Error>(stream::iter(found.into_iter().map(Ok)))
        };
        stream::once(found).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.ask_with_retries(0, || self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        if matches!(options.mode, CopyMode::Create) {
            return Err(Error::NotImplemented {
                operation: "a copy that replaces no file".to_owned(),
                implementer: self.to_string(),
            });
        }
        check_not_forked_after_read()?;
        let reached = AtomicU64::new(0);
        let copy = || async {
            let mut file = StreamedFile::new(self, to, PutMultipartOptions::default());
            let copied = file.copy_content(from, &reached).await;
            if copied.is_err() {
                file.discard_attempt().await;
            }
            copied
        };
        self.retry_while_progressing(&reached, copy).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        // Not repeated: after a lost answer, a second attempt would find no source.
        self.inner.rename_opts(from, to, options).await.map_err(translate_error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use object_store::memory::InMemory;

    use crate::http_deadlines::MIN_BYTES_PER_SECOND;
    use crate::retry_pauses::FIRST_RETRY_PAUSE;
    use hdfs_native::HdfsError;
    use tokio::time::Instant;
    use tokio::time::sleep;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// An in-memory store that returns these errors, the last first, before it answers.
    #[derive(Debug, Default)]
    struct Moody {
        inner: InMemory,
        errors: Mutex<Vec<HdfsError>>,
        /// Whether the store executes the request before it returns the error.
        after: bool,
    }

    impl fmt::Display for Moody {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("moody")
        }
    }

    impl Moody {
        fn mood(&self) -> Result<()> {
            self.errors.lock().unwrap().pop().map_or(Ok(()), |error| Err(generic_error(error)))
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

    #[tokio::test]
    async fn a_listing_may_take_longer_than_an_answer() {
        let timeout = Duration::from_millis(60);
        let limit = RetryingHdfs::new(Moody::default(), timeout).answer_timeout;
        let slow = |count| {
            stream::iter(0..count).then(move |number| async move {
                sleep(limit / 2).await;
                Ok::<_, Error>(number)
            })
        };
        let reached = AtomicU64::new(0);
        let listed = collect_within(limit, &reached, slow(10)).await.unwrap();
        assert_eq!(listed.len(), 10);
        let stuck = slow(2).chain(stream::pending());
        assert!(collect_within(limit, &reached, stuck).await.is_err(), "it fell silent");
        assert_eq!(reached.load(Ordering::Relaxed), 12);
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

    fn says(store: &RetryingHdfs<Moody>, errors: impl IntoIterator<Item = HdfsError>) {
        store.inner.errors.lock().unwrap().extend(errors);
    }

    #[tokio::test]
    async fn temporary_errors_are_retried_for_every_call() {
        let store = RetryingHdfs::new(Moody::default(), TIMEOUT);
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
    async fn a_lasting_error_is_returned_after_the_timeout() {
        let timeout = FIRST_RETRY_PAUSE * 12;
        let store = RetryingHdfs::new(Moody::default(), timeout);
        says(&store, std::iter::repeat_with(standby).take(1000));
        let started = Instant::now();
        let error = store.head(&Path::from("x")).await.unwrap_err().to_string();
        assert!(started.elapsed() > timeout);
        let attempts = 1000 - store.inner.errors.lock().unwrap().len();
        assert!((12..=25).contains(&attempts), "pauses of 50 to 100 ms: {attempts}");
        assert!(error.contains("StandbyException: not me") && !error.contains("Java"), "{error}");
    }

    #[tokio::test]
    async fn of_many_creators_one_succeeds_though_its_answer_was_lost() {
        let lossy = Moody { after: true, ..Moody::default() };
        let store = RetryingHdfs::new(lossy, TIMEOUT);
        let (at, create) = (Path::from("lease"), PutOptions::from(PutMode::Create));
        says(&store, [refused()]);
        store.put_opts(&at, "mine".into(), create.clone()).await.unwrap();
        says(&store, [refused()]);
        let other = store.put_opts(&at, "other".into(), create).await.unwrap_err();
        assert!(matches!(other, Error::AlreadyExists { .. }), "{other}");
    }

    #[tokio::test]
    async fn refusals_are_reported_at_once_like_those_of_other_services() {
        let store = RetryingHdfs::new(Moody::default(), TIMEOUT);
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
        assert!(is_partial_upload(".part-0.parquet.tmp.12"));
        for file in ["part-0.tmp.1", ".x.tmp.", ".x.tmp.a1", ".x", ".tmp.1"] {
            assert!(!is_partial_upload(file), "{file}");
        }
    }

    #[tokio::test]
    async fn silence_is_repeated_until_the_timeout() {
        let answer = Duration::from_millis(50);
        let store = RetryingHdfs {
            answer_timeout: answer,
            ..RetryingHdfs::new(Moody::default(), Duration::from_millis(200))
        };
        let attempts = std::cell::Cell::new(0);
        let silent = || {
            attempts.set(attempts.get() + 1);
            std::future::pending::<Result<()>>()
        };
        let error = store.ask_with_retries(0, silent).await.unwrap_err();
        assert!(error.to_string().contains("no answer within 50ms"), "{error}");
        assert!(attempts.get() > 1);
        let data = store.ask_with_retries(MIN_BYTES_PER_SECOND, silent).await.unwrap_err();
        assert!(
            data.to_string().contains("no answer within 1.05s"),
            "data may take longer: {data}"
        );
    }

    #[test]
    fn a_file_that_vanishes_between_its_opening_and_its_reading_is_missing() {
        let class = "java.io.FileNotFoundException".to_owned();
        let text = "File does not exist: /x\n\tat java.lang.Thread.run".to_owned();
        let error = translate_error(generic_error(HdfsError::RPCError(class, text)));
        assert!(matches!(error, Error::NotFound { .. }), "{error}");
    }
}
