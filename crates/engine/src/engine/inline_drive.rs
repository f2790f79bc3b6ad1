// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Submission with a short time of help: the submitting thread drives for a moment. If the
//! operation completes in that time, no other thread is needed.

use std::time::Instant;

use super::Engine;
use crate::callbacks::CompletionCallback;
use crate::{CollectiveRequest, RequestCompletion, RequestHandle, Result};

impl Engine {
    /// Submits requests, several as one group, and drives the engine on this thread for a moment.
    /// Returns the results if all are complete by then. Otherwise returns `None`: the engine's own
    /// threads complete the operations, and the results go to the callbacks that `later` creates,
    /// one for each request. After several failed attempts, help is given less often.
    ///
    /// # Errors
    /// Like [`Engine::submit_group`]; `later` is not called then.
    pub fn submit_and_drive_briefly(
        &self,
        requests: Vec<CollectiveRequest>,
        later: impl FnOnce() -> Vec<CompletionCallback>,
    ) -> Result<Option<Vec<Result<RequestCompletion>>>> {
        self.check_original_process()?;
        // Before the submission: after it, the results would have no thread for their callbacks.
        self.inner.callbacks.start_callback_thread_if_needed()?;
        let handles = self.admit_group(requests, Vec::new())?;
        let budget = self.help_backoff.next_inline_drive_budget();
        let results = if budget.is_zero() {
            self.inner.announce_submission();
            // Counts the call, so that help is tried again after RETRY_HELP_EVERY calls.
            self.help_backoff.record_drive_outcome(false);
            Vec::new()
        } else {
            self.inner.announce_before_wait();
            let results = self.wait_for_results_until(&handles, Instant::now() + budget);
            self.help_backoff.record_drive_outcome(results.len() == handles.len());
            results
        };
        if results.len() == handles.len() {
            return Ok(Some(results));
        }
        self.deliver_or_attach_callbacks(&handles, results, later());
        Ok(None)
    }

    /// Returns results in order, up to the first that is not complete by `end`.
    fn wait_for_results_until(
        &self,
        handles: &[RequestHandle],
        end: Instant,
    ) -> Vec<Result<RequestCompletion>> {
        let mut results = Vec::with_capacity(handles.len());
        for handle in handles {
            match self.wait(*handle, end.saturating_duration_since(Instant::now())).transpose() {
                Some(result) => results.push(result),
                None => break,
            }
        }
        results
    }

    /// Passes `results` to the first callbacks, and attaches the others to the remaining handles.
    pub(super) fn deliver_or_attach_callbacks(
        &self,
        handles: &[RequestHandle],
        results: Vec<Result<RequestCompletion>>,
        callbacks: Vec<CompletionCallback>,
    ) {
        let mut callbacks = callbacks.into_iter();
        let left = &handles[results.len()..];
        // Zip from `results`, which may be shorter: zipping from `callbacks` would consume one
        // callback too many.
        let paired = results.into_iter().zip(callbacks.by_ref());
        let mut calls: Vec<_> = paired.map(|(result, callback)| (callback, result)).collect();
        let mut submissions = self.inner.submissions.lock();
        for (handle, callback) in left.iter().zip(callbacks) {
            submissions.attach_callback(*handle, callback, &mut calls);
        }
        drop(submissions);
        self.inner.callbacks.enqueue_calls(&mut calls);
        // If the engine has ended meanwhile, the callback thread has ended too: run the remaining
        // calls here.
        calls.into_iter().for_each(|(callback, result)| callback(result));
    }
}
