// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Calls of a worker in an elastic job: for the next world, for changes of hosts, and for leaving.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farandole_world::{Generation, TaskId, World};

use super::{Client, POLL, whole};
use crate::convert;
use crate::error::{Error, Result};
use crate::generated as wire;

/// Hosts came or went while a world was at work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostChange {
    /// Seconds since the epoch.
    pub at: f64,
    /// Members of the world are to leave.
    pub removed: bool,
    /// Workers wait to join it.
    pub added: bool,
}

/// Pause after a call that failed, before it is made again.
const PAUSE: Duration = Duration::from_millis(200);

impl Client {
    /// Asks for a world after `after`, in which this worker lost `suspects`, and waits for it until
    /// `deadline`. The world is seen from this task's rank. Repeating it changes nothing.
    ///
    /// # Errors
    /// `Timeout`; `Dismissed` when this worker may go; `Aborted` when the job has ended, or counts
    /// this worker as lost; `Refused`, `Lost`, `Malformed`.
    pub fn join(&self, after: Generation, suspects: &[TaskId], deadline: Instant) -> Result<World> {
        let started = Instant::now();
        let suspects: Vec<u32> = suspects.iter().map(|task| task.0).collect();
        loop {
            let timeout_ms = self.slice(deadline);
            let reply = self.call("the wait for a world", deadline + POLL, || {
                let message =
                    wire::JoinRequest { timeout_ms, after: after.0, suspects: suspects.clone() };
                let request = self.inner.caller.request(message);
                let mut stub = self.inner.caller.stub();
                async move { whole(stub.join(request).await?.into_inner()).await }
            })?;
            if let Some(world) = reply.world {
                let world = convert::decode_world(world, self.task())
                    .map_err(|reason| self.malformed("the wait for a world", reason))?;
                self.inner.caller.generation.store(world.generation.0, Ordering::Release);
                return Ok(world);
            }
            if Instant::now() >= deadline {
                let what = "enough workers to be ready".to_owned();
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            }
        }
    }

    /// Says that this worker will end at its next chance, which is no failure.
    ///
    /// # Errors
    /// `Aborted`, `Lost`, `Refused`, `Timeout`.
    pub fn resign(&self, reason: &str, deadline: Instant) -> Result<()> {
        let message = wire::LeaveRequest { reason: reason.to_owned() };
        self.call("a leave", deadline, || {
            let request = self.inner.caller.request(message.clone());
            let mut stub = self.inner.caller.stub();
            async move { stub.leave(request).await }
        })?;
        Ok(())
    }

    /// Calls `tell` with each change of hosts that concerns the world `generation`, from another
    /// thread, until the next call or until the client is gone.
    pub fn watch_changes(
        &self,
        generation: Generation,
        tell: impl Fn(HostChange) + Send + 'static,
    ) {
        let caller = super::Caller {
            generation: std::sync::Arc::new(std::sync::atomic::AtomicU64::new(generation.0)),
            ..self.inner.caller.clone()
        };
        let timeout_ms = u64::try_from(POLL.as_millis()).unwrap_or(u64::MAX);
        let task = self.inner.handle.spawn(async move {
            let mut known = 0.0;
            loop {
                let request = caller.request(wire::ChangesRequest { timeout_ms, known });
                match caller.stub().changes(request).await.map(tonic::Response::into_inner) {
                    Ok(wire::ChangesReply { at: Some(at), removed, added }) => {
                        known = at;
                        tell(HostChange { at, removed, added });
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            }
        });
        if let Some(before) = self.inner.changes.lock().replace(task) {
            before.abort();
        }
    }
}
