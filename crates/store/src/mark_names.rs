// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Names of the files with which processes mark a directory as used.

use std::time::{Duration, SystemTime};

/// Prefix of the name of a writer's mark.
pub(crate) const LEASE_PREFIX: &str = "_lease-";

/// Prefix of the name of a reader's mark.
pub(crate) const USE_PREFIX: &str = "_use-";

/// Prefix of the name of a file that shows the present time by the store's clock.
pub(crate) const CLOCK_PREFIX: &str = "_clock-";

/// Time for which a mark without content is valid, because its content may be about to be written.
pub(crate) const EMPTY_MARK_LIFETIME: Duration = Duration::from_secs(60);

/// Returns whether a file has the name of a mark, complete or being written.
pub(crate) fn is_mark(name: &str) -> bool {
    [LEASE_PREFIX, USE_PREFIX, CLOCK_PREFIX].iter().any(|kind| name.starts_with(kind))
}

/// Returns whether an unfinished upload may become a mark. Such a file must be kept, because a
/// process writes its mark before it checks for other marks.
pub(crate) fn may_become_mark(name: &str, written: impl Fn() -> Option<SystemTime>) -> bool {
    let young = |time: SystemTime| time.elapsed().map_or(true, |age| age < EMPTY_MARK_LIFETIME);
    is_mark(name) && written().is_some_and(young)
}
