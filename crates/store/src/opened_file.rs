// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A file whose size is known before its content is read, so that the content needs memory once.

use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

use bytes::Bytes;
use object_store::{GetResult, ObjectMeta, ObjectStore};

use crate::backend_wait::BackendWaiter;
use crate::error::{Error, Result};
use crate::ranged_reads::{PART_BYTES, fill_buffer};
use crate::store_operation::StoreOperation;

/// The open file of a local store, or the answer of a service.
#[derive(Debug)]
pub(crate) enum FileSource {
    /// An open file.
    Local(File),
    /// A file of another backend. The first answer has not been read.
    Backend {
        /// The backend.
        backend: Arc<dyn ObjectStore>,
        /// The way to wait for it.
        waiter: BackendWaiter,
        /// The operation of the caller, for requests over a network.
        operation: Option<Arc<StoreOperation>>,
        /// The version of the file that is read.
        meta: Box<ObjectMeta>,
        /// The answer to the first request; `None` if only the size was asked for.
        first: Option<Box<GetResult>>,
    },
}

/// A file that was found and has not been read.
#[derive(Debug)]
pub struct OpenedFile {
    pub(crate) source: FileSource,
    pub(crate) bytes: u64,
    pub(crate) path: String,
}

impl OpenedFile {
    /// Returns the size of the file.
    ///
    /// # Errors
    /// A file that is larger than memory.
    pub fn size(&self) -> Result<usize> {
        usize::try_from(self.bytes).map_err(|_| {
            let source = format!("{} bytes are more than memory", self.bytes).into();
            self.read_error(object_store::Error::Generic { store: "store", source })
        })
    }

    fn read_error(&self, source: object_store::Error) -> Error {
        match source {
            // `If-Match` has failed: the file is another one now.
            object_store::Error::Precondition { .. } => Error::Replaced { path: self.path.clone() },
            source => Error::from_backend("read", self.path.clone(), source),
        }
    }

    /// Reads the content part by part.
    ///
    /// # Errors
    /// Like [`OpenedFile::read_into`], and the errors of `take`.
    pub(crate) fn read_parts(&self, mut take: impl FnMut(Bytes) -> Result<()>) -> Result<()> {
        let FileSource::Backend { backend, waiter, operation, meta, .. } = &self.source else {
            return Ok(());
        };
        let mut start = 0;
        while start < self.bytes {
            let left = usize::try_from(self.bytes - start).unwrap_or(PART_BYTES);
            let mut part = vec![0; left.min(PART_BYTES)];
            let filled = fill_buffer(backend.as_ref(), meta, start, &mut part, None);
            let filled = run_operation(*waiter, operation.as_ref(), filled)?;
            filled.map_err(|source| self.read_error(source))?;
            start += part.len() as u64;
            take(part.into())?;
        }
        Ok(())
    }

    /// Reads the whole content into `buffer`, which has the size of the file.
    ///
    /// # Errors
    /// The backend's; [`Error::Replaced`] if another file has this name now.
    pub fn read_into(mut self, buffer: &mut [u8]) -> Result<()> {
        match &mut self.source {
            FileSource::Local(file) => file.read_exact(buffer).map_err(|source| {
                let source = Box::new(source);
                self.read_error(object_store::Error::Generic { store: "LocalFileSystem", source })
            }),
            FileSource::Backend { backend, waiter, operation, meta, first } => {
                let first = first.take().map(|answer| *answer);
                let filled = fill_buffer(backend.as_ref(), meta, 0, buffer, first);
                let operation = operation.clone();
                let filled = run_operation(*waiter, operation.as_ref(), filled)?;
                filled.map_err(|source| {
                    self.read_error(source).with_refusal_or_timeout(operation.as_deref())
                })
            }
        }
    }
}

fn run_operation<T>(
    waiter: BackendWaiter,
    operation: Option<&Arc<StoreOperation>>,
    future: impl Future<Output = T>,
) -> Result<T> {
    match operation {
        Some(operation) => waiter.wait(operation.run(future)),
        None => waiter.wait(future),
    }
}
