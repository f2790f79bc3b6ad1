// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Authentication and rate limits: every call passes here before it is read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use farandole_world::{Generation, TaskId};
use parking_lot::Mutex;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Request, Status};

use super::connection_admission::ConnectionSlotHandle;
use crate::ticket::JobToken;
use crate::wire::{GENERATION_HEADER, TASK_HEADER, TOKEN_HEADER};

/// Number of calls that a task may make in one burst.
const CALL_BURST: f64 = 20_000.0;
/// Number of calls per second that a task may make in the long run.
const CALLS_PER_SECOND: f64 = 2_000.0;

/// The authenticated origin of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallOrigin {
    pub(super) task: TaskId,
    /// The generation that the caller is in, by its own account; 0 before it knows one.
    pub(super) generation: Generation,
}

/// An interceptor that checks the token, the task and the call rate.
#[derive(Clone)]
pub(super) struct AuthInterceptor {
    token: JobToken,
    tasks: u32,
    buckets: Arc<Mutex<HashMap<u32, CallRateBucket>>>,
    admitted: Arc<AtomicU64>,
}

struct CallRateBucket {
    left: f64,
    at: Instant,
}

impl AuthInterceptor {
    pub(super) fn new(token: JobToken, tasks: u32) -> Self {
        Self { token, tasks, buckets: Arc::default(), admitted: Arc::default() }
    }

    /// Returns the counter of admitted calls.
    pub(super) fn admitted_call_count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.admitted)
    }

    fn admit_call(&self, metadata: &MetadataMap) -> Result<CallOrigin, Status> {
        let token = metadata.get(TOKEN_HEADER).map(MetadataValue::as_bytes).unwrap_or_default();
        // Before all other checks: a stranger must not learn how many tasks the job has.
        if !self.token.matches_hex(token) {
            return Err(Status::unauthenticated("the token is not this job's"));
        }
        let task: u32 = metadata_number(metadata, TASK_HEADER)
            .ok_or_else(|| Status::invalid_argument("the call names no task"))?;
        if task >= self.tasks {
            let last = self.tasks - 1;
            return Err(Status::not_found(format!(
                "unknown task {task}: the job has tasks 0 to {last}"
            )));
        }
        if !self.spend_rate_allowance(task) {
            let reason = format!("task {task} makes more than {CALLS_PER_SECOND} calls a second");
            return Err(Status::resource_exhausted(reason));
        }
        // A counter for tests and reports, which orders no other memory.
        self.admitted.fetch_add(1, Ordering::Relaxed);
        Ok(CallOrigin {
            task: TaskId(task),
            generation: Generation(metadata_number(metadata, GENERATION_HEADER).unwrap_or(0)),
        })
    }

    fn spend_rate_allowance(&self, task: u32) -> bool {
        let now = Instant::now();
        let mut buckets = self.buckets.lock();
        let bucket = buckets.entry(task).or_insert(CallRateBucket { left: CALL_BURST, at: now });
        // Refilled lazily: a timer for ten thousand tasks would cost more than this sum.
        bucket.left = (bucket.left
            + now.duration_since(bucket.at).as_secs_f64() * CALLS_PER_SECOND)
            .min(CALL_BURST);
        bucket.at = now;
        if bucket.left < 1.0 {
            return false;
        }
        bucket.left -= 1.0;
        true
    }
}

fn metadata_number<T: std::str::FromStr>(metadata: &MetadataMap, name: &str) -> Option<T> {
    metadata.get(name)?.to_str().ok()?.parse().ok()
}

impl Interceptor for AuthInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let caller = self.admit_call(request.metadata())?;
        if let Some(connection) = request.extensions().get::<TlsConnectInfo<ConnectionSlotHandle>>()
        {
            // The token is right, so this connection must not be evicted for a stranger.
            connection.get_ref().mark_proven();
        }
        request.extensions_mut().insert(caller);
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_task_leaves_the_others_alone() {
        let gate = AuthInterceptor::new(JobToken::random(), 2);
        let passed = (0..30_000).take_while(|_| gate.spend_rate_allowance(0)).count();
        assert!((20_000..29_000).contains(&passed), "{passed}");
        assert!(gate.spend_rate_allowance(1));
    }
}
