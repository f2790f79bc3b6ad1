// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes a file in pieces; it appears when it is complete.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectMeta, ObjectStoreExt, PutPayload};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::backend_wait::{BackendWaiter, runtime_handle};
use crate::error::{Error, Result};
use crate::local_files;
use crate::ranged_reads::{MAX_PARTS_IN_FLIGHT, PART_BYTES};
use crate::store_operation::StoreOperation;

use super::Store;

/// Number of parts after which the size of a part doubles. Services take 10,000 parts, which are
/// then half a terabyte.
const PARTS_OF_ONE_SIZE: usize = 2000;

/// Longest time to delete the parts of an upload that has failed. The service may be unreachable.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time for which a service may join parts after it has answered that the upload is
/// unknown. S3 needs about a minute for the largest files.
const JOINING_TIME: Duration = Duration::from_secs(60);

/// Interval at which the file is sought meanwhile.
const JOINING_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A file in progress. It is invisible before [`StoreUpload::finish`]; dropping the upload leaves
/// no file.
pub struct StoreUpload {
    inner: Option<Box<dyn MultipartUpload>>,
    store: Store,
    name: String,
    path: String,
    operation: Option<Arc<StoreOperation>>,
    sent: VecDeque<JoinHandle<object_store::Result<()>>>,
    sent_parts: usize,
    pending: Vec<Bytes>,
    pending_bytes: usize,
    bytes: u64,
}

impl Store {
    /// Starts the upload of a file in pieces.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn start_upload(&self, path: &str) -> Result<StoreUpload> {
        let at = self.object_path(path)?;
        let operation = self.backend.begin_operation("write", self.display_path(path));
        let inner =
            self.ask_within_operation("write", path, operation.as_ref(), async |backend| {
                backend.put_multipart(&at).await
            })?;
        Ok(StoreUpload::new(inner, self.clone(), path.to_owned(), operation))
    }
}

impl StoreUpload {
    pub(crate) fn new(
        inner: Box<dyn MultipartUpload>,
        store: Store,
        name: String,
        operation: Option<Arc<StoreOperation>>,
    ) -> Self {
        Self {
            inner: Some(inner),
            path: store.display_path(&name),
            store,
            name,
            operation,
            sent: VecDeque::new(),
            sent_parts: 0,
            pending: Vec::new(),
            pending_bytes: 0,
            bytes: 0,
        }
    }

    /// Returns the whole path of the file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Appends a piece. A large one is sent in parts without a copy.
    ///
    /// # Errors
    /// The backend's error; the upload cannot continue after it.
    pub fn write_piece(&mut self, mut piece: Bytes) -> Result<()> {
        self.bytes += piece.len() as u64;
        while !piece.is_empty() {
            let part_bytes = PART_BYTES << (self.sent_parts / PARTS_OF_ONE_SIZE).min(4);
            let take = piece.len().min(part_bytes - self.pending_bytes);
            self.pending_bytes += take;
            self.pending.push(piece.split_to(take));
            if self.pending_bytes == part_bytes {
                self.send_pending()?;
            }
        }
        Ok(())
    }

    fn send_pending(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.pending_bytes = 0;
        self.sent_parts += 1;
        let payload = self.pending.drain(..).collect::<PutPayload>();
        let inner =
            self.inner.as_mut().ok_or_else(|| Error::UploadEnded { path: self.path.clone() })?;
        let part = inner.put_part(payload);
        let Some(operation) = self.operation.clone() else {
            // A local write is done at once and needs no task.
            let sent = self.store.backend_waiter().wait(part)?;
            return sent.map_err(|source| self.upload_error("write", source));
        };
        // The part is sent while the caller makes the next piece.
        self.sent.push_back(runtime_handle()?.spawn(async move { operation.run(part).await }));
        self.wait_for_parts(MAX_PARTS_IN_FLIGHT)
    }

    /// Waits until at most `left` parts are in flight.
    fn wait_for_parts(&mut self, left: usize) -> Result<()> {
        while self.sent.len() > left
            && let Some(part) = self.sent.pop_front()
        {
            let part = BackendWaiter::Runtime.wait(part)?.unwrap_or_else(|error| Err(error.into()));
            part.map_err(|source| self.upload_error("write", source))?;
        }
        Ok(())
    }

    fn upload_error(&self, action: &'static str, source: object_store::Error) -> Error {
        Error::from_backend(action, self.path.clone(), source)
            .with_refusal_or_timeout(self.operation.as_deref())
    }

    /// Completes the file, which then appears; returns its size.
    ///
    /// # Errors
    /// The backend's error; the file then does not exist.
    pub fn finish(mut self) -> Result<u64> {
        self.send_pending()?;
        self.wait_for_parts(0)?;
        let mut inner =
            self.inner.take().ok_or_else(|| Error::UploadEnded { path: self.path.clone() })?;
        let waiter = self.store.backend_waiter();
        // If the answer is lost, an older file must not be taken for the result.
        let before = match &self.operation {
            Some(_) => self.store.file_version(&self.name)?,
            None => None,
        };
        let completed = match &self.operation {
            Some(operation) => waiter.wait(operation.run(inner.complete()))?,
            None => waiter.wait(inner.complete())?,
        };
        match completed {
            Ok(_) => {
                // Manifests name such files, so the files must survive a power failure.
                let local = self.store.local_path().map(|base| base.join(&self.name));
                let synced = local.as_deref().map_or(Ok(()), local_files::sync_file);
                let source = |source: std::io::Error| object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source: Box::new(source),
                };
                synced.map_err(|error| self.upload_error("complete", source(error)))?;
                Ok(self.bytes)
            }
            Err(_) if self.was_completed(before.as_ref()) => Ok(self.bytes),
            Err(source) => {
                // `drop` deletes the parts.
                self.inner = Some(inner);
                Err(self.upload_error("complete", source))
            }
        }
    }

    /// Returns whether an earlier attempt completed the file although its answer was lost. Then the
    /// service does not know the upload any more, but has another file than `before`. It may still
    /// be joining the parts of a large file.
    fn was_completed(&self, before: Option<&ObjectMeta>) -> bool {
        let repeated = self.operation.as_ref().is_some_and(|operation| operation.was_repeated());
        if !repeated {
            return false;
        }
        let deadline = Instant::now() + JOINING_TIME;
        loop {
            match self.store.file_version(&self.name) {
                Ok(Some(found)) if found.size == self.bytes && before != Some(&found) => {
                    return true;
                }
                Ok(_) if Instant::now() < deadline => std::thread::sleep(JOINING_POLL_INTERVAL),
                Ok(_) | Err(_) => return false,
            }
        }
    }
}

impl Drop for StoreUpload {
    fn drop(&mut self) {
        if let Some(mut inner) = self.inner.take() {
            // If the cleanup fails, the remaining file has a name that no reader opens.
            // Comes first: S3 keeps a part that arrives after the abort, and charges for it.
            self.sent.drain(..).for_each(|part| part.abort());
            match self.store.backend_waiter() {
                BackendWaiter::CallingThread => {
                    drop(BackendWaiter::CallingThread.wait(inner.abort()));
                }
                BackendWaiter::Runtime => {
                    let aborted = async { timeout(ABORT_TIMEOUT, inner.abort()).await };
                    drop(BackendWaiter::Runtime.wait(aborted));
                }
            }
        }
    }
}

impl std::fmt::Debug for StoreUpload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload")
            .field("path", &self.path)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
