// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Formation requests: a worker asks for a world with other ranks, and waits until all have asked.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use farandole_world::Rank;
use prost::Message as _;
use tonic::{Response, Status, Streaming};

use super::{MAX_SERVER_WAIT, TaskClient};
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::generated::meet_reply::What;

/// Longest time between two checks whether the caller has given up.
// A user who presses Ctrl-C expects an answer within about this time.
const INTERRUPT_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Outcome of a rank's formation request.
#[derive(Debug, PartialEq, Eq)]
pub enum FormationOutcome {
    /// All ranks have asked: their peer addresses, in the order of the ranks.
    Formed(Vec<Bytes>),
    /// Another process holds this rank.
    RankTaken {
        /// The other process.
        holder: String,
    },
    /// A rank asks for another world.
    MembersDiffer {
        /// The rank.
        rank: Rank,
        /// The ranks of its world; `None`: all.
        members: Option<Vec<Rank>>,
    },
    /// A rank's worker has ended.
    WorkerEnded {
        /// The rank.
        rank: Rank,
        /// Its host.
        host: String,
    },
    /// The caller has given up.
    Interrupted,
}

impl TaskClient {
    /// Asks for a world of `members`, in ascending order and with this rank; `None` means all ranks
    /// of the generation. `holder` identifies this process, and `encoded_addresses` contains its
    /// peer addresses. `interrupted` is called four times a second and returns whether to give up.
    /// After an interruption, or at the deadline, the request is withdrawn, and the other ranks
    /// wait for this rank again.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that have not asked, `Aborted` as soon as the generation is over,
    /// `Refused`, `Lost`, `Malformed`.
    pub fn form_world(
        &self,
        members: Option<&[Rank]>,
        holder: &str,
        encoded_addresses: &[u8],
        deadline: Instant,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<FormationOutcome> {
        self.check_own_process()?;
        let request = wire::MeetRequest {
            // The registrar distinguishes a repeated call, which is harmless, from a new attempt by
            // this number.
            attempt: rand::random(),
            holder: holder.to_owned(),
            members: members.unwrap_or_default().iter().map(|rank| rank.0).collect(),
            encoded_addresses: Bytes::copy_from_slice(encoded_addresses),
            timeout_ms: 0,
        };
        let (sender, answers) = mpsc::channel();
        let client = self.clone();
        // `interrupted` may call this client, so it runs on the caller's thread, outside of the
        // runtime.
        let waiting = self.inner.handle.spawn(async move {
            let answer = tokio::select! {
                answer = client.await_formation(request, deadline) => answer,
                () = client.inner.cancel.wait_cancelled() => Err(connection_closed_error()),
            };
            drop(sender.send(answer));
        });
        loop {
            match answers.recv_timeout(INTERRUPT_CHECK_INTERVAL) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if interrupted() => {
                    // The registrar sees the end of the call and withdraws the request.
                    waiting.abort();
                    return Ok(FormationOutcome::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(connection_closed_error()),
            }
        }
    }

    /// Waits for the outcome, in calls that wait at the registrar for at most `MAX_SERVER_WAIT`
    /// each.
    async fn await_formation(
        &self,
        mut request: wire::MeetRequest,
        deadline: Instant,
    ) -> Result<FormationOutcome> {
        let started = Instant::now();
        loop {
            request.timeout_ms = self.server_wait_millis(deadline);
            let calling = self.retry_while_disconnected("the wait for all ranks", || {
                let request = self.inner.caller.build_request(request.clone());
                let mut stub = self.inner.caller.grpc_stub();
                async move { collect_formation_pieces(stub.meet(request).await?.into_inner()).await }
            });
            let Ok(reply) =
                tokio::time::timeout_at((deadline + MAX_SERVER_WAIT).into(), calling).await
            else {
                let what = "the registrar's answer to the wait for all ranks".to_owned();
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            };
            let missing = match reply? {
                What::WorldAddresses(encoded) => {
                    let encoded = wire::WorldAddresses::decode(encoded).map_err(|error| {
                        self.malformed_reply("the wait for all ranks", error.to_string())
                    })?;
                    return Ok(FormationOutcome::Formed(encoded.by_rank));
                }
                What::Taken(holder) => return Ok(FormationOutcome::RankTaken { holder }),
                What::Elsewhere(wire::Elsewhere { rank, members }) => {
                    let members =
                        (!members.is_empty()).then(|| members.into_iter().map(Rank).collect());
                    return Ok(FormationOutcome::MembersDiffer { rank: Rank(rank), members });
                }
                What::Ended(wire::Ended { rank, host }) => {
                    return Ok(FormationOutcome::WorkerEnded { rank: Rank(rank), host });
                }
                What::Missing(missing) => missing,
            };
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    what: describe_missing_ranks(&missing),
                    elapsed: started.elapsed(),
                });
            }
        }
    }
}

/// Describes the missing ranks for an error message.
fn describe_missing_ranks(missing: &wire::Missing) -> String {
    let ranks: Vec<String> = missing.ranks.iter().map(ToString::to_string).collect();
    let s = if missing.count == 1 { "" } else { "s" };
    let more = match (missing.count as usize).saturating_sub(ranks.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{s} {}{more} to call init()", ranks.join(", "))
}

fn connection_closed_error() -> Error {
    Error::Closed { what: "the connection to the registrar" }
}

/// Assembles a reply from its pieces.
async fn collect_formation_pieces(
    mut pieces: Streaming<wire::MeetReply>,
) -> std::result::Result<Response<What>, Status> {
    let mut encoded = BytesMut::new();
    while let Some(piece) = pieces.message().await? {
        match piece.what {
            Some(What::WorldAddresses(bytes)) => encoded.extend_from_slice(&bytes),
            Some(other) => return Ok(Response::new(other)),
            None => return Err(Status::internal("an empty piece")),
        }
    }
    Ok(Response::new(What::WorldAddresses(encoded.freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_that_are_late_are_named() {
        let late = |ranks: &[u32], count| {
            describe_missing_ranks(&wire::Missing { ranks: ranks.to_vec(), count })
        };
        assert_eq!(late(&[3], 1), "rank 3 to call init()");
        assert_eq!(late(&[3, 5], 2), "ranks 3, 5 to call init()");
        assert_eq!(late(&[3, 5], 9), "ranks 3, 5 and 7 more to call init()");
    }
}
