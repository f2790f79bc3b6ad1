// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All settings (knobs) in one registry: name, alias, flag, type, default, documentation, whether
//! workers inherit it.
//!
//! This crate is the only one that reads the environment; reading the environment anywhere else is
//! a lint error. The crate that uses a value decides on its meaning.
//! `docs/reference/configuration.md` is generated from [`KNOBS`].
//!
//! ```text
//! argument ──────────┐
//! FARANDOLE_X ───────┤
//! HOROVOD_X ─────────┼─> KNOBS: name, alias, flag, type ── parse ──> Config: the value of each knob, or an error
//! default of a knob ─┘      ├─> docs/reference/configuration.md, flags of `farandole run`
//!                           └─> python/farandole/_variables.py, with JOB_VARIABLES
//! ```
//!
//! Invariants:
//! - `C-1`: `FARANDOLE_X` has priority over `HOROVOD_X`, and an argument over both.
//! - `C-2`: a value that does not parse is an error naming the variable and the value, never a
//!   silent default.

mod job_variables;
mod knobs;
mod value;

pub use job_variables::{JOB_VARIABLES, JobVariable};
pub use knobs::{Config, KNOBS, KnobDefinition};
pub use value::{
    AnyKnobValue, GradientConvention, HostCooldownRange, KnobError, KnobValue, LogLevel, PortRange,
};

/// Prefix of our variables.
pub const FARANDOLE_PREFIX: &str = "FARANDOLE_";
/// Prefix under which Horovod's scripts know the same knobs.
pub const HOROVOD_PREFIX: &str = "HOROVOD_";

/// Returns all variables of this process's environment whose names and values are text, for
/// launchers that hand them on.
pub fn environment_variables() -> impl Iterator<Item = (String, String)> {
    // Not `vars`, which panics at a variable that is not UTF-8.
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Returns one variable of this process's environment, by its exact name: for names that are not
/// knobs (`CONTAINER_ID`, `RANK`). Empty values count as unset.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub fn environment_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
