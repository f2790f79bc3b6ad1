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

use super::incoming::Place;
use crate::ticket::Token;
use crate::wire::{GENERATION, TASK, TOKEN};

/// Calls a task may make at once.
const BURST: f64 = 20_000.0;
/// Calls a task may make per second in the long run.
const RATE: f64 = 2_000.0;

/// The authenticated origin of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) task: TaskId,
    /// The generation it believes to be in; 0 before it knows one.
    pub(super) generation: Generation,
}

/// Checks token, task and rate.
#[derive(Clone)]
pub(super) struct Gate {
    token: Token,
    tasks: u32,
    buckets: Arc<Mutex<HashMap<u32, Bucket>>>,
    admitted: Arc<AtomicU64>,
}

struct Bucket {
    left: f64,
    at: Instant,
}

impl Gate {
    pub(super) fn new(token: Token, tasks: u32) -> Self {
        Self { token, tasks, buckets: Arc::default(), admitted: Arc::default() }
    }

    /// Returns the counter of admitted calls.
    pub(super) fn admitted(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.admitted)
    }

    fn admit(&self, metadata: &MetadataMap) -> Result<Caller, Status> {
        let token = metadata.get(TOKEN).map(MetadataValue::as_bytes).unwrap_or_default();
        if !self.token.matches(token) {
            return Err(Status::unauthenticated("the token is not this job's"));
        }
        let task: u32 = number(metadata, TASK)
            .ok_or_else(|| Status::invalid_argument("the call names no task"))?;
        if task >= self.tasks {
            let last = self.tasks - 1;
            return Err(Status::not_found(format!(
                "unknown task {task}: the job has tasks 0 to {last}"
            )));
        }
        if !self.spend(task) {
            let reason = format!("task {task} makes more than {RATE} calls a second");
            return Err(Status::resource_exhausted(reason));
        }
        self.admitted.fetch_add(1, Ordering::Relaxed);
        Ok(Caller {
            task: TaskId(task),
            generation: Generation(number(metadata, GENERATION).unwrap_or(0)),
        })
    }

    fn spend(&self, task: u32) -> bool {
        let now = Instant::now();
        let mut buckets = self.buckets.lock();
        let bucket = buckets.entry(task).or_insert(Bucket { left: BURST, at: now });
        bucket.left = (bucket.left + now.duration_since(bucket.at).as_secs_f64() * RATE).min(BURST);
        bucket.at = now;
        if bucket.left < 1.0 {
            return false;
        }
        bucket.left -= 1.0;
        true
    }
}

fn number<T: std::str::FromStr>(metadata: &MetadataMap, name: &str) -> Option<T> {
    metadata.get(name)?.to_str().ok()?.parse().ok()
}

impl Interceptor for Gate {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let caller = self.admit(request.metadata())?;
        if let Some(connection) = request.extensions().get::<TlsConnectInfo<Place>>() {
            connection.get_ref().prove();
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
        let gate = Gate::new(Token::random(), 2);
        let passed = (0..30_000).take_while(|_| gate.spend(0)).count();
        assert!((20_000..29_000).contains(&passed), "{passed}");
        assert!(gate.spend(1));
    }
}
