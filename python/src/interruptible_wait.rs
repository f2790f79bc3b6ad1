// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Lets Python wait for Rust: without the GIL, in slices, so that Ctrl-C gets through, and never
//! past a deadline.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The longest time between two looks at Python's signals.
// A user who presses Ctrl-C notices no delay, and ten wake-ups a second cost nothing.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `wait` with slices of time, the GIL released, until `wait` returns a value or `deadline`
/// passes (then `None`).
///
/// `wait` blocks at most for the given time and returns `None` if that was not enough.
///
/// # Errors
/// `KeyboardInterrupt`, or another exception of a signal handler, between two slices; an error of
/// `wait` at once.
pub(crate) fn wait_interruptibly<T: Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    mut wait: impl FnMut(Duration) -> PyResult<Option<T>> + Send,
) -> PyResult<Option<T>> {
    loop {
        let slice = match deadline {
            Some(deadline) => {
                SIGNAL_CHECK_INTERVAL.min(deadline.saturating_duration_since(Instant::now()))
            }
            None => SIGNAL_CHECK_INTERVAL,
        };
        if let Some(value) = py.detach(|| wait(slice))? {
            return Ok(Some(value));
        }
        // After the wait: a result that is there is returned, and the signal is handled by the next
        // call.
        py.check_signals()?;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}
