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

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::hadoop::is_leaving;
use crate::local;
use crate::location::{Location, Service};
use crate::mark;
use crate::upload::Upload;
use crate::wait::Waiter;

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Path relative to the store that was asked.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Time of the last write, if the backend reports it.
    pub modified: Option<SystemTime>,
}

/// An item at a path: a file, or a directory, which object stores derive from names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Last part of its path.
    pub name: String,
    /// Size of a file, 0 of a directory.
    pub bytes: u64,
    /// Time of the last write to a file, if the backend reports it.
    pub modified: Option<SystemTime>,
    /// Whether it is a directory.
    pub is_directory: bool,
}

impl Item {
    fn file(meta: &object_store::ObjectMeta) -> Self {
        let name = meta.location.filename().unwrap_or_default().to_owned();
        let modified = Some(SystemTime::from(meta.last_modified));
        Self { name, bytes: meta.size, modified, is_directory: false }
    }

    fn directory(path: &Path) -> Self {
        let name = path.filename().unwrap_or_default().to_owned();
        Self { name, bytes: 0, modified: None, is_directory: true }
    }
}

/// Files under one URL; paths are relative to it, `""` is the URL itself. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    backend: Backend,
    location: Location,
    prefix: Path,
}

impl Store {
    /// Opens the store of `url`: a path, `file://`, `dbfs:/`, `hdfs://`, `s3://`, `gs://`,
    /// `abfss://`, `az://` or `memory://name/path`, with the options of [`crate::configure`].
    /// Touches nothing.
    ///
    /// # Errors
    /// Text that is no URL, an unknown scheme, an unknown option.
    pub fn open(url: &str) -> Result<Self> {
        let location = Location::parse(url)?;
        let refuse = |_| Error::Url { url: url.to_owned(), reason: "the path cannot be a store's" };
        let prefix = match &location {
            Location::Local(path) => Path::from_absolute_path(path).map_err(refuse)?,
            Location::Memory { path, .. } | Location::Remote { path, .. } => {
                Path::parse(path).map_err(refuse)?
            }
        };
        let backend = Backend::of(&location)?;
        Ok(Self { backend, location, prefix })
    }

    /// Returns the store that `path` names: another URL, an absolute path, or a place below this
    /// one.
    ///
    /// # Errors
    /// Like [`Store::open`].
    pub fn resolve(&self, path: &str) -> Result<Self> {
        if path.starts_with('/') || path.contains(":/") {
            Self::open(path)
        } else {
            self.child(path)
        }
    }

    /// Returns the store below this one.
    ///
    /// # Errors
    /// A path with `..` or empty parts.
    pub fn child(&self, path: &str) -> Result<Self> {
        let prefix = self.at(path)?;
        let location = match &self.location {
            Location::Local(base) => Location::Local(base.join(path)),
            Location::Memory { name, .. } => {
                Location::Memory { name: name.clone(), path: prefix.to_string() }
            }
            Location::Remote { service, root, .. } => {
                Location::Remote { service: *service, root: root.clone(), path: prefix.to_string() }
            }
        };
        Ok(Self { backend: self.backend.clone(), location, prefix })
    }

    /// Returns the full URL.
    pub fn url(&self) -> String {
        self.location.url()
    }

    /// Returns the directory, when it is on this machine's file system.
    pub fn local_path(&self) -> Option<PathBuf> {
        match &self.location {
            Location::Local(path) => Some(path.clone()),
            Location::Memory { .. } | Location::Remote { .. } => None,
        }
    }

    /// Returns whether files are fetched over a network.
    pub fn is_remote(&self) -> bool {
        matches!(self.location, Location::Remote { .. })
    }

    /// Returns the whole path of a file here, for messages.
    pub fn name_of(&self, path: &str) -> String {
        let whole = match &self.location {
            Location::Local(base) => base.display().to_string(),
            other => other.url(),
        };
        if path.is_empty() { whole } else { format!("{}/{path}", whole.trim_end_matches('/')) }
    }

    fn at(&self, path: &str) -> Result<Path> {
        let whole = if path.is_empty() {
            self.prefix.to_string()
        } else {
            format!("{}/{path}", self.prefix)
        };
        Path::parse(&whole).map_err(|_| Error::Url {
            url: self.name_of(path),
            reason: "the path must not contain . or .. or empty parts",
        })
    }

    fn fail(&self, action: &'static str, path: &str) -> impl FnOnce(object_store::Error) -> Error {
        let path = self.name_of(path);
        move |source| Error::of(action, path, source)
    }

    fn io(&self, action: &'static str, path: &str, source: std::io::Error) -> Error {
        let store = "LocalFileSystem";
        let whole = self.name_of(path);
        let source = match source.kind() {
            std::io::ErrorKind::NotFound => {
                object_store::Error::NotFound { path: whole, source: Box::new(source) }
            }
            _ => object_store::Error::Generic { store, source: Box::new(source) },
        };
        self.fail(action, path)(source)
    }

    /// Asks the backend and waits.
    fn ask<T, F>(
        &self,
        action: &'static str,
        path: &str,
        question: impl FnOnce(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let future = question(self.backend.get()?);
        self.backend.waiter().wait(future)?.map_err(self.fail(action, path))
    }

    /// Returns a whole file.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Refused`] and the backend's own.
    pub fn read(&self, path: &str) -> Result<Bytes> {
        let at = self.at(path)?;
        self.ask("read", path, async |backend| backend.get(&at).await?.bytes().await)
    }

    /// Ranges of a file; near ones are fetched together.
    ///
    /// # Errors
    /// Like [`Store::read`], and a range past the end.
    pub fn read_ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let at = self.at(path)?;
        if let Location::Local(base) = &self.location {
            return local::read_ranges(&base.join(path), ranges)
                .map_err(|source| self.io("read", path, source));
        }
        self.ask("read", path, async |backend| backend.get_ranges(&at, ranges).await)
    }

    /// Size of a file.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn size(&self, path: &str) -> Result<u64> {
        let at = self.at(path)?;
        self.ask("look up", path, async |backend| backend.head(&at).await).map(|meta| meta.size)
    }

    /// Returns whether there is a file of this name, or anything below it.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn exists(&self, path: &str) -> Result<bool> {
        if let Location::Local(base) = &self.location {
            return Ok(if path.is_empty() { base.exists() } else { base.join(path).exists() });
        }
        match self.size(path) {
            Ok(_) => Ok(true),
            Err(Error::Missing { .. } | Error::Url { .. }) => {
                let at = self.at(path)?;
                let first = self
                    .ask("list", path, async |backend| backend.list(Some(&at)).try_next().await)?;
                Ok(first.is_some())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the item at `path`.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is nothing; as [`Store::read`].
    pub fn stat(&self, path: &str) -> Result<Item> {
        let at = self.at(path)?;
        match self.ask("look up", path, async |backend| backend.head(&at).await) {
            Ok(meta) => Ok(Item::file(&meta)),
            Err(missing @ Error::Missing { .. }) => {
                if self.exists(path)? {
                    Ok(Item::directory(&at))
                } else {
                    Err(missing)
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Files and directories directly in `path`, sorted by name.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn look(&self, path: &str) -> Result<Vec<Item>> {
        let at = self.at(path)?;
        let found =
            self.ask("list", path, async |backend| backend.list_with_delimiter(Some(&at)).await)?;
        let directories = found.common_prefixes.iter().map(Item::directory);
        let mut items: Vec<Item> =
            directories.chain(found.objects.iter().map(Item::file)).collect();
        items.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(items)
    }

    /// Returns every file below `path`, sorted; none when there is no such place.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let at = self.at(path)?;
        let below = |whole: &str| {
            whole
                .strip_prefix(self.prefix.as_ref())
                .unwrap_or(whole)
                .trim_start_matches('/')
                .to_owned()
        };
        let entry = |meta: object_store::ObjectMeta| Entry {
            path: below(meta.location.as_ref()),
            bytes: meta.size,
            modified: Some(SystemTime::from(meta.last_modified)),
        };
        let mut entries: Vec<Entry> = self.ask("list", path, async |backend| {
            backend.list(Some(&at)).map_ok(entry).try_collect().await
        })?;
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(entries)
    }

    /// Writes a file that is seen whole or not at all; on a local file system also after a loss of
    /// power.
    ///
    /// # Errors
    /// Like [`Store::read`].
    pub fn write(&self, path: &str, data: Bytes) -> Result<()> {
        let at = self.at(path)?;
        if let Location::Local(base) = &self.location {
            return local::write(&base.join(path), &data)
                .map_err(|source| self.io("write", path, source));
        }
        self.ask("write", path, async |backend| backend.put(&at, data.into()).await).map(drop)
    }

    /// Writes a small file unless there is one of this name; says whether it did. Of many attempts,
    /// one succeeds.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn create(&self, path: &str, data: Bytes) -> Result<bool> {
        let at = self.at(path)?;
        if let Location::Local(base) = &self.location {
            // Hard links, by which the backend does it, are not to be had on every mount.
            return local::create(&base.join(path), &data)
                .map_err(|source| self.io("write", path, source));
        }
        let put = async |backend: Arc<dyn ObjectStore>| {
            backend.put_opts(&at, data.into(), PutMode::Create.into()).await
        };
        let wrote = self.backend.waiter().wait(put(self.backend.get()?))?;
        match wrote {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(source) => Err(self.fail("write", path)(source)),
        }
    }

    /// Deletes what killed uploads left directly in this directory; the caller knows that there is
    /// no writer here. Only file systems show such leavings.
    ///
    /// # Errors
    /// Like [`Store::look`] and [`Store::delete`].
    pub fn tidy(&self) -> Result<()> {
        match &self.location {
            Location::Local(base) => {
                local::tidy(base).map_err(|source| self.io("delete", "", source))
            }
            Location::Remote { service: Service::Hdfs, .. } => {
                let mut items = self.look("")?;
                items.retain(|item| {
                    let coming = mark::may_be_coming(&item.name, || item.modified);
                    !item.is_directory && is_leaving(&item.name) && !coming
                });
                items.iter().try_for_each(|item| self.delete(&item.name))
            }
            Location::Memory { .. } | Location::Remote { .. } => Ok(()),
        }
    }

    /// Starts a file that is written piece by piece.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn upload(&self, path: &str) -> Result<Upload> {
        let at = self.at(path)?;
        let inner = self.ask("write", path, async |backend| backend.put_multipart(&at).await)?;
        let local = self.local_path().map(|base| base.join(path));
        Ok(Upload::new(inner, self.backend.waiter(), self.name_of(path), local))
    }

    /// Deletes a file; a missing one is no error.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub fn delete(&self, path: &str) -> Result<()> {
        let at = self.at(path)?;
        match self.ask("delete", path, async |backend| backend.delete(&at).await) {
            Err(Error::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Like [`Store::delete`], but a store over the network that does not answer is given up after
    /// `patience`; then it is not known whether the file is still there.
    ///
    /// # Errors
    /// Like [`Store::delete`], and [`Error::Late`].
    pub fn delete_within(&self, path: &str, patience: Duration) -> Result<()> {
        let at = self.at(path)?;
        let backend = self.backend.get()?;
        let asked = match self.backend.waiter() {
            Waiter::Here => Waiter::Here.wait(backend.delete(&at))?,
            Waiter::Runtime => {
                let late = || Error::Late { action: "delete", path: self.name_of(path), patience };
                let timed = async { tokio::time::timeout(patience, backend.delete(&at)).await };
                Waiter::Runtime.wait(timed)?.map_err(|_| late())?
            }
        };
        match asked.map_err(self.fail("delete", path)) {
            Err(Error::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Deletes everything below `path`, directories too; returns how many files that were.
    ///
    /// # Errors
    /// Like [`Store::write`]; some files may be gone by then.
    pub fn delete_all(&self, path: &str) -> Result<usize> {
        let entries = self.list(path)?;
        self.delete_files(path, entries.iter().map(|entry| entry.path.as_str()))?;
        match &self.location {
            Location::Local(base) => {
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
            Location::Remote { service: Service::Hdfs, .. } => self.remove_directories(path)?,
            Location::Memory { .. } | Location::Remote { .. } => {}
        }
        Ok(entries.len())
    }

    /// Deletes several files below `path`; missing ones are no error.
    pub(crate) fn delete_files<'a>(
        &self,
        path: &str,
        files: impl Iterator<Item = &'a str>,
    ) -> Result<()> {
        let paths = files.map(|file| self.at(file)).collect::<Result<Vec<_>>>()?;
        self.ask("delete", path, async |backend| {
            let gone = |deleted: &object_store::Result<Path>| {
                std::future::ready(!matches!(deleted, Err(object_store::Error::NotFound { .. })))
            };
            let paths = stream::iter(paths.into_iter().map(Ok)).boxed();
            backend.delete_stream(paths).filter(gone).try_collect::<Vec<_>>().await
        })
        .map(drop)
    }

    /// Removes the directory of this store and those in it, as far as they have no files.
    pub(crate) fn remove_empty(&self) -> Result<()> {
        match &self.location {
            Location::Local(base) => local::remove_empty(base),
            Location::Remote { service: Service::Hdfs, .. } => self.remove_directories("")?,
            Location::Memory { .. } | Location::Remote { .. } => {}
        }
        Ok(())
    }

    /// Removes the directories at and below `path` that have no files, innermost first.
    fn remove_directories(&self, path: &str) -> Result<()> {
        for item in self.look(path)?.into_iter().filter(|item| item.is_directory) {
            let inner = if path.is_empty() { item.name } else { format!("{path}/{}", item.name) };
            self.remove_directories(&inner)?;
        }
        // A directory with a writer stays, as it should.
        drop(self.delete(path));
        Ok(())
    }

    /// Writes and deletes a small file.
    ///
    /// # Errors
    /// What writing here would meet.
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
