// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! One operation of a caller on a store over the network: its failed attempts, and the log lines
//! that say when operations begin and end to wait for a service.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::fork_reset_value::ForkResetValue;

/// Time after which repeated attempts are logged. Object stores answer single requests with
/// "slow down" all the time.
const UNLOGGED_WAIT: Duration = Duration::from_secs(1);

/// Number of waiting operations, and the begin of the first wait, by service. A forked child has
/// none of its parent's operations.
static WAITING_OPERATIONS: ForkResetValue<BTreeMap<String, (usize, Instant)>> =
    ForkResetValue::new();

tokio::task_local! {
    /// The operation to which requests of the current task belong.
    static CURRENT_OPERATION: Arc<StoreOperation>;
}

/// An operation, such as a read of one file.
#[derive(Debug)]
pub(crate) struct StoreOperation {
    /// The service: scheme with bucket, container or name node.
    service: String,
    action: &'static str,
    path: String,
    /// Longest time for repetitions of one request.
    timeout: Duration,
    started: Instant,
    failed_attempts: AtomicU32,
    waits: AtomicBool,
    /// Text about a credential that the service has refused.
    refused_credential: Mutex<Option<String>>,
    /// The last state of a copy that the service makes.
    copy_state: Mutex<Option<CopyState>>,
}

/// The state of a copy that a service makes, as its answers tell it.
#[derive(Clone, Debug)]
pub(crate) struct CopyState {
    /// `pending`, `success`, or the kind of the failure.
    pub(crate) status: String,
    /// Copied bytes and all bytes, if the answer contains them.
    pub(crate) progress: String,
}

impl StoreOperation {
    pub(crate) fn new(
        service: &str,
        action: &'static str,
        path: String,
        timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            service: service.to_owned(),
            action,
            path,
            timeout,
            started: Instant::now(),
            failed_attempts: AtomicU32::new(0),
            waits: AtomicBool::new(false),
            refused_credential: Mutex::new(None),
            copy_state: Mutex::new(None),
        })
    }

    /// Runs `future` as a part of this operation.
    pub(crate) async fn run<T>(self: &Arc<Self>, future: impl Future<Output = T>) -> T {
        CURRENT_OPERATION.scope(Arc::clone(self), future).await
    }

    /// Returns whether requests had to be repeated, so that an earlier one may have had an effect.
    pub(crate) fn was_repeated(&self) -> bool {
        self.failed_attempts.load(Ordering::Relaxed) > 0
    }

    /// Returns the timeout if the operation has failed attempts and lasted that long.
    pub(crate) fn exhausted_timeout(&self) -> Option<Duration> {
        (self.was_repeated() && self.started.elapsed() >= self.timeout).then_some(self.timeout)
    }

    /// Returns the credential that the service has refused, and why.
    pub(crate) fn refused_credential(&self) -> Option<String> {
        self.refused_credential.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the longest time for repetitions of one request.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the state of a copy in the last answer, if the service reports it.
    pub(crate) fn take_copy_state(&self) -> Option<CopyState> {
        self.copy_state.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn note_failure(&self, reason: &str) {
        // Relaxed: the caller reads the count after its operation has ended.
        self.failed_attempts.fetch_add(1, Ordering::Relaxed);
        if self.started.elapsed() < UNLOGGED_WAIT || self.waits.swap(true, Ordering::Relaxed) {
            return;
        }
        let count = WAITING_OPERATIONS.with(|waiting| {
            let (count, _) =
                waiting.entry(self.service.clone()).or_insert_with(|| (0, self.started));
            *count += 1;
            *count
        });
        // One line for all operations that wait for the same service.
        if count == 1 {
            tracing::warn!(
                "{} does not serve requests: {reason}. Waiting to {} {}, for at most {:?} \
                 (FARANDOLE_STORE_TIMEOUT)",
                self.service,
                self.action,
                self.path,
                self.timeout
            );
        }
    }
}

impl Drop for StoreOperation {
    fn drop(&mut self) {
        if !self.waits.load(Ordering::Relaxed) {
            return;
        }
        let ended = WAITING_OPERATIONS.with(|waiting| {
            let (count, since) = waiting.get_mut(&self.service)?;
            *count = count.saturating_sub(1);
            let seconds = (*count == 0).then(|| since.elapsed().as_secs_f64())?;
            waiting.remove(&self.service);
            Some(seconds)
        });
        if let Some(seconds) = ended {
            tracing::warn!(
                "no operation waits for {} any more, after {seconds:.1} s",
                self.service
            );
        }
    }
}

/// Returns the operation of the current task, for tasks that it starts.
pub(crate) fn current_operation() -> Option<Arc<StoreOperation>> {
    CURRENT_OPERATION.try_with(Arc::clone).ok()
}

// Of the process: metrics show the sum over all stores.
static FAILED_ATTEMPTS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of requests that have failed and were to be repeated, in all stores since the
/// process started.
pub fn failed_store_attempts() -> u64 {
    FAILED_ATTEMPTS.load(Ordering::Relaxed)
}

/// Records a failed attempt of the current operation, which is going to be repeated.
pub(crate) fn note_failed_attempt(reason: &str) {
    // The counter orders nothing else.
    FAILED_ATTEMPTS.fetch_add(1, Ordering::Relaxed);
    // The error means that the request belongs to no operation, which is fine.
    CURRENT_OPERATION.try_with(|operation| operation.note_failure(reason)).unwrap_or_default();
}

/// Records that the service has refused a request of the current operation, for its error.
pub(crate) fn note_refused_credential(text: String) {
    // The error means that the request belongs to no operation, which is fine.
    CURRENT_OPERATION
        .try_with(|operation| {
            *operation.refused_credential.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(text);
        })
        .unwrap_or_default();
}

/// Records the state of a copy in an answer to the current operation.
pub(crate) fn note_copy_state(state: CopyState) {
    // The error means that the request belongs to no operation, which is fine.
    CURRENT_OPERATION
        .try_with(|operation| {
            *operation.copy_state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        })
        .unwrap_or_default();
}
