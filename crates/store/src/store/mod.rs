// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Files under one URL.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use crate::backend::StoreBackend;
use crate::backend_wait::BackendWaiter;
use crate::error::{Error, Result};
use crate::hdfs_retry::is_partial_upload;
use crate::local_files;
use crate::location::{StorageService, StoreLocation};
use crate::mark_names;
use crate::upload::StoreUpload;

mod replacement;

pub(crate) use replacement::FileReplacement;

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// Path relative to the listed store.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last write, if the backend reports it.
    pub modified: Option<SystemTime>,
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
            StoreLocation::Local(base) => StoreLocation::Local(base.join(path)),
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
        let source = match source.kind() {
            std::io::ErrorKind::NotFound => {
                object_store::Error::NotFound { path: whole, source: Box::new(source) }
            }
            _ => object_store::Error::Generic { store, source: Box::new(source) },
        };
        self.backend_error(action, path)(source)
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
        let future = question(self.backend.object_store()?);
        self.backend.backend_waiter().wait(future)?.map_err(self.backend_error(action, path))
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Refused`] and the backend's own.
    pub fn read(&self, path: &str) -> Result<Bytes> {
        let at = self.object_path(path)?;
        self.ask_backend("read", path, async |backend| backend.get(&at).await?.bytes().await)
    }

    /// Reads ranges of a file; neighbouring ranges are fetched together.
    ///
    /// # Errors
    /// Like [`Store::read`], and a range past the end.
    pub fn read_ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            return local_files::read_ranges(&base.join(path), ranges)
                .map_err(|source| self.local_error("read", path, source));
        }
        self.ask_backend("read", path, async |backend| backend.get_ranges(&at, ranges).await)
    }

    /// Returns the size of a file.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn size(&self, path: &str) -> Result<u64> {
        let at = self.object_path(path)?;
        self.ask_backend("look up", path, async |backend| backend.head(&at).await)
            .map(|meta| meta.size)
    }

    /// Returns whether a file with this name exists, or any file below it.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn exists(&self, path: &str) -> Result<bool> {
        if let StoreLocation::Local(base) = &self.location {
            return Ok(if path.is_empty() { base.exists() } else { base.join(path).exists() });
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

    /// Returns the item at `path`.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none; otherwise like [`Store::read`].
    pub fn stat(&self, path: &str) -> Result<DirectoryItem> {
        let at = self.object_path(path)?;
        match self.ask_backend("look up", path, async |backend| backend.head(&at).await) {
            Ok(meta) => Ok(DirectoryItem::from_meta(&meta)),
            Err(missing @ Error::Missing { .. }) => {
                if self.exists(path)? {
                    Ok(DirectoryItem::from_directory_path(&at))
                } else {
                    Err(missing)
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Returns files and directories directly in `path`, sorted by name.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn list_directory(&self, path: &str) -> Result<Vec<DirectoryItem>> {
        let at = self.object_path(path)?;
        let found = self.ask_backend("list", path, async |backend| {
            backend.list_with_delimiter(Some(&at)).await
        })?;
        let directories = found.common_prefixes.iter().map(DirectoryItem::from_directory_path);
        let mut items: Vec<DirectoryItem> =
            directories.chain(found.objects.iter().map(DirectoryItem::from_meta)).collect();
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    /// Returns all files below `path`, sorted by path; none if the directory does not exist.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn list(&self, path: &str) -> Result<Vec<FileEntry>> {
        let at = self.object_path(path)?;
        let below = |whole: &str| {
            whole
                .strip_prefix(self.prefix.as_ref())
                .unwrap_or(whole)
                .trim_start_matches('/')
                .to_owned()
        };
        let entry = |meta: object_store::ObjectMeta| FileEntry {
            path: below(meta.location.as_ref()),
            bytes: meta.size,
            modified: Some(SystemTime::from(meta.last_modified)),
        };
        let mut entries: Vec<FileEntry> = self.ask_backend("list", path, async |backend| {
            backend.list(Some(&at)).map_ok(entry).try_collect().await
        })?;
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(entries)
    }

    /// Writes a file that is visible completely or not at all; on a local file system even after a
    /// power failure.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn write(&self, path: &str, data: Bytes) -> Result<()> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            return local_files::write_file(&base.join(path), &data)
                .map_err(|source| self.local_error("write", path, source));
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
            return local_files::create_file(&base.join(path), &data)
                .map_err(|source| self.local_error("write", path, source));
        }
        let put = async |backend: Arc<dyn ObjectStore>| {
            backend.put_opts(&at, data.into(), PutMode::Create.into()).await
        };
        let wrote = self.backend.backend_waiter().wait(put(self.backend.object_store()?))?;
        match wrote {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(source) => Err(self.backend_error("write", path)(source)),
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

    /// Starts the upload of a file in pieces.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn start_upload(&self, path: &str) -> Result<StoreUpload> {
        let at = self.object_path(path)?;
        let inner =
            self.ask_backend("write", path, async |backend| backend.put_multipart(&at).await)?;
        let local = self.local_path().map(|base| base.join(path));
        Ok(StoreUpload::new(inner, self.backend.backend_waiter(), self.display_path(path), local))
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

    /// Like [`Store::delete`], but gives up after `patience` if a store over the network does not
    /// answer. Then it is unknown whether the file still exists.
    ///
    /// # Errors
    /// Like [`Store::delete`], and [`Error::TimedOut`].
    pub fn delete_within(&self, path: &str, patience: Duration) -> Result<()> {
        let at = self.object_path(path)?;
        let backend = self.backend.object_store()?;
        let asked = match self.backend.backend_waiter() {
            BackendWaiter::CallingThread => {
                BackendWaiter::CallingThread.wait(backend.delete(&at))?
            }
            BackendWaiter::Runtime => {
                let late = || Error::TimedOut {
                    action: "delete",
                    path: self.display_path(path),
                    patience,
                };
                let timed = async { tokio::time::timeout(patience, backend.delete(&at)).await };
                BackendWaiter::Runtime.wait(timed)?.map_err(|_| late())?
            }
        };
        match asked.map_err(self.backend_error("delete", path)) {
            Err(Error::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Deletes all files and directories below `path`; returns the number of files.
    ///
    /// # Errors
    /// Like [`Store::write`]. Some files may be deleted by then.
    pub fn delete_all(&self, path: &str) -> Result<usize> {
        let entries = self.list(path)?;
        self.delete_files(path, entries.iter().map(|entry| entry.path.as_str()))?;
        match &self.location {
            StoreLocation::Local(base) => {
                let directory = base.join(path);
                match std::fs::remove_dir_all(&directory) {
                    Err(source) if directory.is_dir() => {
                        return Err(Error::Directory {
                            path: directory.display().to_string(),
                            source,
                        });
                    }
                    Ok(()) | Err(_) => {}
                }
            }
            StoreLocation::Remote { service: StorageService::Hdfs, .. } => {
                self.remove_directories(path)?
            }
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => {}
        }
        Ok(entries.len())
    }

    /// Deletes several files below `path`; missing files are not an error.
    pub(crate) fn delete_files<'a>(
        &self,
        path: &str,
        files: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let paths = files.map(|file| self.object_path(file)).collect::<Result<Vec<_>>>()?;
        self.ask_backend("delete", path, async |backend| {
            let gone = |deleted: &object_store::Result<Path>| {
                std::future::ready(!matches!(deleted, Err(object_store::Error::NotFound { .. })))
            };
            let paths = stream::iter(paths.into_iter().map(Ok)).boxed();
            backend.delete_stream(paths).filter(gone).try_collect::<Vec<_>>().await
        })
        .map(drop)
    }

    /// Removes the directory of this store and the directories in it, unless they contain files.
    pub(crate) fn remove_empty_directories(&self) -> Result<()> {
        match &self.location {
            StoreLocation::Local(base) => local_files::remove_empty_directories(base),
            StoreLocation::Remote { service: StorageService::Hdfs, .. } => {
                self.remove_directories("")?
            }
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => {}
        }
        Ok(())
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
        let name = format!("_writable_{}_{:?}", std::process::id(), std::thread::current().id());
        let name: String =
            name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        self.write(&name, Bytes::new())?;
        self.delete(&name)
    }
}

#[cfg(test)]
mod tests;
