// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The names of the files by which processes mark a directory.

use std::time::{Duration, SystemTime};

/// Start of the name of the mark of the process that writes.
pub(crate) const LEASE: &str = "_lease-";

/// Start of the name of the mark of a process that reads.
pub(crate) const USE: &str = "_use-";

/// Time for which a file without content counts: it may just be about to be written.
pub(crate) const WRITING: Duration = Duration::from_secs(60);

/// Returns whether a file has the name of a mark, or of one that is being written.
pub(crate) fn is_mark(name: &str) -> bool {
    [LEASE, USE].iter().any(|kind| name.starts_with(kind))
}

/// Returns whether a file with the name of an upload before its end may become a mark. A process
/// writes its mark before it looks whether others have the directory.
pub(crate) fn may_be_coming(name: &str, written: impl Fn() -> Option<SystemTime>) -> bool {
    let young = |time: SystemTime| time.elapsed().map_or(true, |age| age < WRITING);
    is_mark(name) && written().is_some_and(young)
}
