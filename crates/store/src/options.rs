// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Credentials and endpoints that a user has set for a location. They are never shown.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use arc_swap::ArcSwap;

/// Options as the user wrote them. Names of fsspec's file systems and of `object_store` are both
/// accepted.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendOptions(pub BTreeMap<String, String>);

impl fmt::Debug for BackendOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.keys().map(|key| (key, "***"))).finish()
    }
}

/// Options from `configure_options`, by URL prefix.
///
/// A forked child keeps them, and reads take no lock that its parent may have held.
static CONFIGURED_OPTIONS: LazyLock<ArcSwap<BTreeMap<String, BackendOptions>>> =
    LazyLock::new(ArcSwap::default);

/// Sets the options with which this process opens every store at or below `prefix`. The longest
/// matching prefix decides, and a later call for the same prefix replaces the earlier one. Stores
/// are opened by URL in many places and processes, so this is the only way to pass options.
pub fn configure_options(prefix: &str, options: BackendOptions) {
    let prefix = prefix.trim_end_matches('/');
    CONFIGURED_OPTIONS.rcu(|configured| {
        let mut configured = BTreeMap::clone(configured);
        configured.insert(prefix.to_owned(), options.clone());
        configured
    });
}

/// Returns the options that were set for `url`, by the names that were given.
pub fn configured_options(url: &str) -> BackendOptions {
    options_for_url(url)
}

/// Returns the options of `url`; empty if none were set.
pub(crate) fn options_for_url(url: &str) -> BackendOptions {
    let configured = CONFIGURED_OPTIONS.load();
    let holds = |prefix: &str| {
        // `s3://data-old` does not lie below `s3://data`.
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
        let options =
            |value: &str| BackendOptions([("secret".to_owned(), value.to_owned())].into());
        configure_options("s3://options/", options("outer"));
        configure_options("s3://options/inner", options("inner"));
        assert_eq!(options_for_url("s3://options/x"), options("outer"));
        assert_eq!(options_for_url("s3://options/inner"), options("inner"));
        assert_eq!(options_for_url("s3://options-of-others/x"), BackendOptions::default());
        assert_eq!(format!("{:?}", options("hidden")), r#"{"secret": "***"}"#);
    }
}
