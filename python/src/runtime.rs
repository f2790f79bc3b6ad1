// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lets Python wait for Rust: without the GIL, in slices, so that Ctrl-C gets through, and never
//! past a deadline.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The longest time between two looks at Python's signals.
const SLICE: Duration = Duration::from_millis(100);

/// Calls `wait` with slices of time, the GIL released, until it has something or `deadline` passes
/// (then `None`).
///
/// `wait` blocks for at most the time it is given and returns `None` when that was not enough.
///
/// # Errors
/// `KeyboardInterrupt`, or whatever else a signal handler raises, between two slices; `wait`'s own
/// error at once.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    mut wait: impl FnMut(Duration) -> PyResult<Option<T>> + Send,
) -> PyResult<Option<T>> {
    loop {
        let slice = match deadline {
            Some(deadline) => SLICE.min(deadline.saturating_duration_since(Instant::now())),
            None => SLICE,
        };
        if let Some(value) = py.detach(|| wait(slice))? {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}
