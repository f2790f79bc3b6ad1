// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The first message on every link: it checks that both ends use the same communicator, and finds
//! the smallest ring.
//!
//! A mesh has a link between any two members. The minimum over the capacities that a member reads
//! from its links and receives from all others is therefore the minimum over the whole
//! communicator.
//!
//! No greeting goes over links that open at their first use, because the greeting would open all of
//! them. If the other links connect all members, and neighbours on these links have equal
//! parameters, all members have equal parameters. A member with other parameters fails here and
//! takes part in no operation. Opening an on-demand link checks that its rings are equally large on
//! both ends.

use super::chunk_sizes::UNIT_BYTES;
use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::{CrossoverTable, Result};

/// Version of the protocol on links. Increment it with every incompatible change.
const PROTOCOL_VERSION: u32 = 5;
const GREETING_MAGIC: u32 = u32::from_le_bytes(*b"frdl");

/// Job that exchanges greetings. A greeting is
/// `magic, protocol, size, rank, topology, algorithms: u32; capacity:
/// u64`, little endian, in one unit.
pub(super) struct GreetingJob {
    parameters: GreetingParameters,
    encoded: [u8; UNIT_BYTES],
    out: Vec<MessageProgress>,
    incoming: Vec<(MessageProgress, [u8; UNIT_BYTES])>,
}

impl GreetingJob {
    pub(super) fn new(peers: &PeerLinks, crossover: &CrossoverTable) -> Self {
        let parameters = GreetingParameters {
            size: u32::try_from(peers.member_count()).unwrap_or(u32::MAX),
            // A digest keeps the greeting at one unit for any number of hosts.
            hosts: fnv1a_digest(peers.hosts.host_sizes().into_iter().flat_map(usize::to_le_bytes)),
            algorithms: fnv1a_digest(crossover.to_string().into_bytes()),
        };
        let greeting = encode_greeting(
            parameters,
            peers.rank.0,
            u64::try_from(peers.capacity).unwrap_or(u64::MAX),
        );
        let links = peers.links.len();
        Self {
            parameters,
            encoded: greeting,
            out: vec![MessageProgress::new(UNIT_BYTES); links],
            incoming: vec![(MessageProgress::new(UNIT_BYTES), [0; UNIT_BYTES]); links],
        }
    }
}

/// Parameters on which all members must agree.
#[derive(Clone, Copy, Debug)]
struct GreetingParameters {
    size: u32,
    /// Digest of the number of members on each host.
    hosts: u32,
    /// Digest of the choice of algorithms.
    algorithms: u32,
}

/// Returns the FNV-1a digest, which detects accidental differences.
fn fnv1a_digest(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes
        .into_iter()
        .fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn greeting_fields(parameters: GreetingParameters, rank: u32) -> [(&'static str, u32); 6] {
    let GreetingParameters { size, hosts, algorithms } = parameters;
    [
        ("magic", GREETING_MAGIC),
        ("protocol", PROTOCOL_VERSION),
        ("members", size),
        ("rank", rank),
        ("hosts", hosts),
        ("algorithms", algorithms),
    ]
}

fn encode_greeting(parameters: GreetingParameters, rank: u32, capacity: u64) -> [u8; UNIT_BYTES] {
    let mut greeting = [0; UNIT_BYTES];
    for (at, (_, word)) in greeting_fields(parameters, rank).into_iter().enumerate() {
        greeting[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    greeting[24..32].copy_from_slice(&capacity.to_le_bytes());
    greeting
}

/// Returns the capacity in a greeting if all its other fields have the expected values.
fn decode_greeting(
    greeting: &[u8; UNIT_BYTES],
    parameters: GreetingParameters,
    rank: u32,
) -> Result<u64, String> {
    let word = |at: usize| {
        u32::from_le_bytes([greeting[at], greeting[at + 1], greeting[at + 2], greeting[at + 3]])
    };
    // Magic and version come first: the other numbers mean nothing in another version.
    for (k, (what, value)) in greeting_fields(parameters, rank).into_iter().enumerate() {
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

impl CollectiveJob for GreetingJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let parameters = self.parameters;
        let (mut any, mut done) = (false, true);
        let links = peers.links.iter_mut().zip(&mut self.out).zip(&mut self.incoming);
        for ((link, out), (message, theirs)) in
            links.filter(|((link, _), _)| !link.sender.is_on_demand())
        {
            let greeting = &self.encoded;
            any |= out.send_window(&mut *link.sender, |at, to| {
                to.copy_from_slice(&greeting[at..at + to.len()])
            })?;
            let arrived = message.receive_window(&mut *link.receiver, |at, from| {
                theirs[at..at + from.len()].copy_from_slice(from);
            })?;
            // The greeting is checked as soon as it arrives, not after the own greeting is sent: a
            // peer with an unexpected rank may never read the own greeting.
            if arrived && message.is_finished() {
                let capacity =
                    decode_greeting(theirs, parameters, link.peer.0).map_err(|reason| {
                        farandole_transport::Error::Frame { rank: link.peer, reason }
                    })?;
                peers.capacity =
                    peers.capacity.min(usize::try_from(capacity).unwrap_or(usize::MAX));
            }
            any |= arrived;
            done &= out.is_finished() && message.is_finished();
        }
        Ok(PollProgress { any, done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_decoded_and_a_wrong_one_names_the_difference() {
        let parameters = GreetingParameters { size: 4, hosts: 5, algorithms: 6 };
        let own = encode_greeting(parameters, 3, 1 << 33);
        assert_eq!(decode_greeting(&own, parameters, 3), Ok(1 << 33));
        let refused = |parameters, rank| decode_greeting(&own, parameters, rank).unwrap_err();
        let says = "its communicator says";
        assert_eq!(
            refused(GreetingParameters { size: 5, ..parameters }, 3),
            format!("{says} members 4 where this one says 5")
        );
        assert_eq!(refused(parameters, 2), format!("{says} rank 3 where this one says 2"));
        assert!(refused(GreetingParameters { hosts: 0, ..parameters }, 3).contains("other hosts"));
        assert!(
            refused(GreetingParameters { algorithms: 0, ..parameters }, 3)
                .contains("other algorithms")
        );
    }
}
