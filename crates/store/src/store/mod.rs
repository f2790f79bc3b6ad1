// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Files under one URL.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::error::{Error, Result};
use crate::location::Location;
use crate::upload::Upload;
use crate::wait::wait;

/// The memory stores of this process, by name.
static MEMORY: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Path relative to the store that was asked.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// Files under one URL; paths are relative to it, `""` is the URL itself. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
    location: Location,
    prefix: Path,
}

impl Store {
    /// Opens the store of `url`: a path, `file://`, or `memory://name/path`. Touches nothing.
    ///
    /// # Errors
    /// Text that is no URL, an unknown scheme.
    pub fn open(url: &str) -> Result<Self> {
        let location = Location::parse(url)?;
        let refuse = |_| Error::Url { url: url.to_owned(), reason: "the path cannot be a store's" };
        let (backend, prefix): (Arc<dyn ObjectStore>, Path) = match &location {
            Location::Local(path) => {
                (Arc::new(LocalFileSystem::new()), Path::from_absolute_path(path).map_err(refuse)?)
            }
            Location::Memory { name, path } => {
                let mut stores = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
                (stores.entry(name.clone()).or_default().clone(), Path::parse(path).map_err(refuse)?)
            }
        };
        Ok(Self { backend, location, prefix })
    }

    /// The store that `path` names: another URL, an absolute path, or a place below this one.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn resolve(&self, path: &str) -> Result<Self> {
        if path.starts_with('/') || path.contains(":/") { Self::open(path) } else { self.child(path) }
    }

    /// The store below this one.
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
        };
        Ok(Self { backend: Arc::clone(&self.backend), location, prefix })
    }

    /// The full URL.
    pub fn url(&self) -> String {
        self.location.url()
    }

    /// The directory, when it is on this machine's file system.
    pub fn local_path(&self) -> Option<PathBuf> {
        match &self.location {
            Location::Local(path) => Some(path.clone()),
            Location::Memory { .. } => None,
        }
    }

    /// The whole path of a file here, for messages.
    pub fn name_of(&self, path: &str) -> String {
        let whole = match &self.location {
            Location::Local(base) => base.display().to_string(),
            memory @ Location::Memory { .. } => memory.url(),
        };
        if path.is_empty() { whole } else { format!("{}/{path}", whole.trim_end_matches('/')) }
    }

    fn at(&self, path: &str) -> Result<Path> {
        let whole = if path.is_empty() { self.prefix.to_string() } else { format!("{}/{path}", self.prefix) };
        Path::parse(&whole).map_err(|_| Error::Url {
            url: self.name_of(path),
            reason: "a path without . and .. and empty parts is needed",
        })
    }

    fn fail(&self, action: &'static str, path: &str) -> impl FnOnce(object_store::Error) -> Error {
        let path = self.name_of(path);
        move |source| Error::of(action, path, source)
    }

    /// A whole file.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Refused`] and the backend's own.
    pub fn read(&self, path: &str) -> Result<Bytes> {
        let at = self.at(path)?;
        wait(async { self.backend.get(&at).await?.bytes().await }).map_err(self.fail("read", path))
    }

    /// Ranges of a file; near ones are fetched together.
    ///
    /// # Errors
    /// As [`Store::read`], and a range past the end.
    pub fn read_ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let at = self.at(path)?;
        wait(self.backend.get_ranges(&at, ranges)).map_err(self.fail("read", path))
    }

    /// Size of a file.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn size(&self, path: &str) -> Result<u64> {
        let at = self.at(path)?;
        wait(self.backend.head(&at)).map(|meta| meta.size).map_err(self.fail("look up", path))
    }

    /// Whether there is a file of this name, or anything below it.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn exists(&self, path: &str) -> Result<bool> {
        if let Location::Local(base) = &self.location {
            return Ok(if path.is_empty() { base.exists() } else { base.join(path).exists() });
        }
        match self.size(path) {
            Ok(_) => Ok(true),
            Err(Error::Missing { .. } | Error::Url { .. }) => Ok(!self.list(path)?.is_empty()),
            Err(error) => Err(error),
        }
    }

    /// Every file below `path`, sorted; none when there is no such place.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let at = self.at(path)?;
        let below = |whole: &str| {
            whole.strip_prefix(self.prefix.as_ref()).unwrap_or(whole).trim_start_matches('/').to_owned()
        };
        let mut entries: Vec<Entry> = wait(
            self.backend
                .list(Some(&at))
                .map_ok(|meta| Entry { path: below(meta.location.as_ref()), bytes: meta.size })
                .try_collect(),
        )
        .map_err(self.fail("list", path))?;
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(entries)
    }

    /// Writes a file that is seen whole or not at all.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn write(&self, path: &str, data: Bytes) -> Result<()> {
        let at = self.at(path)?;
        wait(self.backend.put(&at, data.into())).map(drop).map_err(self.fail("write", path))
    }

    /// Starts a file that is written piece by piece.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn upload(&self, path: &str) -> Result<Upload> {
        let at = self.at(path)?;
        let inner = wait(self.backend.put_multipart(&at)).map_err(self.fail("write", path))?;
        Ok(Upload::new(inner, self.name_of(path)))
    }

    /// Deletes a file; a missing one is no error.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn delete(&self, path: &str) -> Result<()> {
        let at = self.at(path)?;
        match wait(self.backend.delete(&at)).map_err(self.fail("delete", path)) {
            Err(Error::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Deletes everything below `path`, directories too; returns how many files that were.
    ///
    /// # Errors
    /// As [`Store::write`]; some files may be gone by then.
    pub fn delete_all(&self, path: &str) -> Result<usize> {
        let entries = self.list(path)?;
        for entry in &entries {
            self.delete(&entry.path)?;
        }
        if let Location::Local(base) = &self.location {
            let directory = base.join(path);
            match std::fs::remove_dir_all(&directory) {
                Err(source) if directory.is_dir() => {
                    return Err(Error::Directory { path: directory.display().to_string(), source });
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(entries.len())
    }

    /// Writes and deletes a small file.
    ///
    /// # Errors
    /// What writing here would meet.
    pub fn check_writable(&self) -> Result<()> {
        let name = format!("_writable_{}_{:?}", std::process::id(), std::thread::current().id());
        let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        self.write(&name, Bytes::new())?;
        self.delete(&name)
    }
}

#[cfg(test)]
mod tests;
