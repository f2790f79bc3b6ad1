// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All settings (knobs) in one registry: name, alias, flag, type, default, documentation, whether
//! workers inherit it.
//!
//! Owns the reading of the environment; reading it anywhere else is a lint error. The crate that
//! uses a value decides what it means. `docs/reference/configuration.md` is generated from
//! [`KNOBS`].
//!
//! ```text
//! argument ──────────┐
//! FARANDOLE_X ───────┤
//! HOROVOD_X ─────────┼─> KNOBS: name, alias, flag, type ── parse ──> Config: the value of each knob, or an error
//! default of a knob ─┘      └─> docs/reference/configuration.md, flags of `farandole run`
//! ```
//!
//! Invariants:
//! - `C-1`: `FARANDOLE_X` has priority over `HOROVOD_X`, and an argument over both.
//! - `C-2`: a value that does not parse is an error naming the variable and the value, never a
//!   silent default.

mod knobs;
mod value;

pub use knobs::{Config, KNOBS, Knob};
pub use value::{Cooldown, Error, Gradients, LogLevel, PortRange, Value};

/// Prefix of our variables.
pub const PREFIX: &str = "FARANDOLE_";
/// Prefix under which Horovod's scripts know the same knobs.
pub const HOROVOD_PREFIX: &str = "HOROVOD_";

/// Returns all variables of this process's environment whose names and values are text, for
/// launchers that hand them on.
pub fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Returns one variable of this process's environment, by its exact name: for names that are not
/// knobs (`CONTAINER_ID`, `RANK`). Empty values count as unset.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
