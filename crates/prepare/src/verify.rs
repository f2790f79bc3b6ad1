// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks that files have not changed since they were written.

use farandole_dataset::{DataFile, Manifest};
use farandole_store::Store;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::spec::PrepareSpec;
use crate::summary::PartitionSummary;

/// Bytes that are read at once.
// Files may be larger than the memory of the driver.
const READ_CHUNK_BYTES: u64 = 8 << 20;

/// Result of a verification.
#[derive(Debug, Default)]
pub struct VerificationReport {
    /// Number of files.
    pub files: usize,
    /// Bytes of the files.
    pub bytes: u64,
    /// A sentence for each file that has changed.
    pub problems: Vec<String>,
}

/// Reads every file of a manifest and compares its size and checksum.
///
/// # Errors
/// The store's. A missing file is not an error, but a problem in the report.
pub fn verify_files(store: &Store, manifest: &Manifest) -> Result<VerificationReport> {
    // Files of other writers stay in their directory, and the manifest is in another one.
    let store = manifest.base.as_deref().map_or_else(|| Ok(store.clone()), Store::open)?;
    let mut verified = VerificationReport::default();
    for file in &manifest.files {
        verified.files += 1;
        verified.bytes += file.bytes;
        match check_file_checksum(&store, file) {
            Ok(()) => {}
            // Continues, so that the report names all damaged files.
            Err(problem @ (Error::Altered { .. } | Error::Damaged { .. })) => {
                verified.problems.push(problem.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(verified)
}

/// Returns whether the files of a finished partition exist, with unchanged content.
///
/// # Errors
/// An invalid specification, and the store's errors.
pub fn is_partition_complete(url: &str, spec: &str, part: &PartitionSummary) -> Result<bool> {
    let (store, spec) = (Store::open(url)?, PrepareSpec::parse_json(spec)?);
    let sides = [(Some(&spec.train), &part.train), (spec.val.as_ref(), &part.val)];
    for (path, side) in sides {
        let (Some(path), Some(side)) = (path, side) else { continue };
        match check_file_checksum(&store.resolve_path(path)?, &side.file) {
            Ok(()) => {}
            // Not an error: the caller writes the partition again.
            Err(Error::Altered { .. } | Error::Damaged { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn check_file_checksum(store: &Store, file: &DataFile) -> Result<()> {
    // The size comes first, because it does not need the content.
    check_file_size(store, file)?;
    let Some(expected) = &file.checksum else { return Ok(()) };
    let mut hash = Xxh3::new();
    let mut start = 0;
    while start < file.bytes {
        let range = start..file.bytes.min(start + READ_CHUNK_BYTES);
        start = range.end;
        for piece in store.read_ranges(&file.path, std::slice::from_ref(&range))? {
            hash.update(&piece);
        }
    }
    let found = format!("{:016x}", hash.digest());
    if found == *expected {
        return Ok(());
    }
    Err(Error::Damaged { path: store.display_path(&file.path), found, expected: expected.clone() })
}

/// Checks that the file has its written size.
pub(crate) fn check_file_size(store: &Store, file: &DataFile) -> Result<()> {
    let found = match store.size(&file.path) {
        Ok(bytes) => bytes,
        Err(farandole_store::Error::Missing { .. }) => 0,
        Err(error) => return Err(error.into()),
    };
    if found == file.bytes {
        return Ok(());
    }
    Err(Error::Altered { path: store.display_path(&file.path), found, expected: file.bytes })
}
