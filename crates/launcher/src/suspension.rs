// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A request to the ranks of a job: to commit their state to a store, and to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Kind of the record by which rank 0 reports its commit; the same in
/// `farandole.common.suspension`.
pub const SUSPENSION_RECORD_KIND: &str = "suspended";

/// Key of the value by which ranks learn of the request; the same in
/// `farandole.common.suspension`.
pub(crate) const SUSPENSION_KEY: &str = "farandole/suspend";

/// A request to suspend one job. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SuspensionRequest(Arc<AtomicBool>);

impl SuspensionRequest {
    /// Requests the suspension. Further calls change nothing.
    pub fn request_suspension(&self) {
        // The flag orders nothing else.
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the suspension was requested.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
