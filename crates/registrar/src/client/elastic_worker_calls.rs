// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Calls of a worker in an elastic job: for the next world, for changes of hosts, and for leaving.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farandole_world::{Generation, TaskId, World};

use super::authenticated_channel::AuthenticatedChannel;
use super::{MAX_SERVER_WAIT, TaskClient, collect_assignment_pieces};
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::wire_conversions;

/// A change of the available hosts while a world is at work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostChange {
    /// Seconds since the epoch.
    pub at: f64,
    /// Whether members of the world must leave.
    pub removed: bool,
    /// Whether workers wait to join the world.
    pub added: bool,
}

/// Pause between a failed call and its repetition.
const CHANGES_RETRY_DELAY: Duration = Duration::from_millis(200);

impl TaskClient {
    /// Requests the world that follows generation `after`, and waits for it until `deadline`.
    /// `suspects` are the tasks that this worker lost in generation `after`. The world is seen from
    /// this task's rank. Repeating the call changes nothing.
    ///
    /// # Errors
    /// `Timeout`; `Dismissed` when this worker may go; `Aborted` when the job has ended, or counts
    /// this worker as lost; `Refused`, `Lost`, `Malformed`.
    pub fn join_next_world(
        &self,
        after: Generation,
        suspects: &[TaskId],
        deadline: Instant,
    ) -> Result<World> {
        let started = Instant::now();
        let suspects: Vec<u32> = suspects.iter().map(|task| task.0).collect();
        loop {
            let timeout_ms = self.server_wait_millis(deadline);
            // The registrar ends the wait at `deadline`; the margin lets its answer arrive.
            let reply =
                self.call_with_retries("the wait for a world", deadline + MAX_SERVER_WAIT, || {
                    let message = wire::JoinRequest {
                        timeout_ms,
                        after: after.0,
                        suspects: suspects.clone(),
                    };
                    let request = self.inner.caller.build_request(message);
                    let mut stub = self.inner.caller.grpc_stub();
                    async move {
                        collect_assignment_pieces(stub.join(request).await?.into_inner()).await
                    }
                })?;
            if let Some(world) = reply.world {
                let world = wire_conversions::decode_world(world, self.task_id())
                    .map_err(|reason| self.malformed_reply("the wait for a world", reason))?;
                self.inner.caller.generation.store(world.generation.0, Ordering::Release);
                return Ok(world);
            }
            if Instant::now() >= deadline {
                let what = "enough workers to be ready".to_owned();
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            }
        }
    }

    /// Announces that this worker will end at its next opportunity, which is not a failure.
    ///
    /// # Errors
    /// `Aborted`, `Lost`, `Refused`, `Timeout`.
    pub fn announce_leave(&self, reason: &str, deadline: Instant) -> Result<()> {
        let message = wire::LeaveRequest { reason: reason.to_owned() };
        self.call_with_retries("a leave", deadline, || {
            let request = self.inner.caller.build_request(message.clone());
            let mut stub = self.inner.caller.grpc_stub();
            async move { stub.leave(request).await }
        })?;
        Ok(())
    }

    /// Calls `on_change`, from another thread, with each change of hosts that concerns the world
    /// `generation`. Stops at the next call of this function, or when the client is dropped.
    pub fn watch_host_changes(
        &self,
        generation: Generation,
        on_change: impl Fn(HostChange) + Send + 'static,
    ) {
        let caller = AuthenticatedChannel {
            // Not the shared number: the watch concerns this world, whichever world the client
            // joins next.
            generation: std::sync::Arc::new(std::sync::atomic::AtomicU64::new(generation.0)),
            ..self.inner.caller.clone()
        };
        let timeout_ms = u64::try_from(MAX_SERVER_WAIT.as_millis()).unwrap_or(u64::MAX);
        let task = self.inner.handle.spawn(async move {
            let mut known = 0.0;
            loop {
                let request = caller.build_request(wire::ChangesRequest { timeout_ms, known });
                match caller.grpc_stub().changes(request).await.map(tonic::Response::into_inner) {
                    Ok(wire::ChangesReply { at: Some(at), removed, added }) => {
                        known = at;
                        on_change(HostChange { at, removed, added });
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(CHANGES_RETRY_DELAY).await,
                }
            }
        });
        // A watch of an earlier world would call `on_change` for a world that is over.
        if let Some(before) = self.inner.changes.lock().replace(task) {
            before.abort();
        }
    }
}
