// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Barrier: one token from every member to every other member, or dissemination among many members.
//!
//! Up to `MAX_ALL_TO_ALL_MEMBERS` members, 1 step with `P - 1` tokens from each member. With more
//! members, `log2 P` steps with one token from each: in step `k` a member sends a token to the
//! member `2^k` ahead and receives one from the member `2^k` behind. The distances differ, so a
//! link carries at most one token per barrier.

use std::collections::BTreeSet;

use super::chunk_sizes::UNIT_BYTES;
use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;

/// Most members for which each member sends a token to all others.
const MAX_ALL_TO_ALL_MEMBERS: usize = 8;

pub(super) struct BarrierJob {
    /// Exchanges of each round. A round begins after all exchanges of the previous round.
    rounds: Vec<Vec<TokenExchange>>,
    round: usize,
}

/// Token sent on one link and token received on another.
struct TokenExchange {
    to: usize,
    from: usize,
    outgoing: MessageProgress,
    incoming: MessageProgress,
}

impl TokenExchange {
    fn new(to: usize, from: usize) -> Self {
        Self {
            to,
            from,
            outgoing: MessageProgress::new(UNIT_BYTES),
            incoming: MessageProgress::new(UNIT_BYTES),
        }
    }
}

impl BarrierJob {
    pub(super) fn new(peers: &PeerLinks) -> Self {
        let size = peers.member_count();
        let rounds = if size <= MAX_ALL_TO_ALL_MEMBERS {
            vec![(0..peers.links.len()).map(|link| TokenExchange::new(link, link)).collect()]
        } else {
            std::iter::successors(Some(1), |distance| Some(distance * 2))
                .take_while(|distance| *distance < size)
                .map(|distance| {
                    let to = peers.link_to((peers.member + distance) % size);
                    let from = peers.link_to((peers.member + size - distance) % size);
                    vec![TokenExchange::new(to, from)]
                })
                .collect()
        };
        Self { rounds, round: 0 }
    }
}

impl CollectiveJob for BarrierJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let mut any = false;
        while let Some(round) = self.rounds.get_mut(self.round) {
            let mut over = true;
            for exchange in round {
                let TokenExchange { to, from, outgoing: sent, incoming: received } = exchange;
                any |= sent.send_window(&mut *peers.links[*to].sender, |_, token| token.fill(0))?;
                any |= received.receive_window(&mut *peers.links[*from].receiver, |_, _| ())?;
                over &= sent.is_finished() && received.is_finished();
            }
            if !over {
                return Ok(PollProgress { any, done: false });
            }
            self.round += 1;
        }
        Ok(PollProgress { any, done: true })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        let exchanges = self.rounds.iter().flatten();
        exchanges
            .flat_map(|one| [one.to, one.from])
            .collect::<BTreeSet<usize>>()
            .into_iter()
            .collect()
    }
}
