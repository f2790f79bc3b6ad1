// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A file that is written in pieces and appears when it is complete.

use std::collections::VecDeque;
use std::path::PathBuf;

use bytes::Bytes;
use object_store::MultipartUpload;
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::local;
use crate::wait::{Waiter, runtime};

/// Pieces smaller than this are put together: object stores refuse small parts.
const PART: usize = 8 << 20;
/// Parts on their way at once over a network: the writer continues meanwhile.
const AHEAD: usize = 4;

/// A file being written. It is invisible before [`Upload::finish`]; dropping it leaves nothing
/// behind.
pub struct Upload {
    inner: Option<Box<dyn MultipartUpload>>,
    waiter: Waiter,
    sent: VecDeque<JoinHandle<object_store::Result<()>>>,
    path: String,
    /// Path at which it appears, on a local file system.
    local: Option<PathBuf>,
    pending: Vec<Bytes>,
    pending_bytes: usize,
    bytes: u64,
}

impl Upload {
    pub(crate) fn new(
        inner: Box<dyn MultipartUpload>,
        waiter: Waiter,
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

    /// Returns the bytes handed over so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a piece.
    ///
    /// # Errors
    /// The backend's; the upload cannot continue after that.
    pub fn write(&mut self, piece: Bytes) -> Result<()> {
        self.bytes += piece.len() as u64;
        self.pending_bytes += piece.len();
        self.pending.push(piece);
        if self.pending_bytes >= PART { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.pending_bytes = 0;
        let payload = self.pending.drain(..).collect::<object_store::PutPayload>();
        let inner = self.inner.as_mut().ok_or_else(|| Error::Ended { path: self.path.clone() })?;
        let part = inner.put_part(payload);
        match self.waiter {
            Waiter::Here => self.waiter.wait(part)?.map_err(|source| self.failed("write", source)),
            Waiter::Runtime => {
                self.sent.push_back(runtime()?.spawn(part));
                self.settle(AHEAD)
            }
        }
    }

    /// Waits until at most `left` parts are on their way.
    fn settle(&mut self, left: usize) -> Result<()> {
        while self.sent.len() > left
            && let Some(part) = self.sent.pop_front()
        {
            let part = self.waiter.wait(part)?.unwrap_or_else(|source| Err(source.into()));
            part.map_err(|source| self.failed("write", source))?;
        }
        Ok(())
    }

    fn failed(&self, action: &'static str, source: object_store::Error) -> Error {
        Error::of(action, self.path.clone(), source)
    }

    /// Makes the file appear; returns its size.
    ///
    /// # Errors
    /// The backend's; then there is no file.
    pub fn finish(mut self) -> Result<u64> {
        self.flush()?;
        self.settle(0)?;
        let mut inner =
            self.inner.take().ok_or_else(|| Error::Ended { path: self.path.clone() })?;
        match self.waiter.wait(inner.complete())? {
            Ok(_) => {
                // Manifests name such files: what they name must outlast a loss of power.
                let synced = self.local.as_deref().map_or(Ok(()), local::sync);
                let source = |source: std::io::Error| object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source: Box::new(source),
                };
                synced.map_err(|error| self.failed("complete", source(error)))?;
                Ok(self.bytes)
            }
            Err(source) => {
                self.inner = Some(inner);
                Err(self.failed("complete", source))
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(mut inner) = self.inner.take() {
            // What cannot be cleaned up now carries a name that no reader looks for.
            self.sent.drain(..).for_each(|part| part.abort());
            drop(self.waiter.wait(inner.abort()));
        }
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload")
            .field("path", &self.path)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
