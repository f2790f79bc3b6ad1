// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Deletes the content of a directory of prepared data.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectStore as _;
use object_store::path::Path;

use super::Store;
use crate::error::Result;
use crate::local_tree::{self, DirectoryBeingCleared};
use crate::location::{StorageService, StoreLocation};
use crate::mark_names::{is_mark, may_become_mark};
use crate::prepared_files::{MANIFEST_FILE, PREPARATION_FILE};

/// Returns whether a file of prepared data is deleted before the marks.
pub(crate) fn is_content_not_mark(path: &str) -> bool {
    !is_mark(path) && path != PREPARATION_FILE
}

impl Store {
    /// Deletes everything in this directory except marks and the sign of a preparation, the
    /// manifest first, so that no reader finds a manifest without its files. Returns the number of
    /// other deleted files. Symbolic links are deleted and not followed.
    ///
    /// # Errors
    /// A directory that is itself a symbolic link; otherwise like [`Store::write`]. Some files may
    /// be deleted by then.
    pub(crate) fn delete_content_except_marks(&self) -> Result<usize> {
        if let StoreLocation::Local(base) = &self.location {
            let failed = |source| self.local_error("delete", "", source);
            let Some(directory) = DirectoryBeingCleared::open(base).map_err(failed)? else {
                return Ok(0);
            };
            directory.remove_file(MANIFEST_FILE).map_err(failed)?;
            let keeps = |name: &str, written| {
                if local_tree::is_staged_name(name) {
                    may_become_mark(name, || written)
                } else {
                    !is_content_not_mark(name)
                }
            };
            return directory.remove_content(keeps).map_err(failed);
        }
        self.delete(MANIFEST_FILE)?;
        let entries = self.list("")?;
        let files: Vec<&str> = entries
            .iter()
            .map(|entry| &*entry.path)
            .filter(|path| is_content_not_mark(path))
            .collect();
        self.delete_files("", files.iter().copied())?;
        for item in self.list_directory("")?.into_iter().filter(|item| item.is_directory) {
            self.delete_all(&item.name)?;
        }
        self.remove_partial_uploads()?;
        Ok(files.len())
    }

    /// Returns an error if this directory is a symbolic link, before anything is written to it.
    ///
    /// # Errors
    /// A link, or a file system that cannot be asked.
    pub(crate) fn check_not_symlink(&self) -> Result<()> {
        let StoreLocation::Local(base) = &self.location else { return Ok(()) };
        DirectoryBeingCleared::open(base)
            .map(drop)
            .map_err(|source| self.local_error("delete", "", source))
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

    /// Removes the directory of this store if it is empty. On HDFS the directories in it count as
    /// empty if they contain no files.
    pub(crate) fn remove_empty_directory(&self) -> Result<()> {
        match &self.location {
            // It fails if another process has written a file there, which stays.
            StoreLocation::Local(base) => drop(std::fs::remove_dir(base)),
            StoreLocation::Remote { service: StorageService::Hdfs, .. } => {
                self.remove_directories("")?
            }
            StoreLocation::Memory { .. } | StoreLocation::Remote { .. } => {}
        }
        Ok(())
    }
}
