// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A token that ends the calls of a client.

use std::sync::Arc;

use tokio::sync::watch;

/// A token that ends the waits of all its clones, from any thread.
#[derive(Clone, Debug)]
pub struct CancellationToken(Arc<watch::Sender<bool>>);

impl CancellationToken {
    /// Creates a token that is not cancelled.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Makes current and later calls fail with `Closed`.
    pub fn cancel_calls(&self) {
        self.0.send_replace(true);
    }

    pub(super) async fn wait_cancelled(&self) {
        // The sender lives in `self`, so only the condition ends the wait.
        drop(self.0.subscribe().wait_for(|cancelled| *cancelled).await);
    }
}

impl Default for CancellationToken {
    fn default() -> Self {
        Self::new()
    }
}
