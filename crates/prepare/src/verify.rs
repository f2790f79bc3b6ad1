// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks that files have not changed since they were written.

use farandole_dataset::{DataFile, Manifest};
use farandole_store::Store;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::spec::Spec;
use crate::summary::Summary;

/// Bytes that are read at once.
const PIECE: u64 = 8 << 20;

/// The verified files, and the problems that were found.
#[derive(Debug, Default)]
pub struct Verified {
    /// Files.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// A sentence for each file that is not what it was.
    pub problems: Vec<String>,
}

/// Reads every file of a manifest and compares its size and checksum.
///
/// # Errors
/// The store's, but for files that are missing.
pub fn verify(store: &Store, manifest: &Manifest) -> Result<Verified> {
    let store = manifest.base.as_deref().map_or_else(|| Ok(store.clone()), Store::open)?;
    let mut verified = Verified::default();
    for file in &manifest.files {
        verified.files += 1;
        verified.bytes += file.bytes;
        match check(&store, file) {
            Ok(()) => {}
            Err(problem @ (Error::Altered { .. } | Error::Damaged { .. })) => {
                verified.problems.push(problem.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(verified)
}

/// Returns whether the files of a finished partition are there, with all their bytes.
///
/// # Errors
/// A specification that cannot be, and the store's.
pub fn is_whole(url: &str, spec: &str, part: &Summary) -> Result<bool> {
    let (store, spec) = (Store::open(url)?, Spec::parse(spec)?);
    let sides = [(Some(&spec.train), &part.train), (spec.val.as_ref(), &part.val)];
    for (path, side) in sides {
        let (Some(path), Some(side)) = (path, side) else { continue };
        match check(&store.resolve(path)?, &side.file) {
            Ok(()) => {}
            Err(Error::Altered { .. } | Error::Damaged { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn check(store: &Store, file: &DataFile) -> Result<()> {
    size(store, file)?;
    let Some(expected) = &file.checksum else { return Ok(()) };
    let mut hash = Xxh3::new();
    let mut start = 0;
    while start < file.bytes {
        let range = start..file.bytes.min(start + PIECE);
        start = range.end;
        for piece in store.read_ranges(&file.path, std::slice::from_ref(&range))? {
            hash.update(&piece);
        }
    }
    let found = format!("{:016x}", hash.digest());
    if found == *expected {
        return Ok(());
    }
    Err(Error::Damaged { path: store.name_of(&file.path), found, expected: expected.clone() })
}

/// The file must have as many bytes as its writer left.
pub(crate) fn size(store: &Store, file: &DataFile) -> Result<()> {
    let found = match store.size(&file.path) {
        Ok(bytes) => bytes,
        Err(farandole_store::Error::Missing { .. }) => 0,
        Err(error) => return Err(error.into()),
    };
    if found == file.bytes {
        return Ok(());
    }
    Err(Error::Altered { path: store.name_of(&file.path), found, expected: file.bytes })
}
