// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Relay of links to tasks that accept no connections: both ends connect here, and data is
//! forwarded.
//!
//! A called task holds a stream on which it receives calls. A caller waits here until the task has
//! answered on a separate stream. Then pieces are forwarded from end to end, a few at a time, so
//! that a slow reader slows its peer down. The relay does not check the data: the ranks prove to
//! each other that they have the job's key.

use std::collections::HashMap;
use std::time::Duration;

use farandole_world::{Generation, TaskId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::auth::CallOrigin;
use crate::generated as wire;
use crate::generated::relay_piece::What;

/// Number of calls that a task has not received yet.
const MAX_PENDING_CALLS: usize = 1024;
/// Longest time for a task to answer, and for an end to send its first piece.
const CALL_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of pieces in flight from one end to the other.
// Few pieces, so that a slow reader slows its peer down and not the driver's memory.
const MAX_PIECES_IN_FLIGHT: usize = 2;

type RelayPieceResult = Result<wire::RelayPiece, Status>;

/// The target of calls for one world of a task.
type RelayCallTarget = (Generation, TaskId, u64);

/// The stream of pieces to one end.
pub(super) type RelayPieceStream = ReceiverStream<RelayPieceResult>;

/// One end of a link: the stream of pieces from it, and the sender of pieces to it.
struct RelayLinkEnd {
    incoming: Streaming<wire::RelayPiece>,
    outgoing: mpsc::Sender<RelayPieceResult>,
}

/// The tasks that accept calls, and the calls that wait for an answer.
#[derive(Default)]
pub(super) struct RelayExchange {
    call_streams: Mutex<HashMap<RelayCallTarget, mpsc::Sender<Result<wire::Call, Status>>>>,
    pending_calls: Mutex<HashMap<u64, oneshot::Sender<RelayLinkEnd>>>,
}

/// A call that waits for its answer; it is removed on drop.
struct PendingRelayCall<'a> {
    exchange: &'a RelayExchange,
    id: u64,
}

impl Drop for PendingRelayCall<'_> {
    fn drop(&mut self) {
        self.exchange.pending_calls.lock().remove(&self.id);
    }
}

impl RelayExchange {
    /// Opens the stream of calls for a task's world, and ends an earlier stream for the same world.
    pub(super) fn open_call_stream(
        &self,
        caller: CallOrigin,
        relay_world: u64,
    ) -> ReceiverStream<Result<wire::Call, Status>> {
        let (calls, receiver) = mpsc::channel(MAX_PENDING_CALLS);
        let mut call_streams = self.call_streams.lock();
        // Worlds of an elastic job come and go; without this, their streams would collect.
        call_streams.retain(|_, calls| !calls.is_closed());
        call_streams.insert((caller.generation, caller.task, relay_world), calls);
        ReceiverStream::new(receiver)
    }

    /// Joins one end of a link to the other; returns the stream of pieces to this end once the link
    /// is established.
    ///
    /// # Errors
    /// `unavailable` if the other end does not accept calls, `deadline_exceeded` if it does not
    /// answer.
    pub(super) async fn join_link(
        &self,
        caller: CallOrigin,
        mut incoming: Streaming<wire::RelayPiece>,
    ) -> Result<RelayPieceStream, Status> {
        let late =
            || Status::deadline_exceeded("the end of a link did not name its target in time");
        let first =
            timeout(CALL_ANSWER_TIMEOUT, incoming.message()).await.map_err(|_| late())??;
        let (outgoing, receiver) = mpsc::channel(MAX_PIECES_IN_FLIGHT);
        let own = RelayLinkEnd { incoming, outgoing };
        match first.and_then(|piece| piece.what) {
            Some(What::Dial(dial)) => {
                let other = self
                    .call_relayed_task((caller.generation, TaskId(dial.task), dial.relay_world))
                    .await?;
                tokio::spawn(forward_pieces(own.incoming, other.outgoing));
                tokio::spawn(forward_pieces(other.incoming, own.outgoing));
            }
            Some(What::Answer(id)) => {
                let waiting = self.pending_calls.lock().remove(&id);
                let gone = || Status::unavailable("the caller of this link is gone");
                waiting.ok_or_else(gone)?.send(own).map_err(|_| gone())?;
            }
            Some(What::Data(_) | What::End(_)) | None => {
                return Err(Status::invalid_argument(
                    "the first message of a link must name its target",
                ));
            }
        }
        Ok(ReceiverStream::new(receiver))
    }

    /// Sends a call to a task, and waits for its answer.
    async fn call_relayed_task(&self, target: RelayCallTarget) -> Result<RelayLinkEnd, Status> {
        let (_, TaskId(task), _) = target;
        let away = || Status::unavailable(format!("task {task} takes no calls"));
        let calls = self.call_streams.lock().get(&target).cloned().ok_or_else(away)?;
        let (answer, answered) = oneshot::channel();
        // Random: a task must not guess the call of another one and answer it.
        let id = rand::random();
        self.pending_calls.lock().insert(id, answer);
        let _ringing = PendingRelayCall { exchange: self, id };
        // Never waits: a task that does not read its calls must not hold up its callers.
        calls.try_send(Ok(wire::Call { id })).map_err(|_| away())?;
        match timeout(CALL_ANSWER_TIMEOUT, answered).await {
            Ok(Ok(end)) => Ok(end),
            Ok(Err(_)) => Err(away()),
            Err(_) => {
                let reason =
                    format!("task {task} has not answered within {CALL_ANSWER_TIMEOUT:.0?}");
                Err(Status::deadline_exceeded(reason))
            }
        }
    }
}

/// Forwards the pieces of one end until its last piece, or until either end is gone.
async fn forward_pieces(
    mut incoming: Streaming<wire::RelayPiece>,
    outgoing: mpsc::Sender<RelayPieceResult>,
) {
    loop {
        let Ok(Some(piece)) = incoming.message().await else {
            // The stream ended without an end piece: the other end must not take this for an
            // orderly end.
            return drop(outgoing.send(Err(Status::aborted("the other end is gone"))).await);
        };
        let last = matches!(piece.what, Some(What::End(_)));
        if outgoing.send(Ok(piece)).await.is_err() || last {
            return;
        }
    }
}
