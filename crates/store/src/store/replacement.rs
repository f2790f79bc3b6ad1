// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Replaces the content of a file that must not be created again if another process has deleted it.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, UpdateVersion};

use super::Store;
use crate::error::{Error, Result};
use crate::location::StoreLocation;

/// The outcome of [`Store::replace_existing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileReplacement {
    Replaced,
    /// The file is missing, or has changed meanwhile, or `edit` has refused its content.
    Refused,
    /// The file was written, and the service could not check that it still existed.
    Unconditional,
}

impl Store {
    /// Replaces the content of a small file by the result of `edit`. A file that is deleted before
    /// the new content is written stays deleted, if the service can check that.
    ///
    /// On a local file system the content is replaced in place, so a reader may see a part of it.
    ///
    /// # Errors
    /// Like [`Store::write`].
    pub(crate) fn replace_existing(
        &self,
        path: &str,
        edit: impl FnOnce(&[u8]) -> Result<Option<Bytes>>,
    ) -> Result<FileReplacement> {
        if let StoreLocation::Local(base) = &self.location {
            return self.replace_local_file(&base.join(path), path, edit);
        }
        let at = self.object_path(path)?;
        let read = async |backend: Arc<dyn ObjectStore>| {
            let found = backend.get(&at).await?;
            let version = UpdateVersion {
                e_tag: found.meta.e_tag.clone(),
                version: found.meta.version.clone(),
            };
            Ok((version, found.bytes().await?))
        };
        let (version, text) = match self.ask_backend("read", path, read) {
            Err(Error::Missing { .. }) => return Ok(FileReplacement::Refused),
            other => other?,
        };
        let Some(data) = edit(&text)? else { return Ok(FileReplacement::Refused) };
        let put = async |backend: Arc<dyn ObjectStore>| {
            let mode = PutMode::Update(version);
            match backend.put_opts(&at, data.clone().into(), mode.into()).await {
                Ok(_) => Ok(FileReplacement::Replaced),
                Err(
                    object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. },
                ) => Ok(FileReplacement::Refused),
                // HDFS has no conditional write.
                Err(
                    object_store::Error::NotImplemented { .. }
                    | object_store::Error::NotSupported { .. },
                ) => backend.put(&at, data.into()).await.map(|_| FileReplacement::Unconditional),
                Err(error) => Err(error),
            }
        };
        self.ask_backend("write", path, put)
    }

    fn replace_local_file(
        &self,
        file_path: &Path,
        path: &str,
        edit: impl FnOnce(&[u8]) -> Result<Option<Bytes>>,
    ) -> Result<FileReplacement> {
        let failed = |source| self.local_error("write", path, source);
        // Opened without creating it: if it is deleted meanwhile, the write has no effect.
        let mut file = match File::options().read(true).write(true).open(file_path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(FileReplacement::Refused);
            }
            Err(error) => return Err(failed(error)),
        };
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut file, &mut text).map_err(failed)?;
        let Some(data) = edit(&text)? else { return Ok(FileReplacement::Refused) };
        let mut write = || {
            std::io::Seek::rewind(&mut file)?;
            file.write_all(&data)?;
            // After the write, so that no reader sees an empty mark.
            file.set_len(data.len() as u64)?;
            file.sync_all()?;
            // A file without a name was deleted meanwhile, and the written content is lost.
            let links = std::os::unix::fs::MetadataExt::nlink(&file.metadata()?);
            Ok(if links == 0 { FileReplacement::Refused } else { FileReplacement::Replaced })
        };
        write().map_err(failed)
    }
}
