// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Distinguishes prepared data from files of users: only files that a preparation has named may be
//! deleted.
//!
//! The mark of a preparation is a file in the directory of the training data: `_preparation.json`
//! from its begin to its end, then `_manifest.json`, which names the files. The directory of the
//! validation data has its own manifest at the end.

use std::collections::HashSet;

use bytes::Bytes;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::hdfs_retry::is_partial_upload;
use crate::local_tree::final_name;
use crate::mark_names::is_mark;
use crate::store::Store;

/// File that names the files of complete data.
pub(crate) const MANIFEST_FILE: &str = "_manifest.json";
/// Mark of a preparation that has not ended.
pub(crate) const PREPARATION_FILE: &str = "_preparation.json";
/// Further files of a preparation: the time of the last use, statistics, encodings.
const OTHER_PREPARED_FILES: [&str; 3] = ["_used.json", "_statistics.json", "_encoding.json"];
/// Fewest digits of a partition's number in the name of its part.
const MIN_PARTITION_DIGITS: usize = 5;
/// Prefix of the notes about finished partitions.
const FINISHED_PARTITION_PREFIX: &str = "_done-";

/// The fields by which a manifest of ours is recognized.
#[derive(Deserialize)]
struct ManifestNames {
    #[serde(rename = "fingerprint")]
    _fingerprint: String,
    files: Vec<NamedFile>,
}

#[derive(Deserialize)]
struct NamedFile {
    path: String,
}

/// Returns the names in the manifest of a directory; `None` if it has no manifest of ours.
fn manifest_names(directory: &Store) -> Result<Option<HashSet<String>>> {
    match directory.read(MANIFEST_FILE) {
        // A manifest of another program has other fields, and its files are not ours.
        Ok(text) => Ok(serde_json::from_slice::<ManifestNames>(&text)
            .ok()
            .map(|manifest| manifest.files.into_iter().map(|file| file.path).collect())),
        Err(Error::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the whole path of a file that no preparation wrote in the directories of a set; `None`
/// if the set may be emptied. A directory that does not exist is empty.
///
/// # Errors
/// A backend that does not answer.
pub fn find_foreign_file(train: &Store, val: &Store) -> Result<Option<String>> {
    let unfinished = match train.read(PREPARATION_FILE) {
        Ok(_) => true,
        Err(Error::Missing { .. }) => false,
        Err(error) => return Err(error),
    };
    for directory in [train, val] {
        if let Some(path) = foreign_file_of(directory, unfinished)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Returns the first file of a directory that no manifest names and that is not the work of an
/// unfinished preparation. Links and files that listings hide count, too, and the directory itself
/// if it is a link.
///
/// # Errors
/// A backend that does not answer.
pub(crate) fn foreign_file_of(directory: &Store, unfinished: bool) -> Result<Option<String>> {
    if directory.is_link("")? {
        return Ok(Some(directory.display_path("")));
    }
    let names = manifest_names(directory)?;
    let is_marked = names.is_some() || unfinished;
    let named = |path: &str| {
        let by_manifest = names.as_ref().is_some_and(|names| names.contains(path));
        let kept_beside = path == MANIFEST_FILE && names.is_some()
            || path == PREPARATION_FILE
            || OTHER_PREPARED_FILES.contains(&path)
            || path.starts_with(FINISHED_PARTITION_PREFIX) && path.ends_with(".json");
        let part = unfinished && is_prepared_part_name(path);
        is_mark(path)
            || is_marked && (by_manifest || kept_beside || part || is_partial_upload(path))
    };
    let (files, links) = directory.list_with_links("")?;
    let hidden = directory.list_hidden()?;
    let is_ours = |path: &&String| match final_name(path) {
        // The manifest is written last, when nothing names it yet.
        Some(MANIFEST_FILE) => is_marked,
        Some(path) => named(path),
        None => false,
    };
    let foreign = files.iter().map(|file| &file.path).find(|path| !named(path));
    let foreign = foreign.or(links.first()).or(hidden.iter().find(|path| !is_ours(path)));
    Ok(foreign.map(|path| directory.display_path(path)))
}

/// Returns whether a preparation gives a part this name: `part-00007-` and the text of its attempt.
pub fn is_prepared_part_name(path: &str) -> bool {
    let parts = path.strip_prefix("part-").and_then(|rest| rest.strip_suffix(".parquet"));
    parts.and_then(|rest| rest.split_once('-')).is_some_and(|(number, attempt)| {
        number.len() >= MIN_PARTITION_DIGITS
            && number.bytes().all(|byte| byte.is_ascii_digit())
            && !attempt.is_empty()
            && !path.contains('/')
    })
}

/// Marks a directory as one whose content is being deleted, so that a later sweep may continue.
///
/// # Errors
/// A backend that does not answer or does not write.
pub(crate) fn mark_deletion_in_progress(directory: &Store) -> Result<()> {
    let text = r#"{"key": "once deleted", "time": 0}"#;
    match directory.write(PREPARATION_FILE, Bytes::from_static(text.as_bytes())) {
        // A full disk has room for an empty file, and the deletion makes room.
        Err(error) if error.is_no_space() => directory.write(PREPARATION_FILE, Bytes::new()),
        other => other,
    }
}
