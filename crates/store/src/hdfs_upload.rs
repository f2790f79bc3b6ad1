// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes files of HDFS in pieces. The client writes a file as one stream and waits for ever for a
//! silent data node, so each piece has a deadline, whatever the size of the file. After a transient
//! failure the file begins again, if its content is still known.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, TryStreamExt};
use hdfs_native::HdfsError;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, MultipartUpload, ObjectStore, PutMultipartOptions, PutPayload, PutResult,
    Result, UploadPart,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::hdfs_failures::{
    RetryClock, RetryingHdfs, generic_error, transfer_timeout, translate_error, within,
};
use crate::http_client::PIECE_BYTES;
use crate::store_operation::current_operation;

/// Most bytes that the client takes before data nodes have confirmed them: two queues of 100
/// packets of 64 KiB. At the end of a block and of the file, it waits for all of them.
const CLIENT_BUFFER_BYTES: u64 = 13 << 20;

/// Most bytes of an upload that are kept so that it can begin again.
// As many as the parts that an upload to another service has in flight.
const MAX_KEPT_BYTES: usize = 32 << 20;

/// A step of a [`StreamedFile`].
#[derive(Clone, Debug)]
pub(crate) enum UploadStep {
    Begin,
    Part(PutPayload),
    End,
}

/// A file in progress, which appears at its end.
#[derive(Debug)]
pub(crate) struct StreamedFile<S> {
    hdfs: RetryingHdfs<S>,
    location: Path,
    opts: PutMultipartOptions,
    /// The stream of the present attempt.
    attempt: Option<Box<dyn MultipartUpload>>,
    /// Bytes that the stream has taken.
    sent: u64,
    /// The content until now; `None` if it is too large.
    kept: Option<Vec<Bytes>>,
    kept_bytes: usize,
    max_kept_bytes: usize,
    clock: RetryClock,
    has_failed: bool,
}

impl<S: ObjectStore> StreamedFile<S> {
    pub(crate) fn new(hdfs: &RetryingHdfs<S>, location: &Path, opts: PutMultipartOptions) -> Self {
        Self {
            clock: RetryClock::new(hdfs.retry_timeout),
            hdfs: hdfs.clone(),
            location: location.clone(),
            opts,
            attempt: None,
            sent: 0,
            kept: Some(Vec::new()),
            kept_bytes: 0,
            max_kept_bytes: MAX_KEPT_BYTES,
            has_failed: false,
        }
    }

    /// Keeps the content whatever its size, because the caller has it in memory.
    pub(crate) fn retain_content_for_retry(&mut self) {
        self.max_kept_bytes = usize::MAX;
    }

    /// Does a step; after a transient failure the file begins again.
    ///
    /// # Errors
    /// The last attempt's; the file cannot continue after it.
    pub(crate) async fn run_step(&mut self, step: &UploadStep) -> Result<()> {
        if self.has_failed {
            return Err(generic_error("an earlier part of the file could not be written"));
        }
        while let Err(error) = self.try_step(step).await {
            self.discard_attempt().await;
            let repeated = match self.kept {
                Some(_) => self.clock.wait_before_retry(error, self.sent).await,
                None => Err(translate_error(error)),
            };
            self.has_failed = repeated.is_err();
            repeated?;
        }
        if let UploadStep::Part(data) = step {
            self.kept_bytes += data.content_length();
            if self.kept_bytes > self.max_kept_bytes {
                self.kept = None;
            }
            if let Some(kept) = &mut self.kept {
                kept.extend(data.iter().cloned());
            }
        }
        Ok(())
    }

    async fn try_step(&mut self, step: &UploadStep) -> Result<()> {
        if self.attempt.is_none() {
            self.open_attempt().await?;
            for bytes in self.kept.clone().unwrap_or_default() {
                self.send_bytes(bytes).await?;
            }
        }
        match step {
            UploadStep::Begin => Ok(()),
            UploadStep::Part(data) => {
                for bytes in data {
                    self.send_bytes(bytes.clone()).await?;
                }
                Ok(())
            }
            UploadStep::End => self.complete_attempt().await,
        }
    }

    /// Copies the content of another file, in one attempt.
    pub(crate) async fn copy_content(&mut self, from: &Path, reached: &AtomicU64) -> Result<()> {
        let limit = self.hdfs.answer_timeout;
        let source = self.hdfs.inner.get_opts(from, GetOptions::default());
        let source = within(limit, source).await?;
        let size = source.meta.size;
        let mut content = source.into_stream();
        self.open_attempt().await?;
        while let Some(bytes) = within(limit, content.try_next()).await? {
            let sent = self.send_bytes(bytes).await;
            // Bytes that were sent before a failure are progress, too.
            reached.store(self.sent, Ordering::Relaxed);
            sent?;
        }
        if self.sent != size {
            let text = format!("the file ended after {} of {size} bytes: {from}", self.sent);
            let source = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text);
            return Err(generic_error(HdfsError::IOError(source)));
        }
        self.complete_attempt().await
    }

    async fn open_attempt(&mut self) -> Result<()> {
        self.sent = 0;
        let opened = self.hdfs.inner.put_multipart_opts(&self.location, self.opts.clone());
        self.attempt = Some(within(self.hdfs.answer_timeout, opened).await?);
        Ok(())
    }

    fn opened_attempt(&mut self) -> Result<&mut Box<dyn MultipartUpload>> {
        self.attempt.as_mut().ok_or_else(|| generic_error("the file is not open"))
    }

    /// Returns the longest wait for the next progress. The stream takes bytes before data nodes
    /// have them, so a slow connection may need time for all that the client holds.
    fn silence_limit(&self) -> Duration {
        transfer_timeout(self.hdfs.answer_timeout, self.sent.min(CLIENT_BUFFER_BYTES))
    }

    async fn send_bytes(&mut self, mut bytes: Bytes) -> Result<()> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(PIECE_BYTES.min(bytes.len()));
            let (limit, size) = (self.silence_limit(), piece.len() as u64);
            within(limit, self.opened_attempt()?.put_part(piece.into())).await?;
            self.sent += size;
        }
        Ok(())
    }

    async fn complete_attempt(&mut self) -> Result<()> {
        let limit = self.silence_limit();
        within(limit, self.opened_attempt()?.complete()).await?;
        self.attempt = None;
        Ok(())
    }

    /// Deletes the file of the present attempt, if the service answers in time. A remaining
    /// file has a name that no reader opens.
    pub(crate) async fn discard_attempt(&mut self) {
        if let Some(mut attempt) = self.attempt.take() {
            drop(within(self.hdfs.answer_timeout, attempt.abort()).await);
        }
    }
}

/// A step and the place for its result.
type QueuedUploadStep = (UploadStep, oneshot::Sender<Result<()>>);

/// An upload whose steps run one after another in a task, in the order in which they were begun.
#[derive(Debug)]
pub(crate) struct HdfsUpload {
    steps: Option<mpsc::UnboundedSender<QueuedUploadStep>>,
    /// Is dropped to end the task at once.
    is_wanted: Option<oneshot::Sender<()>>,
    task: Option<JoinHandle<()>>,
}

impl HdfsUpload {
    /// Starts the task of a file that has begun. Needs a runtime.
    pub(crate) fn start<S: ObjectStore>(mut file: StreamedFile<S>) -> Self {
        let (steps, mut received) = mpsc::unbounded_channel::<QueuedUploadStep>();
        let (is_wanted, unwanted) = oneshot::channel::<()>();
        let work = async move {
            let run_all = async {
                while let Some((step, answer)) = received.recv().await {
                    // The caller may have given up the step.
                    drop(answer.send(file.run_step(&step).await));
                }
            };
            tokio::select! {
                () = run_all => {}
                _ = unwanted => {}
            }
            file.discard_attempt().await;
        };
        let task = match current_operation() {
            Some(operation) => tokio::spawn(async move { operation.run(work).await }),
            None => tokio::spawn(work),
        };
        Self { steps: Some(steps), is_wanted: Some(is_wanted), task: Some(task) }
    }

    fn send_step(&self, step: UploadStep) -> UploadPart {
        let (answer, result) = oneshot::channel();
        if let Some(steps) = &self.steps {
            // If the task has ended, so has the place for the result, and the wait below.
            drop(steps.send((step, answer)));
        }
        let ended = || generic_error("the upload has ended");
        async move { result.await.unwrap_or_else(|_| Err(ended())) }.boxed()
    }
}

#[async_trait]
impl MultipartUpload for HdfsUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.send_step(UploadStep::Part(data))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.send_step(UploadStep::End).await?;
        self.steps = None;
        Ok(PutResult { e_tag: None, version: None })
    }

    async fn abort(&mut self) -> Result<()> {
        drop((self.steps.take(), self.is_wanted.take()));
        match self.task.take() {
            Some(task) => task.await.map_err(Error::from),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fmt;
    use std::sync::atomic::AtomicU32;
    use std::sync::{Arc, Mutex};

    use futures::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::{
        CopyOptions, GetResult, ListResult, ObjectMeta, ObjectStoreExt, PutOptions,
    };
    use tokio::time::{Instant, sleep, timeout};

    use super::*;
    use crate::retry_pauses::FIRST_RETRY_PAUSE;

    fn refused() -> HdfsError {
        HdfsError::IOError(std::io::ErrorKind::ConnectionRefused.into())
    }

    /// An HDFS whose data node stops in the first attempts to write a file: it falls silent, or
    /// fails.
    #[derive(Debug, Default)]
    struct FailingDataNode {
        inner: Arc<InMemory>,
        /// For each attempt, the bytes after which it stops; attempts beyond succeed.
        stops: Arc<Mutex<VecDeque<u64>>>,
        is_silent: bool,
        pause: Duration,
        attempts: Arc<AtomicU32>,
    }

    impl fmt::Display for FailingDataNode {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("failing data node")
        }
    }

    /// A file of [`FailingDataNode`].
    #[derive(Debug)]
    struct FailingFile {
        inner: Box<dyn MultipartUpload>,
        /// Bytes that the node still takes; `None` if it takes everything.
        left: Option<u64>,
        is_silent: bool,
        pause: Duration,
    }

    #[async_trait]
    impl MultipartUpload for FailingFile {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            let (is_silent, pause) = (self.is_silent, self.pause);
            let bytes = data.content_length() as u64;
            if let Some(left) = &mut self.left {
                if *left < bytes {
                    return async move {
                        if is_silent {
                            std::future::pending::<()>().await;
                        }
                        Err(generic_error(refused()))
                    }
                    .boxed();
                }
                *left -= bytes;
            }
            let part = self.inner.put_part(data);
            async move {
                sleep(pause).await;
                part.await
            }
            .boxed()
        }

        async fn complete(&mut self) -> Result<PutResult> {
            match self.left {
                None => self.inner.complete().await,
                Some(_) if self.is_silent => std::future::pending().await,
                Some(_) => Err(generic_error(refused())),
            }
        }

        async fn abort(&mut self) -> Result<()> {
            if self.is_silent {
                std::future::pending::<()>().await;
            }
            self.inner.abort().await
        }
    }

    #[async_trait]
    impl ObjectStore for FailingDataNode {
        async fn put_opts(
            &self,
            at: &Path,
            payload: PutPayload,
            _: PutOptions,
        ) -> Result<PutResult> {
            let mut file = self.put_multipart(at).await?;
            file.put_part(payload).await?;
            file.complete().await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            opts: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.attempts.fetch_add(1, Ordering::Relaxed);
            let (is_silent, pause) = (self.is_silent, self.pause);
            let left = self.stops.lock().unwrap().pop_front();
            let inner = self.inner.put_multipart_opts(at, opts).await?;
            Ok(Box::new(FailingFile { inner, left, is_silent, pause }))
        }

        async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
            self.inner.get_opts(at, options).await
        }

        fn delete_stream(
            &self,
            at: BoxStream<'static, Result<Path>>,
        ) -> BoxStream<'static, Result<Path>> {
            self.inner.delete_stream(at)
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.inner.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.inner.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, _: CopyOptions) -> Result<()> {
            let content = self.inner.get(from).await?.bytes().await?;
            self.put(to, content.into()).await.map(drop)
        }
    }

    const FILE_BYTES: usize = 8 << 20;

    /// A way to write the content to `to`; it also lies at `from`.
    async fn write_file<S: ObjectStore>(
        store: &RetryingHdfs<S>,
        way: &str,
        data: &Bytes,
    ) -> Result<()> {
        let (from, to) = (Path::from("from"), Path::from("to"));
        match way {
            "put" => store.put(&to, data.clone().into()).await.map(drop),
            "copy" => store.copy(&from, &to).await,
            _ => {
                let mut upload = store.put_multipart(&to).await?;
                for start in (0..data.len()).step_by(1 << 20) {
                    let part = data.slice(start..data.len().min(start + (1 << 20)));
                    if let Err(error) = upload.put_part(part.into()).await {
                        upload.abort().await.unwrap();
                        return Err(error);
                    }
                }
                upload.complete().await.map(drop)
            }
        }
    }

    async fn failing_node(
        stops: &[u64],
        is_silent: bool,
        pause: Duration,
        retry_timeout: Duration,
        data: &Bytes,
    ) -> RetryingHdfs<FailingDataNode> {
        let node = FailingDataNode {
            stops: Arc::new(Mutex::new(stops.iter().copied().collect())),
            is_silent,
            pause,
            ..FailingDataNode::default()
        };
        node.inner.put(&Path::from("from"), data.clone().into()).await.unwrap();
        let answer_timeout = Duration::from_millis(300);
        RetryingHdfs { inner: Arc::new(node), retry_timeout, answer_timeout }
    }

    fn numbered_bytes() -> Bytes {
        (0..FILE_BYTES).map(|index| u8::try_from(index % 251).unwrap()).collect::<Vec<_>>().into()
    }

    #[tokio::test]
    async fn a_silent_data_node_is_noticed_whatever_the_size_of_the_file() {
        let data = numbered_bytes();
        for way in ["put", "copy", "upload"] {
            let store =
                failing_node(&[0; 100], true, Duration::ZERO, Duration::from_millis(1), &data)
                    .await;
            let ended = timeout(Duration::from_secs(20), write_file(&store, way, &data)).await;
            let error = ended.expect(way).unwrap_err().to_string();
            assert!(error.contains("no answer within"), "{way}: {error}");
        }
    }

    #[tokio::test]
    async fn the_end_of_a_file_has_a_deadline() {
        let data = Bytes::from_static(b"a small file");
        for way in ["put", "copy", "upload"] {
            let (pause, repeated) = (Duration::ZERO, Duration::from_millis(1));
            let store = failing_node(&[1 << 30; 100], true, pause, repeated, &data).await;
            let ended = timeout(Duration::from_secs(20), write_file(&store, way, &data)).await;
            let error = ended.expect(way).unwrap_err().to_string();
            assert!(error.contains("no answer within 300ms"), "{way}: {error}");
        }
    }

    #[tokio::test]
    async fn no_wait_for_progress_grows_with_the_file() {
        let store = failing_node(&[], false, Duration::ZERO, Duration::ZERO, &Bytes::new()).await;
        let mut file = StreamedFile::new(&store, &Path::from("to"), PutMultipartOptions::default());
        let waits: Vec<Duration> = [0, 1 << 20, 1 << 30, 1 << 50]
            .into_iter()
            .map(|sent| {
                file.sent = sent;
                file.silence_limit()
            })
            .collect();
        assert!(waits.is_sorted() && waits[2] == waits[3], "{waits:?}");
        assert!(waits[3] < Duration::from_secs(240), "{waits:?}");
    }

    #[tokio::test]
    async fn a_file_that_is_too_large_to_be_kept_fails_as_a_whole() {
        let data = Bytes::from(vec![7; 3 << 20]);
        let (pause, repeated) = (Duration::ZERO, Duration::from_secs(60));
        let store = failing_node(&[2 << 20], false, pause, repeated, &data).await;
        let mut file = StreamedFile::new(&store, &Path::from("to"), PutMultipartOptions::default());
        file.max_kept_bytes = 1 << 20;
        let part =
            |index: usize| UploadStep::Part(data.slice(index << 20..(index + 1) << 20).into());
        file.run_step(&part(0)).await.unwrap();
        file.run_step(&part(1)).await.unwrap();
        for step in [part(2), part(2), UploadStep::End] {
            file.run_step(&step).await.unwrap_err();
        }
        assert!(store.get(&Path::from("to")).await.is_err(), "no file without its begin");
        assert_eq!(store.inner.attempts.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn an_upload_that_is_given_up_waits_for_no_data_node() {
        let data = numbered_bytes();
        let (pause, repeated) = (Duration::ZERO, Duration::from_secs(600));
        let store = failing_node(&[0; 100], true, pause, repeated, &data).await;
        let mut upload = store.put_multipart(&Path::from("to")).await.unwrap();
        let part = upload.put_part(data.into());
        timeout(Duration::from_secs(20), upload.abort()).await.unwrap().unwrap();
        part.await.unwrap_err();
        upload.put_part(PutPayload::from_static(b"more")).await.unwrap_err();
        upload.complete().await.unwrap_err();
    }

    #[tokio::test]
    async fn a_write_that_worked_for_long_before_it_failed_begins_again() {
        let data = numbered_bytes();
        // Each attempt works for longer than failures are repeated, and gets further.
        let stops: Vec<u64> = (1..6).map(|part| part * (FILE_BYTES as u64 / 8)).collect();
        for way in ["put", "copy", "upload"] {
            let (pause, repeated) = (Duration::from_millis(4), Duration::from_millis(30));
            let store = failing_node(&stops, false, pause, repeated, &data).await;
            write_file(&store, way, &data).await.expect(way);
            let found = store.get(&Path::from("to")).await.unwrap().bytes().await.unwrap();
            assert!(found == data, "{way}");
            assert_eq!(store.inner.attempts.load(Ordering::Relaxed), 6, "{way}");
        }
    }

    #[tokio::test]
    async fn a_write_that_fails_at_the_same_byte_ends_after_the_timeout() {
        let data = numbered_bytes();
        for way in ["put", "copy", "upload"] {
            let repeated = FIRST_RETRY_PAUSE * 6;
            let stops = [FILE_BYTES as u64 / 2; 1000];
            let store = failing_node(&stops, false, Duration::ZERO, repeated, &data).await;
            let started = Instant::now();
            write_file(&store, way, &data).await.expect_err(way);
            assert!(started.elapsed() > repeated, "{way}");
            assert!(store.get(&Path::from("to")).await.is_err(), "{way}: nothing appears");
        }
    }
}
