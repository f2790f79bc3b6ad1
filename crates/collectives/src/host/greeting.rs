// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The first message on every link: it checks that both ends mean the same communicator, and finds
//! the smallest ring.
//!
//! A mesh has a link between any two members, so the minimum over what a member sees and what all
//! others say is the minimum over the whole communicator.
//!
//! Nothing is said on links that are opened at their first use, or all of them would open here.
//! Members that are the same in the eyes of their neighbours on the other links are the same
//! everywhere, if these links connect them all. A member that differs ends here, and takes part in
//! no operation. Rings are equally large on both ends of such a link, as opening it checks.

use super::UNIT;
use super::message::Message;
use super::peers::{Job, Moved, Peers};
use crate::{Crossover, Result};

/// Counts incompatible changes of the protocol on links.
const PROTOCOL: u32 = 5;
const MAGIC: u32 = u32::from_le_bytes(*b"frdl");

/// `magic, protocol, size, rank, topology, algorithms: u32; capacity: u64`, little endian, in one
/// unit.
pub(super) struct Greeting {
    facts: Facts,
    card: [u8; UNIT],
    out: Vec<Message>,
    incoming: Vec<(Message, [u8; UNIT])>,
}

impl Greeting {
    pub(super) fn new(peers: &Peers, crossover: &Crossover) -> Self {
        let facts = Facts {
            size: u32::try_from(peers.size()).unwrap_or(u32::MAX),
            hosts: digest(peers.hosts.sizes().into_iter().flat_map(usize::to_le_bytes)),
            algorithms: digest(crossover.to_string().into_bytes()),
        };
        let card = card(facts, peers.rank.0, u64::try_from(peers.capacity).unwrap_or(u64::MAX));
        let links = peers.links.len();
        Self {
            facts,
            card,
            out: vec![Message::new(UNIT); links],
            incoming: vec![(Message::new(UNIT), [0; UNIT]); links],
        }
    }
}

/// The values on which all members must agree.
#[derive(Clone, Copy, Debug)]
struct Facts {
    size: u32,
    /// Digest of the members on each host.
    hosts: u32,
    /// Digest of the choice of algorithms.
    algorithms: u32,
}

/// FNV-1a: detects accidental differences.
fn digest(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes
        .into_iter()
        .fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn words(facts: Facts, rank: u32) -> [(&'static str, u32); 6] {
    let Facts { size, hosts, algorithms } = facts;
    [
        ("magic", MAGIC),
        ("protocol", PROTOCOL),
        ("members", size),
        ("rank", rank),
        ("hosts", hosts),
        ("algorithms", algorithms),
    ]
}

fn card(facts: Facts, rank: u32, capacity: u64) -> [u8; UNIT] {
    let mut card = [0; UNIT];
    for (at, (_, word)) in words(facts, rank).into_iter().enumerate() {
        card[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    card[24..32].copy_from_slice(&capacity.to_le_bytes());
    card
}

/// Returns the capacity a card tells, if all else is as expected.
fn read(card: &[u8; UNIT], facts: Facts, rank: u32) -> Result<u64, String> {
    let word = |at: usize| u32::from_le_bytes([card[at], card[at + 1], card[at + 2], card[at + 3]]);
    for (k, (what, value)) in words(facts, rank).into_iter().enumerate() {
        if word(k * 4) != value {
            return Err(match what {
                "hosts" => "its communicator has members on other hosts than this one".to_owned(),
                "algorithms" => {
                    "its communicator chooses other algorithms than this one".to_owned()
                }
                _ => format!(
                    "its communicator says {what} {} where this one says {value}",
                    word(k * 4)
                ),
            });
        }
    }
    Ok(u64::from(word(24)) | u64::from(word(28)) << 32)
}

impl Job for Greeting {
    fn poll(&mut self, peers: &mut Peers) -> Result<Moved> {
        let facts = self.facts;
        let (mut any, mut done) = (false, true);
        let links = peers.links.iter_mut().zip(&mut self.out).zip(&mut self.incoming);
        for ((link, out), (message, theirs)) in
            links.filter(|((link, _), _)| !link.sender.is_on_demand())
        {
            let card = &self.card;
            any |=
                out.put(&mut *link.sender, |at, to| to.copy_from_slice(&card[at..at + to.len()]))?;
            let arrived = message.take(&mut *link.receiver, |at, from| {
                theirs[at..at + from.len()].copy_from_slice(from);
            })?;
            // Checked as soon as it arrives: an unexpected rank may never get its own.
            if arrived && message.is_finished() {
                let capacity = read(theirs, facts, link.peer.0).map_err(|reason| {
                    farandole_transport::Error::Frame { rank: link.peer, reason }
                })?;
                peers.capacity =
                    peers.capacity.min(usize::try_from(capacity).unwrap_or(usize::MAX));
            }
            any |= arrived;
            done &= out.is_finished() && message.is_finished();
        }
        Ok(Moved { any, done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_read_back_and_a_wrong_one_names_the_difference() {
        let facts = Facts { size: 4, hosts: 5, algorithms: 6 };
        let own = card(facts, 3, 1 << 33);
        assert_eq!(read(&own, facts, 3), Ok(1 << 33));
        let refused = |facts, rank| read(&own, facts, rank).unwrap_err();
        let says = "its communicator says";
        assert_eq!(
            refused(Facts { size: 5, ..facts }, 3),
            format!("{says} members 4 where this one says 5")
        );
        assert_eq!(refused(facts, 2), format!("{says} rank 3 where this one says 2"));
        assert!(refused(Facts { hosts: 0, ..facts }, 3).contains("other hosts"));
        assert!(refused(Facts { algorithms: 0, ..facts }, 3).contains("other algorithms"));
    }
}
