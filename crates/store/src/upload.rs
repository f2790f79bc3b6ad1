// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Writes a file in pieces; it appears when it is complete.

use std::collections::VecDeque;
use std::path::PathBuf;

use bytes::Bytes;
use object_store::MultipartUpload;
use tokio::task::JoinHandle;

use crate::backend_wait::{BackendWaiter, runtime_handle};
use crate::error::{Error, Result};
use crate::local_files;

/// Smallest part. Smaller pieces are joined, because object stores reject small parts.
const MIN_PART_BYTES: usize = 8 << 20;
/// Most parts in flight over a network, while the writer continues.
const MAX_PARTS_IN_FLIGHT: usize = 4;

/// A file in progress. It is invisible before [`StoreUpload::finish`]; dropping the upload leaves
/// no file.
pub struct StoreUpload {
    inner: Option<Box<dyn MultipartUpload>>,
    waiter: BackendWaiter,
    sent: VecDeque<JoinHandle<object_store::Result<()>>>,
    path: String,
    /// Path at which the file appears, on a local file system.
    local: Option<PathBuf>,
    pending: Vec<Bytes>,
    pending_bytes: usize,
    bytes: u64,
}

impl StoreUpload {
    pub(crate) fn new(
        inner: Box<dyn MultipartUpload>,
        waiter: BackendWaiter,
        path: String,
        local: Option<PathBuf>,
    ) -> Self {
        let sent = VecDeque::new();
        Self {
            inner: Some(inner),
            waiter,
            sent,
            path,
            local,
            pending: Vec::new(),
            pending_bytes: 0,
            bytes: 0,
        }
    }

    /// Returns the whole path of the file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the number of bytes written so far.
    pub fn written_bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a piece.
    ///
    /// # Errors
    /// The backend's error; the upload cannot continue after it.
    pub fn write_piece(&mut self, piece: Bytes) -> Result<()> {
        self.bytes += piece.len() as u64;
        self.pending_bytes += piece.len();
        self.pending.push(piece);
        if self.pending_bytes >= MIN_PART_BYTES { self.send_pending() } else { Ok(()) }
    }

    fn send_pending(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.pending_bytes = 0;
        let payload = self.pending.drain(..).collect::<object_store::PutPayload>();
        let inner =
            self.inner.as_mut().ok_or_else(|| Error::UploadEnded { path: self.path.clone() })?;
        let part = inner.put_part(payload);
        match self.waiter {
            BackendWaiter::CallingThread => {
                self.waiter.wait(part)?.map_err(|source| self.upload_error("write", source))
            }
            BackendWaiter::Runtime => {
                self.sent.push_back(runtime_handle()?.spawn(part));
                self.wait_for_parts(MAX_PARTS_IN_FLIGHT)
            }
        }
    }

    /// Waits until at most `left` parts are in flight.
    fn wait_for_parts(&mut self, left: usize) -> Result<()> {
        while self.sent.len() > left
            && let Some(part) = self.sent.pop_front()
        {
            let part = self.waiter.wait(part)?.unwrap_or_else(|source| Err(source.into()));
            part.map_err(|source| self.upload_error("write", source))?;
        }
        Ok(())
    }

    fn upload_error(&self, action: &'static str, source: object_store::Error) -> Error {
        Error::from_backend(action, self.path.clone(), source)
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
        match self.waiter.wait(inner.complete())? {
            Ok(_) => {
                // Manifests name such files, so the files must survive a power failure.
                let synced = self.local.as_deref().map_or(Ok(()), local_files::sync_file);
                let source = |source: std::io::Error| object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source: Box::new(source),
                };
                synced.map_err(|error| self.upload_error("complete", source(error)))?;
                Ok(self.bytes)
            }
            Err(source) => {
                self.inner = Some(inner);
                Err(self.upload_error("complete", source))
            }
        }
    }
}

impl Drop for StoreUpload {
    fn drop(&mut self) {
        if let Some(mut inner) = self.inner.take() {
            // If the cleanup fails, the remaining file has a name that no reader opens.
            self.sent.drain(..).for_each(|part| part.abort());
            drop(self.waiter.wait(inner.abort()));
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
