// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The variables of the environment by which a provider's credentials are found.

use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Runs a function while no other thread changes the environment.
type EnvironmentGuard = fn(&mut dyn FnMut());

static ENVIRONMENT_GUARD: OnceLock<EnvironmentGuard> = OnceLock::new();

/// Sets the guard under which threads of this crate read the environment. An interpreter that
/// changes variables while other threads read them needs one: the C library has no lock for this.
pub fn set_environment_guard(guard: EnvironmentGuard) {
    // The first guard stays, and every caller has the same one.
    ENVIRONMENT_GUARD.get_or_init(|| guard);
}

/// Variables of the environment.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct SourceEnvironment(pub(crate) BTreeMap<String, String>);

impl SourceEnvironment {
    /// Reads the variables with these prefixes, and `HOME`.
    pub(crate) fn read(prefixes: &[&str]) -> Self {
        let mut found = BTreeMap::new();
        let mut read = || {
            // An empty variable counts as one that is not set.
            found = farandole_config::environment_variables()
                .filter(|(name, value)| {
                    let known = prefixes.iter().any(|prefix| name.starts_with(prefix));
                    (known || name == "HOME") && !value.is_empty()
                })
                .collect();
        };
        match ENVIRONMENT_GUARD.get() {
            Some(guard) => guard(&mut read),
            None => read(),
        }
        Self(found)
    }

    /// Returns a variable.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Returns a path with the home directory instead of a leading `~`.
    pub(crate) fn expand_home(&self, path: &str) -> String {
        match (path.strip_prefix("~/"), self.get("HOME")) {
            (Some(rest), Some(home)) => format!("{home}/{rest}"),
            _ => path.to_owned(),
        }
    }
}
