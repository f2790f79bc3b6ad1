// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Files under one URL.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode};

use crate::backend::StoreBackend;
use crate::backend_wait::BackendWaiter;
use crate::error::{Error, Result};
use crate::hdfs_retry::is_partial_upload;
use crate::local_files;
use crate::local_tree;
use crate::location::{StorageService, StoreLocation};
use crate::mark_names;
use crate::opened_file::{FileSource, OpenedFile};
use crate::ranged_reads::{self, MAX_SINGLE_REQUEST_BYTES};
use crate::store_operation::StoreOperation;

mod content;
mod copying;
mod listing;
mod replacement;
mod upload;

pub(crate) use content::is_content_not_mark;
pub(crate) use replacement::FileReplacement;
pub use upload::StoreUpload;

/// Most attempts to read a file that other processes replace again and again.
const MAX_STABLE_READS: u32 = 5;

/// Repeats a read if the file was replaced while it was being read.
///
/// # Errors
/// The errors of `read`.
pub fn reread_if_replaced<T>(mut read: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..MAX_STABLE_READS {
        match read() {
            Err(Error::Replaced { .. }) => {}
            done => return done,
        }
    }
    read()
}

/// Returns the local path of a file of a store. A path with a slash at its end, as `join` makes it
/// of an empty name, would follow a link and name no file.
fn local_file_path(base: &std::path::Path, path: &str) -> PathBuf {
    if path.is_empty() { base.to_owned() } else { base.join(path) }
}

/// An item of a listing: a file, or a directory. Object stores derive directories from names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryItem {
    /// Last part of the path.
    pub name: String,
    /// Size of a file; 0 for a directory.
    pub bytes: u64,
    /// Time of the last write to a file, if the backend reports it.
    pub modified: Option<SystemTime>,
    /// Whether the item is a directory.
    pub is_directory: bool,
}

impl DirectoryItem {
    fn from_meta(meta: &object_store::ObjectMeta) -> Self {
        let name = meta.location.filename().unwrap_or_default().to_owned();
        let modified = Some(SystemTime::from(meta.last_modified));
        Self { name, bytes: meta.size, modified, is_directory: false }
    }

    fn from_local(path: &Path, found: &std::fs::Metadata) -> Self {
        let name = path.filename().unwrap_or_default().to_owned();
        Self { name, bytes: found.len(), modified: found.modified().ok(), is_directory: false }
    }

    fn from_directory_path(path: &Path) -> Self {
        let name = path.filename().unwrap_or_default().to_owned();
        Self { name, bytes: 0, modified: None, is_directory: true }
    }
}

/// Files under one URL. Paths are relative to it, and `""` is the URL itself. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    backend: StoreBackend,
    location: StoreLocation,
    prefix: Path,
}

impl Store {
    /// Opens the store of `url`: a path, `file://`, `dbfs:/`, `hdfs://`, `s3://`, `gs://`,
    /// `abfss://`, `az://` or `memory://name/path`, with the options of
    /// [`crate::configure_options`]. Accesses no file.
    ///
    /// # Errors
    /// Text that is no URL, an unknown scheme, an unknown option.
    pub fn open(url: &str) -> Result<Self> {
        let location = StoreLocation::parse(url)?;
        let refuse = |_| Error::Url { url: url.to_owned(), reason: "the path cannot be a store's" };
        let prefix = match &location {
            StoreLocation::Local(path) => Path::from_absolute_path(path).map_err(refuse)?,
            StoreLocation::Memory { path, .. } | StoreLocation::Remote { path, .. } => {
                Path::parse(path).map_err(refuse)?
            }
        };
        let backend = StoreBackend::for_location(&location)?;
        Ok(Self { backend, location, prefix })
    }

    /// Returns the store that `path` names: another URL, an absolute path, or a path below this
    /// store.
    ///
    /// # Errors
    /// Like [`Store::open`].
    pub fn resolve_path(&self, path: &str) -> Result<Self> {
        // One slash, because of `dbfs:/x`.
        if path.starts_with('/') || path.contains(":/") {
            Self::open(path)
        } else {
            self.open_child(path)
        }
    }

    /// Returns the store at `path` below this one.
    ///
    /// # Errors
    /// A path with `..` or empty parts.
    pub fn open_child(&self, path: &str) -> Result<Self> {
        let prefix = self.object_path(path)?;
        let location = match &self.location {
            StoreLocation::Local(base) => StoreLocation::Local(local_file_path(base, path)),
            StoreLocation::Memory { name, .. } => {
                StoreLocation::Memory { name: name.clone(), path: prefix.to_string() }
            }
            StoreLocation::Remote { service, root, .. } => StoreLocation::Remote {
                service: *service,
                root: root.clone(),
                path: prefix.to_string(),
            },
        };
        Ok(Self { backend: self.backend.clone(), location, prefix })
    }

    /// Returns the full URL.
    pub fn url(&self) -> String {
        self.location.url()
    }

    /// Returns the directory if it is on a local file system.
    pub fn local_path(&self) -> Option<PathBuf> {
        match &self.location {
            StoreLocation::Local(path) => Some(path.clone()),
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => None,
        }
    }

    /// Returns whether the store is accessed over a network.
    pub fn is_remote(&self) -> bool {
        matches!(self.location, StoreLocation::Remote { .. })
    }

    /// Returns the whole path of a file, for messages.
    pub fn display_path(&self, path: &str) -> String {
        let whole = match &self.location {
            StoreLocation::Local(base) => base.display().to_string(),
            other => other.url(),
        };
        if path.is_empty() { whole } else { format!("{}/{path}", whole.trim_end_matches('/')) }
    }

    fn object_path(&self, path: &str) -> Result<Path> {
        let whole = if path.is_empty() {
            self.prefix.to_string()
        } else {
            format!("{}/{path}", self.prefix)
        };
        Path::parse(&whole).map_err(|_| Error::Url {
            url: self.display_path(path),
            reason: "the path must not contain . or .. or empty parts",
        })
    }

    fn backend_error(
        &self,
        action: &'static str,
        path: &str,
    ) -> impl FnOnce(object_store::Error) -> Error {
        let path = self.display_path(path);
        move |source| Error::from_backend(action, path, source)
    }

    fn local_error(&self, action: &'static str, path: &str, source: std::io::Error) -> Error {
        let store = "LocalFileSystem";
        let whole = self.display_path(path);
        // A missing file gives the same error as in a service, and callers depend on that error.
        let source = match source.kind() {
            std::io::ErrorKind::NotFound => {
                object_store::Error::NotFound { path: whole, source: Box::new(source) }
            }
            _ => object_store::Error::Generic { store, source: Box::new(source) },
        };
        self.backend_error(action, path)(source)
    }

    /// Returns the way to wait for the backend.
    pub(crate) fn backend_waiter(&self) -> BackendWaiter {
        self.backend.backend_waiter()
    }

    /// Sends a request to the backend and waits for the answer.
    fn ask_backend<T, F>(
        &self,
        action: &'static str,
        path: &str,
        question: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let operation = self.backend.begin_operation(action, self.display_path(path));
        self.ask_within_operation(action, path, operation.as_ref(), question)
    }

    /// Like [`Store::ask_backend`], as a part of an operation.
    fn ask_within_operation<T, F>(
        &self,
        action: &'static str,
        path: &str,
        operation: Option<&Arc<StoreOperation>>,
        question: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let future = question(self.backend.object_store()?);
        let waiter = self.backend.backend_waiter();
        let answer = match operation {
            Some(operation) => waiter.wait(operation.run(future))?,
            None => waiter.wait(future)?,
        };
        let error = self.backend_error(action, path);
        answer.map_err(|source| error(source).with_refusal_or_timeout(operation.map(AsRef::as_ref)))
    }

    /// Opens a file, so that its size is known before its content is read.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Refused`] and the backend's own.
    pub fn open_file(&self, path: &str) -> Result<OpenedFile> {
        // The check is for local files, too: no `..` may leave the store.
        let at = self.object_path(path)?;
        let whole = self.display_path(path);
        if let StoreLocation::Local(base) = &self.location {
            let (file, bytes) = local_files::open_file(&local_file_path(base, path))
                .map_err(|source| self.local_error("read", path, source))?;
            return Ok(OpenedFile { source: FileSource::Local(file), bytes, path: whole });
        }
        // The client of HDFS reads ahead, so its files are opened by the reads of their parts.
        let only_size =
            matches!(self.location, StoreLocation::Remote { service: StorageService::Hdfs, .. });
        let operation = self.backend.begin_operation("read", whole.clone());
        let (meta, first) =
            self.ask_within_operation("read", path, operation.as_ref(), async |backend| {
                if only_size {
                    return Ok((backend.head(&at).await?, None));
                }
                // One request gives the size and the first part, so small files need no second one.
                let answer = backend.get(&at).await?;
                Ok((answer.meta.clone(), Some(Box::new(answer))))
            })?;
        let bytes = meta.size;
        let source = FileSource::Backend {
            backend: self.backend.object_store()?,
            waiter: self.backend.backend_waiter(),
            operation,
            meta: Box::new(meta),
            first,
        };
        Ok(OpenedFile { source, bytes, path: whole })
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// Like [`Store::open_file`].
    pub fn read(&self, path: &str) -> Result<Bytes> {
        reread_if_replaced(|| {
            let file = self.open_file(path)?;
            let mut buffer = vec![0; file.size()?];
            file.read_into(&mut buffer)?;
            Ok(buffer.into())
        })
    }

    /// Reads ranges of a file; neighbouring ranges are fetched together.
    ///
    /// # Errors
    /// Like [`Store::read`], and a range past the end.
    pub fn read_ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            return local_files::read_ranges(&local_file_path(base, path), ranges)
                .map_err(|source| self.local_error("read", path, source));
        }
        self.ask_backend("read", path, async |backend| {
            ranged_reads::read_ranges(backend.as_ref(), &at, ranges).await
        })
    }

    /// Returns the size of a file.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn size(&self, path: &str) -> Result<u64> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            return local_files::file_metadata(&local_file_path(base, path))
                .map(|found| found.len())
                .map_err(|source| self.local_error("look up", path, source));
        }
        self.ask_backend("look up", path, async |backend| backend.head(&at).await)
            .map(|meta| meta.size)
    }

    /// Returns the version of a file, or `None` if it does not exist.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub(crate) fn file_version(&self, path: &str) -> Result<Option<ObjectMeta>> {
        let at = self.object_path(path)?;
        match self.ask_backend("look up", path, async |backend| backend.head(&at).await) {
            Ok(meta) => Ok(Some(meta)),
            Err(Error::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a file with this name exists, or any file below it.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn exists(&self, path: &str) -> Result<bool> {
        if let StoreLocation::Local(base) = &self.location {
            return local_tree::path_exists(&local_file_path(base, path))
                .map_err(|source| self.local_error("look up", path, source));
        }
        match self.size(path) {
            Ok(_) => Ok(true),
            Err(Error::Missing { .. } | Error::Url { .. }) => {
                let at = self.object_path(path)?;
                let first = self.ask_backend("list", path, async |backend| {
                    backend.list(Some(&at)).try_next().await
                })?;
                Ok(first.is_some())
            }
            Err(error) => Err(error),
        }
    }

    /// Writes a file that is visible completely or not at all; on a local file system even after a
    /// power failure.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn write(&self, path: &str, data: Bytes) -> Result<()> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            return local_files::write_file(&local_file_path(base, path), &data)
                .map_err(|source| self.local_error("write", path, source));
        }
        // The client of HDFS writes a file as a stream, which is repeated as a whole.
        let in_parts = matches!(
            self.location,
            StoreLocation::Remote { service, .. } if service != StorageService::Hdfs
        );
        if in_parts && data.len() > MAX_SINGLE_REQUEST_BYTES {
            let mut upload = self.start_upload(path)?;
            upload.write_piece(data)?;
            return upload.finish().map(drop);
        }
        self.ask_backend("write", path, async |backend| backend.put(&at, data.into()).await)
            .map(drop)
    }

    /// Writes a small file unless a file with this name exists; returns whether it was written. Of
    /// several concurrent attempts, one succeeds.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn create_if_absent(&self, path: &str, data: Bytes) -> Result<bool> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            // The backend would use hard links, which some mounts do not support.
            return local_files::create_file(&local_file_path(base, path), &data)
                .map_err(|source| self.local_error("write", path, source));
        }
        let operation = self.backend.begin_operation("write", self.display_path(path));
        let created =
            self.ask_within_operation("write", path, operation.as_ref(), async |backend| {
                let put = backend.put_opts(&at, data.clone().into(), PutMode::Create.into());
                match put.await {
                    Ok(_) => Ok(true),
                    Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
                    Err(error) => Err(error),
                }
            })?;
        // An earlier attempt may have succeeded although its answer was lost. Then the file has
        // exactly this content.
        let repeated = operation.is_some_and(|operation| operation.was_repeated());
        // All empty files are equal, so an empty file does not show its writer.
        if created || !repeated || data.is_empty() {
            return Ok(created);
        }
        match self.read(path) {
            Ok(found) => Ok(found == data),
            // Another process has deleted the file of yet another one.
            Err(Error::Missing { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes files that killed uploads left directly in this directory. The caller must know that
    /// there is no writer. Only file systems show such files.
    ///
    /// # Errors
    /// Like [`Store::list_directory`] and [`Store::delete`].
    pub fn remove_partial_uploads(&self) -> Result<()> {
        match &self.location {
            StoreLocation::Local(base) => local_files::remove_partial_uploads(base)
                .map_err(|source| self.local_error("delete", "", source)),
            StoreLocation::Remote { service: StorageService::Hdfs, .. } => {
                let mut items = self.list_directory("")?;
                items.retain(|item| {
                    let coming = mark_names::may_become_mark(&item.name, || item.modified);
                    !item.is_directory && is_partial_upload(&item.name) && !coming
                });
                items.iter().try_for_each(|item| self.delete(&item.name))
            }
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => Ok(()),
        }
    }

    /// Deletes a file; a missing file is not an error.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn delete(&self, path: &str) -> Result<()> {
        let at = self.object_path(path)?;
        match self.ask_backend("delete", path, async |backend| backend.delete(&at).await) {
            Err(Error::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Like [`Store::delete`], but gives up after `timeout` if a store over the network does not
    /// answer. Then it is unknown whether the file still exists.
    ///
    /// # Errors
    /// Like [`Store::delete`], and [`Error::TimedOut`].
    pub fn delete_within(&self, path: &str, timeout: Duration) -> Result<()> {
        let at = self.object_path(path)?;
        // A call of the local file system cannot be interrupted.
        if self.backend.backend_waiter() == BackendWaiter::CallingThread {
            return self.delete(path);
        }
        let late = || Error::TimedOut { action: "delete", path: self.display_path(path), timeout };
        let deleted =
            self.ask_backend("delete", path, async |backend| {
                match tokio::time::timeout(timeout, backend.delete(&at)).await {
                    Ok(deleted) => deleted.map(Some),
                    Err(_) => Ok(None),
                }
            });
        match deleted {
            Err(Error::Missing { .. }) => Ok(()),
            deleted => deleted?.ok_or_else(late),
        }
    }

    /// Deletes all files and directories below `path`; returns the number of files. Symbolic links
    /// are deleted and not followed, also if `path` is one.
    ///
    /// # Errors
    /// Like [`Store::write`]. Some files may be deleted by then.
    pub fn delete_all(&self, path: &str) -> Result<usize> {
        if let StoreLocation::Local(base) = &self.location {
            let directory = local_file_path(base, path);
            let failed = |source| self.local_error("delete", path, source);
            let is_link = local_tree::is_link(&directory).map_err(failed)?;
            let files = if is_link { 0 } else { self.list_with_links(path)?.0.len() };
            local_tree::remove_tree(&directory).map_err(failed)?;
            return Ok(files);
        }
        let entries = self.list(path)?;
        self.delete_files(path, entries.iter().map(|entry| entry.path.as_str()))?;
        // Object stores have no directories; HDFS keeps the empty ones.
        if let StoreLocation::Remote { service: StorageService::Hdfs, .. } = &self.location {
            self.remove_directories(path)?;
        }
        Ok(entries.len())
    }

    /// Returns whether `path` is a symbolic link.
    ///
    /// # Errors
    /// A file system that cannot be asked.
    pub(crate) fn is_link(&self, path: &str) -> Result<bool> {
        let StoreLocation::Local(base) = &self.location else { return Ok(false) };
        local_tree::is_link(&local_file_path(base, path))
            .map_err(|source| self.local_error("look up", path, source))
    }

    /// Removes the directories without files at and below `path`, innermost first.
    fn remove_directories(&self, path: &str) -> Result<()> {
        for item in self.list_directory(path)?.into_iter().filter(|item| item.is_directory) {
            let inner = if path.is_empty() { item.name } else { format!("{path}/{}", item.name) };
            self.remove_directories(&inner)?;
        }
        // A directory with files stays: its deletion fails, and the error is ignored on purpose.
        drop(self.delete(path));
        Ok(())
    }

    /// Checks that files can be written by writing and deleting a small one.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn check_writable(&self) -> Result<()> {
        // Several threads and processes may check the same store at a time.
        let name = format!("_writable_{}_{:?}", std::process::id(), std::thread::current().id());
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        self.write(&name, Bytes::new())?;
        self.delete(&name)
    }
}

#[cfg(test)]
mod tests;
