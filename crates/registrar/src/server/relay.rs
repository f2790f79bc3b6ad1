// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Links between tasks that accept no connections: both ends connect here, and data is forwarded.
//!
//! A task holds a stream on which it hears of calls. Whoever calls it waits here until the task has
//! answered, on a stream of its own; from then on pieces go from end to end, a few at a time, so
//! that a slow reader slows its peer down. What passes is the ranks' own affair: they prove the
//! job's key to each other.

use std::collections::HashMap;
use std::time::Duration;

use farandole_world::{Generation, TaskId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::auth::Caller;
use crate::generated as wire;
use crate::generated::relay_piece::What;

/// Calls that a task has not heard of yet.
const RINGING: usize = 1024;
/// Longest time for a task to answer, and for an end to say what it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pieces on their way from one end to the other.
const UNDER_WAY: usize = 2;

type Piece = Result<wire::RelayPiece, Status>;

/// The target of calls for one world of a task.
type Door = (Generation, TaskId, u64);

/// The stream of one end.
pub(super) type Heard = ReceiverStream<Piece>;

/// One end of a link: what it says, and where it hears.
struct End {
    says: Streaming<wire::RelayPiece>,
    hears: mpsc::Sender<Piece>,
}

/// The ends that can be called, and those that call.
#[derive(Default)]
pub(super) struct Exchange {
    doors: Mutex<HashMap<Door, mpsc::Sender<Result<wire::Call, Status>>>>,
    ringing: Mutex<HashMap<u64, oneshot::Sender<End>>>,
}

/// A call that waits for its answer; forgotten when dropped.
struct Ringing<'a> {
    exchange: &'a Exchange,
    id: u64,
}

impl Drop for Ringing<'_> {
    fn drop(&mut self) {
        self.exchange.ringing.lock().remove(&self.id);
    }
}

impl Exchange {
    /// Calls for a task's world from now on; an earlier stream of the same ends.
    pub(super) fn open(
        &self,
        caller: Caller,
        door: u64,
    ) -> ReceiverStream<Result<wire::Call, Status>> {
        let (calls, heard) = mpsc::channel(RINGING);
        let mut doors = self.doors.lock();
        doors.retain(|_, calls| !calls.is_closed());
        doors.insert((caller.generation, caller.task, door), calls);
        ReceiverStream::new(heard)
    }

    /// Takes one end of a link; returns what it hears once the link is made.
    ///
    /// # Errors
    /// `unavailable` when the other end does not take calls, `deadline_exceeded` when it does not
    /// answer.
    pub(super) async fn join(
        &self,
        caller: Caller,
        mut says: Streaming<wire::RelayPiece>,
    ) -> Result<Heard, Status> {
        let late = || Status::deadline_exceeded("the end of a link did not say what it is");
        let first = timeout(PATIENCE, says.message()).await.map_err(|_| late())??;
        let (hears, heard) = mpsc::channel(UNDER_WAY);
        let own = End { says, hears };
        match first.and_then(|piece| piece.what) {
            Some(What::Dial(dial)) => {
                let other = self.call((caller.generation, TaskId(dial.task), dial.door)).await?;
                tokio::spawn(pump(own.says, other.hears));
                tokio::spawn(pump(other.says, own.hears));
            }
            Some(What::Answer(id)) => {
                let waiting = self.ringing.lock().remove(&id);
                let gone = || Status::unavailable("the caller of this link is gone");
                waiting.ok_or_else(gone)?.send(own).map_err(|_| gone())?;
            }
            Some(What::Data(_) | What::End(_)) | None => {
                return Err(Status::invalid_argument(
                    "the first message of a link must name its target",
                ));
            }
        }
        Ok(ReceiverStream::new(heard))
    }

    /// Lets a task know of a call, and waits for its answer.
    async fn call(&self, door: Door) -> Result<End, Status> {
        let (_, TaskId(task), _) = door;
        let away = || Status::unavailable(format!("task {task} takes no calls"));
        let calls = self.doors.lock().get(&door).cloned().ok_or_else(away)?;
        let (answer, answered) = oneshot::channel();
        let id = rand::random();
        self.ringing.lock().insert(id, answer);
        let _ringing = Ringing { exchange: self, id };
        calls.try_send(Ok(wire::Call { id })).map_err(|_| away())?;
        match timeout(PATIENCE, answered).await {
            Ok(Ok(end)) => Ok(end),
            Ok(Err(_)) => Err(away()),
            Err(_) => {
                let reason = format!("task {task} has not answered within {PATIENCE:.0?}");
                Err(Status::deadline_exceeded(reason))
            }
        }
    }
}

/// Hands on what one end says until it has said everything, or either is gone.
async fn pump(mut says: Streaming<wire::RelayPiece>, hears: mpsc::Sender<Piece>) {
    loop {
        let Ok(Some(piece)) = says.message().await else {
            // An end without a word, which the other one must not take for an orderly one.
            return drop(hears.send(Err(Status::aborted("the other end is gone"))).await);
        };
        let last = matches!(piece.what, Some(What::End(_)));
        if hears.send(Ok(piece)).await.is_err() || last {
            return;
        }
    }
}
