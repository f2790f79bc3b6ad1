// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A file that is written piece by piece and appears at its end.

use bytes::Bytes;
use object_store::MultipartUpload;

use crate::error::{Error, Result};
use crate::wait::wait;

/// Pieces smaller than this are put together: object stores refuse small parts.
const PART: usize = 8 << 20;

/// A file being written. Nobody sees it before [`Upload::finish`]; dropping it leaves nothing behind.
pub struct Upload {
    inner: Option<Box<dyn MultipartUpload>>,
    path: String,
    pending: Vec<Bytes>,
    pending_bytes: usize,
    bytes: u64,
}

impl Upload {
    pub(crate) fn new(inner: Box<dyn MultipartUpload>, path: String) -> Self {
        Self { inner: Some(inner), path, pending: Vec::new(), pending_bytes: 0, bytes: 0 }
    }

    /// The whole path of the file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Bytes handed over so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a piece.
    ///
    /// # Errors
    /// The backend's; the upload cannot go on after that.
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
        wait(inner.put_part(payload)).map_err(|source| Error::of("write", self.path.clone(), source))
    }

    /// Makes the file appear; returns its size.
    ///
    /// # Errors
    /// The backend's; then there is no file.
    pub fn finish(mut self) -> Result<u64> {
        self.flush()?;
        let mut inner = self.inner.take().ok_or_else(|| Error::Ended { path: self.path.clone() })?;
        match wait(inner.complete()) {
            Ok(_) => Ok(self.bytes),
            Err(source) => {
                self.inner = Some(inner);
                Err(Error::of("complete", self.path.clone(), source))
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(mut inner) = self.inner.take() {
            // What cannot be cleaned up now carries a name that no reader looks for.
            drop(wait(inner.abort()));
        }
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload").field("path", &self.path).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
