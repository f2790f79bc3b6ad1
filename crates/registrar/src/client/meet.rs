// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A worker asks for a world with other ranks, and waits until all of them have asked.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use farandole_world::Rank;
use prost::Message as _;
use tonic::{Response, Status, Streaming};

use super::{Client, POLL};
use crate::error::{Error, Result};
use crate::generated as wire;
use crate::generated::meet_reply::What;

/// The longest time between two questions whether to give up.
const SLICE: Duration = Duration::from_millis(250);

/// The answer to a rank's question for a world.
#[derive(Debug, PartialEq, Eq)]
pub enum Meet {
    /// All ranks have come: their cards, in the order of the ranks.
    All(Vec<Bytes>),
    /// Another process has this rank.
    Taken {
        /// The other process.
        holder: String,
    },
    /// A rank asks for another world.
    Elsewhere {
        /// The rank.
        rank: Rank,
        /// The ranks of its world; `None`: all.
        members: Option<Vec<Rank>>,
    },
    /// A rank's worker has ended.
    Ended {
        /// The rank.
        rank: Rank,
        /// Its host.
        host: String,
    },
    /// The caller has given up.
    Interrupted,
}

impl Client {
    /// Asks for a world of `members`, ascending and this rank among them, or of all ranks of the
    /// generation, as the process `holder`, which can be reached by `card`. `interrupted` is asked
    /// every quarter of a second whether to give up; then, and at the deadline, the others wait for
    /// this rank again.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that have not come, `Aborted` as soon as the generation is over,
    /// `Refused`, `Lost`, `Malformed`.
    pub fn meet(
        &self,
        members: Option<&[Rank]>,
        holder: &str,
        card: &[u8],
        deadline: Instant,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Meet> {
        self.own_process()?;
        let request = wire::MeetRequest {
            attempt: rand::random(),
            holder: holder.to_owned(),
            members: members.unwrap_or_default().iter().map(|rank| rank.0).collect(),
            card: Bytes::copy_from_slice(card),
            timeout_ms: 0,
        };
        let (sender, answers) = mpsc::channel();
        let client = self.clone();
        // `interrupted` may call this client, so it runs on the caller's thread, and outside of the
        // runtime.
        let waiting = self.inner.handle.spawn(async move {
            let answer = tokio::select! {
                answer = client.everybody(request, deadline) => answer,
                () = client.inner.cancel.cancelled() => Err(closed()),
            };
            drop(sender.send(answer));
        });
        loop {
            match answers.recv_timeout(SLICE) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if interrupted() => {
                    waiting.abort();
                    return Ok(Meet::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(closed()),
            }
        }
    }

    /// One call for each `POLL` that it takes.
    async fn everybody(&self, mut request: wire::MeetRequest, deadline: Instant) -> Result<Meet> {
        let started = Instant::now();
        loop {
            request.timeout_ms = self.slice(deadline);
            let calling = self.repeated("the wait for all ranks", || {
                let request = self.inner.caller.request(request.clone());
                let mut stub = self.inner.caller.stub();
                async move { whole(stub.meet(request).await?.into_inner()).await }
            });
            let Ok(reply) = tokio::time::timeout_at((deadline + POLL).into(), calling).await else {
                let what = "the registrar's answer to the wait for all ranks".to_owned();
                return Err(Error::Timeout { what, elapsed: started.elapsed() });
            };
            let missing = match reply? {
                What::Cards(cards) => {
                    let cards = wire::Cards::decode(cards).map_err(|error| {
                        self.malformed("the wait for all ranks", error.to_string())
                    })?;
                    return Ok(Meet::All(cards.cards));
                }
                What::Taken(holder) => return Ok(Meet::Taken { holder }),
                What::Elsewhere(wire::Elsewhere { rank, members }) => {
                    let members =
                        (!members.is_empty()).then(|| members.into_iter().map(Rank).collect());
                    return Ok(Meet::Elsewhere { rank: Rank(rank), members });
                }
                What::Ended(wire::Ended { rank, host }) => {
                    return Ok(Meet::Ended { rank: Rank(rank), host });
                }
                What::Missing(missing) => missing,
            };
            if Instant::now() >= deadline {
                return Err(Error::Timeout { what: late(&missing), elapsed: started.elapsed() });
            }
        }
    }
}

/// Returns the awaited world.
fn late(missing: &wire::Missing) -> String {
    let ranks: Vec<String> = missing.ranks.iter().map(ToString::to_string).collect();
    let s = if missing.count == 1 { "" } else { "s" };
    let more = match (missing.count as usize).saturating_sub(ranks.len()) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{s} {}{more} to call init()", ranks.join(", "))
}

fn closed() -> Error {
    Error::Closed { what: "the connection to the registrar" }
}

/// Returns a reply put together from its pieces.
async fn whole(
    mut pieces: Streaming<wire::MeetReply>,
) -> std::result::Result<Response<What>, Status> {
    let mut cards = BytesMut::new();
    while let Some(piece) = pieces.message().await? {
        match piece.what {
            Some(What::Cards(bytes)) => cards.extend_from_slice(&bytes),
            Some(other) => return Ok(Response::new(other)),
            None => return Err(Status::internal("an empty piece")),
        }
    }
    Ok(Response::new(What::Cards(cards.freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_that_are_late_are_named() {
        let late = |ranks: &[u32], count| late(&wire::Missing { ranks: ranks.to_vec(), count });
        assert_eq!(late(&[3], 1), "rank 3 to call init()");
        assert_eq!(late(&[3, 5], 2), "ranks 3, 5 to call init()");
        assert_eq!(late(&[3, 5], 9), "ranks 3, 5 and 7 more to call init()");
    }
}
