// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Barrier: one token from every member to every member, or dissemination among many members.
//!
//! Up to `ALL_TO_ALL` members 1 step of `P - 1` tokens each; beyond, `log2 P` steps of one token:
//! in step `k` a member tells the one `2^k` ahead and hears from the one `2^k` behind. The
//! distances differ, so a link carries one token a barrier at most.

use std::collections::BTreeSet;

use super::UNIT;
use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::Result;

/// Greatest number of members in which each sends to all others.
const ALL_TO_ALL: usize = 8;

pub(super) struct Barrier {
    /// The messages of each round, which end before the next round begins.
    rounds: Vec<Vec<Exchange>>,
    round: usize,
}

/// A token to one link and one from another.
struct Exchange {
    to: usize,
    from: usize,
    told: Message,
    heard: Message,
}

impl Exchange {
    fn new(to: usize, from: usize) -> Self {
        Self { to, from, told: Message::new(UNIT), heard: Message::new(UNIT) }
    }
}

impl Barrier {
    pub(super) fn new(peers: &Peers) -> Self {
        let size = peers.size();
        let rounds = if size <= ALL_TO_ALL {
            vec![(0..peers.links.len()).map(|link| Exchange::new(link, link)).collect()]
        } else {
            std::iter::successors(Some(1), |distance| Some(distance * 2))
                .take_while(|distance| *distance < size)
                .map(|distance| {
                    let to = peers.link_to((peers.member + distance) % size);
                    let from = peers.link_to((peers.member + size - distance) % size);
                    vec![Exchange::new(to, from)]
                })
                .collect()
        };
        Self { rounds, round: 0 }
    }
}

impl Job for Barrier {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let mut any = false;
        while let Some(round) = self.rounds.get_mut(self.round) {
            let mut over = true;
            for exchange in round {
                let Exchange { to, from, told, heard } = exchange;
                any |= told.put(&mut *peers.links[*to].sender, |_, token| token.fill(0))?;
                any |= heard.take(&mut *peers.links[*from].receiver, |_, _| ())?;
                over &= told.is_finished() && heard.is_finished();
            }
            if !over {
                return Ok(Moved { any, done: false });
            }
            self.round += 1;
        }
        Ok(Moved { any, done: true })
    }

    fn links(&self, _peers: &Peers) -> Vec<usize> {
        let exchanges = self.rounds.iter().flatten();
        exchanges
            .flat_map(|one| [one.to, one.from])
            .collect::<BTreeSet<usize>>()
            .into_iter()
            .collect()
    }
}
