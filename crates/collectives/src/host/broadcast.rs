// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Broadcast down a tree, pipelined through the windows of links. One tree connects the hosts, and
//! one member of each host receives for its host. Another tree connects the members within each
//! host.
//!
//! With few members the root sends to all: 1 step, and the root sends `(P - 1) * N` bytes. With
//! more members a small message uses a binomial tree with `log2 P` steps. A large message uses a
//! chain: the root sends to its successor and so on, and every member sends `N` bytes once, all at
//! the same time. Between more than two hosts a large message also uses a chain; otherwise the
//! root's network would carry the message several times.

use farandole_kernels::GatherList;
use farandole_transport::PACKET_PAYLOAD_BYTES;

use super::members_by_host::MembersByHost;
use super::message::MessageProgress;
use super::peer_links::{CollectiveJob, PeerLinks, PollProgress};
use crate::Result;

/// Most members to which the root sends directly.
const MAX_FLAT_MEMBERS: usize = 4;
/// Most hosts for which the host of the root sends to all others directly.
const MAX_FLAT_HOSTS: usize = 2;
/// Most bytes for a binomial tree: above, a chain is faster.
const MAX_BINOMIAL_BYTES: usize = 64 << 10;
/// Bytes that are sent to all children before the next bytes are read: they are still in the cache.
const BROADCAST_PIECE_BYTES: usize = PACKET_PAYLOAD_BYTES;

pub(super) struct BroadcastJob {
    /// Link towards the root; `None` at the root.
    parent: Option<usize>,
    /// Links away from the root.
    children: Vec<usize>,
    inputs: GatherList,
    outputs: GatherList,
    /// Progress of the message, the same on all links.
    message: MessageProgress,
}

impl BroadcastJob {
    pub(super) fn new(
        peers: &PeerLinks,
        root: usize,
        inputs: GatherList,
        outputs: GatherList,
    ) -> Self {
        let bytes = outputs.len();
        let (parent, children) = parent_and_children(&peers.hosts, peers.member, root, bytes);
        Self {
            parent: parent.map(|member| peers.link_to(member)),
            children: children.into_iter().map(|member| peers.link_to(member)).collect(),
            inputs,
            outputs,
            message: MessageProgress::new(bytes),
        }
    }

    /// Returns the number of bytes that can pass through every window in one step.
    fn bytes_ready_on_all_links(&self, peers: &mut PeerLinks) -> Result<usize> {
        let mut ready = self.message.remaining_bytes().min(BROADCAST_PIECE_BYTES);
        if let Some(parent) = self.parent {
            ready = ready.min(peers.links[parent].receiver.window()?.len());
        }
        for child in &self.children {
            // Asking for a window that cannot be used would ask the reader of the ring for a
            // wake-up.
            if ready == 0 {
                break;
            }
            ready = ready.min(peers.links[*child].sender.window()?.len());
        }
        Ok(ready)
    }
}

/// Parent of a position in a tree, and its children.
type TreeNeighbours = (Option<usize>, Vec<usize>);

/// Returns the member from which this member receives, and the members to which it sends.
fn parent_and_children(
    hosts: &MembersByHost,
    member: usize,
    root: usize,
    bytes: usize,
) -> TreeNeighbours {
    let host = hosts.host_of(member);
    let first = hosts.host_of(root);
    let members = hosts.host_members(host);
    // The member that receives from another host. On the host of the root, it is the root.
    let fed = if host == first { root } else { members.start };
    let turned =
        |tree: fn(usize, usize) -> TreeNeighbours, size: usize, own: usize, first: usize| {
            let (parent, children) = tree((own + size - first) % size, size);
            let back = move |position: usize| (position + first) % size;
            (parent.map(back), children.into_iter().map(back).collect::<Vec<usize>>())
        };
    let (size, start) = (members.len(), members.start);
    let within =
        turned(choose_tree(size, MAX_FLAT_MEMBERS, bytes), size, member - start, fed - start);
    let mut parent = within.0.map(|place| start + place);
    let mut children: Vec<usize> = Vec::new();
    if member == fed {
        let count = hosts.host_count();
        let between = turned(choose_tree(count, MAX_FLAT_HOSTS, bytes), count, host, first);
        let entrance = |host: usize| hosts.host_members(host).start;
        parent = between.0.map(|host| if host == first { root } else { entrance(host) });
        children.extend(between.1.into_iter().map(entrance));
    }
    children.extend(within.1.into_iter().map(|place| start + place));
    (parent, children)
}

fn choose_tree(size: usize, flat_up_to: usize, bytes: usize) -> fn(usize, usize) -> TreeNeighbours {
    if size <= flat_up_to {
        flat_tree_neighbours
    } else if bytes <= MAX_BINOMIAL_BYTES {
        binomial_tree_neighbours
    } else {
        chain_tree_neighbours
    }
}

fn flat_tree_neighbours(position: usize, size: usize) -> TreeNeighbours {
    if position == 0 { (None, (1..size).collect()) } else { (Some(0), Vec::new()) }
}

fn chain_tree_neighbours(position: usize, size: usize) -> TreeNeighbours {
    (position.checked_sub(1), (position + 1..size).take(1).collect())
}

/// Returns the neighbours in a binomial tree. The parent has the position without the lowest set
/// bit. The children have the position plus one lower bit, the largest subtree first.
fn binomial_tree_neighbours(position: usize, size: usize) -> TreeNeighbours {
    let lowest =
        if position == 0 { size.next_power_of_two() } else { 1 << position.trailing_zeros() };
    let parent = (position > 0).then(|| position - lowest);
    let bits =
        std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|bit| *bit > 0);
    (parent, bits.map(|bit| position + bit).filter(|child| *child < size).collect())
}

impl CollectiveJob for BroadcastJob {
    fn poll(&mut self, peers: &mut PeerLinks) -> Result<PollProgress> {
        let ready = self.bytes_ready_on_all_links(peers)?;
        if ready > 0 {
            let (at, payload) = (self.message.moved_bytes(), self.message.unpadded_bytes_of(ready));
            let PeerLinks { links, copies, .. } = &mut *peers;
            for child in &self.children {
                let copies = &mut copies[*child];
                match self.parent {
                    None => {
                        let to = &mut links[*child].sender.window()?[..payload];
                        copies.copy_from_list(&self.inputs, at, to);
                    }
                    Some(parent) => {
                        let Ok([from, to]) = links.get_disjoint_mut([parent, *child]) else {
                            continue;
                        };
                        let from = &from.receiver.window()?[..payload];
                        copies.copy_bytes(from, &mut to.sender.window()?[..payload]);
                    }
                }
                let sender = &mut links[*child].sender;
                // The ring still holds bytes of an earlier message.
                sender.window()?[payload..ready].fill(0);
                sender.commit(ready)?;
            }
            if let Some(parent) = self.parent {
                let receiver = &mut peers.links[parent].receiver;
                self.outputs.write_at(at, &receiver.window()?[..payload]);
                receiver.release(ready)?;
            }
            self.message.advance_by(ready);
        }
        let done = self.message.is_finished();
        // After the sends, because all other members wait for these.
        if done && self.parent.is_none() {
            self.inputs.copy_into(&self.outputs);
        }
        Ok(PollProgress { any: ready > 0, done })
    }

    fn used_links(&self, _peers: &PeerLinks) -> Vec<usize> {
        let mut links: Vec<usize> = self.children.iter().copied().chain(self.parent).collect();
        links.sort_unstable();
        links
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tree_reaches_every_member_once_and_agrees_on_parents() {
        for tree in [flat_tree_neighbours, chain_tree_neighbours, binomial_tree_neighbours] {
            for size in 1..20 {
                let mut fed = vec![0; size];
                for position in 0..size {
                    for child in tree(position, size).1 {
                        fed[child] += 1;
                        assert_eq!(tree(child, size).0, Some(position));
                    }
                }
                assert_eq!(fed[0], 0);
                assert!(fed[1..].iter().all(|times| *times == 1), "{fed:?}");
            }
        }
    }
    #[test]
    fn every_member_is_fed_once_from_any_root_and_every_host_once_over_the_network() {
        for numbers in
            [&[0, 0, 0][..], &[0, 0, 1], &[0, 1, 2, 3, 4, 5], &[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3]]
        {
            let hosts = MembersByHost::new(numbers, 0);
            for bytes in [1, MAX_BINOMIAL_BYTES + 1] {
                for root in 0..numbers.len() {
                    let (mut fed, mut crossed) = (vec![0; numbers.len()], 0);
                    for member in 0..numbers.len() {
                        for child in parent_and_children(&hosts, member, root, bytes).1 {
                            fed[child] += 1;
                            crossed += usize::from(hosts.host_of(child) != hosts.host_of(member));
                            assert_eq!(
                                parent_and_children(&hosts, child, root, bytes).0,
                                Some(member)
                            );
                        }
                    }
                    let expected: Vec<usize> =
                        (0..numbers.len()).map(|k| usize::from(k != root)).collect();
                    assert_eq!(
                        (fed, crossed),
                        (expected, hosts.host_count() - 1),
                        "{numbers:?} from {root}"
                    );
                }
            }
        }
    }
}
