// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Files as listings describe them.

use std::time::SystemTime;

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
