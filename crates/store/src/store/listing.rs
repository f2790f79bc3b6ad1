// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Looks into directories: single items, direct content, and everything below.

use std::time::SystemTime;

use futures::TryStreamExt as _;
use object_store::{ObjectStore as _, ObjectStoreExt as _};

use super::{DirectoryItem, Store, local_file_path};
use crate::error::{Error, Result};
use crate::file_entry::FileEntry;
use crate::location::StoreLocation;
use crate::{local_files, local_tree};

impl Store {
    /// Returns the item at `path`.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none; otherwise like [`Store::read`].
    pub fn stat(&self, path: &str) -> Result<DirectoryItem> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            let found = match std::fs::metadata(local_file_path(base, path)) {
                Ok(found) if found.is_dir() => return Ok(DirectoryItem::from_directory_path(&at)),
                Ok(_) => local_files::file_metadata(&local_file_path(base, path)),
                Err(error) => Err(error),
            };
            let found = found.map_err(|source| self.local_error("look up", path, source))?;
            return Ok(DirectoryItem::from_local(&at, &found));
        }
        match self.ask_backend("look up", path, async |backend| backend.head(&at).await) {
            Ok(meta) => Ok(DirectoryItem::from_meta(&meta)),
            Err(missing @ Error::Missing { .. }) => {
                // Object stores have no directories: a name is one if files lie below it.
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
    /// A backend that cannot be asked; a symbolic link to a directory, whose files would be
    /// missing in the listing.
    pub fn list(&self, path: &str) -> Result<Vec<FileEntry>> {
        let (files, links) = self.list_with_links(path)?;
        match links.first() {
            None => Ok(files),
            Some(link) => Err(Error::LinkedDirectory { path: self.display_path(link) }),
        }
    }

    /// Returns all files below `path`, sorted by path, and the symbolic links to directories, which
    /// are not followed. Only file systems have such links.
    ///
    /// # Errors
    /// A backend that cannot be asked.
    pub fn list_with_links(&self, path: &str) -> Result<(Vec<FileEntry>, Vec<String>)> {
        let at = self.object_path(path)?;
        if let StoreLocation::Local(base) = &self.location {
            let tree = local_tree::list_tree(&local_file_path(base, path))
                .map_err(|source| self.local_error("list", path, source))?;
            let below = |inner: String| {
                if path.is_empty() { inner } else { format!("{path}/{inner}") }
            };
            let files = tree.files.into_iter();
            let files = files.map(|file| FileEntry { path: below(file.path), ..file }).collect();
            return Ok((files, tree.linked_directories.into_iter().map(below).collect()));
        }
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
        // `object_store` promises no order of a listing, and all processes must see the same one.
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok((entries, Vec::new()))
    }

    /// Returns the paths of entries that no listing shows, such as unfinished uploads. Only local
    /// file systems have some.
    ///
    /// # Errors
    /// Like [`Store::list`].
    pub(crate) fn list_hidden(&self) -> Result<Vec<String>> {
        let StoreLocation::Local(base) = &self.location else { return Ok(Vec::new()) };
        let tree = local_tree::list_tree(base);
        tree.map(|tree| tree.hidden).map_err(|source| self.local_error("list", "", source))
    }
}
