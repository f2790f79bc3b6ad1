// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Credentials and endpoints that a user gave for a place. They are never shown.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Key and value as the user wrote them: the names of fsspec's file systems and of `object_store`
/// both work.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Options(pub BTreeMap<String, String>);

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.keys().map(|key| (key, "***"))).finish()
    }
}

/// The options from `configure`, by URL prefix.
static CONFIGURED: LazyLock<Mutex<BTreeMap<String, Options>>> = LazyLock::new(Mutex::default);

/// From now on this process opens every store at or below `prefix` with `options`; the longest
/// prefix counts, the last word about a prefix too. Stores are opened by URL in many places and
/// processes: this is the one way options travel.
pub fn configure(prefix: &str, options: Options) {
    let mut configured = CONFIGURED.lock().unwrap_or_else(PoisonError::into_inner);
    configured.insert(prefix.trim_end_matches('/').to_owned(), options);
}

/// Returns the options of `url`; empty if none were set.
pub(crate) fn of(url: &str) -> Options {
    let configured = CONFIGURED.lock().unwrap_or_else(PoisonError::into_inner);
    let holds = |prefix: &str| {
        url.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let longest = configured
        .iter()
        .filter(|(prefix, _)| holds(prefix))
        .max_by_key(|(prefix, _)| prefix.len());
    longest.map(|(_, options)| options.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_counts_and_nothing_is_shown() {
        let options = |value: &str| Options([("secret".to_owned(), value.to_owned())].into());
        configure("s3://options/", options("outer"));
        configure("s3://options/inner", options("inner"));
        assert_eq!(of("s3://options/x"), options("outer"));
        assert_eq!(of("s3://options/inner"), options("inner"));
        assert_eq!(of("s3://options-of-others/x"), Options::default());
        assert_eq!(format!("{:?}", options("hidden")), r#"{"secret": "***"}"#);
    }
}
