// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The control tree: ranks of a machine below its first member, machines in a binomial tree below
//! member 0.

use std::collections::HashMap;

use farandole_world::{Rank, World};

/// One member's place in the tree of its set. Members are positions in the set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlTree {
    /// This member.
    pub me: u32,
    /// The member above; `None` for member 0.
    pub parent: Option<u32>,
    /// The members directly below, ascending.
    pub children: Vec<u32>,
    /// Members below each child, the child included, ascending; one list per child.
    pub below: Vec<Vec<u32>>,
    /// Members in my subtree, myself included, ascending.
    pub subtree: Vec<u32>,
    /// Number of hosts in the set.
    pub hosts: usize,
}

/// Returns the parent of every member, and the number of hosts.
pub fn control_parents(world: &World, members: &[Rank]) -> (Vec<Option<u32>>, usize) {
    // The machine and not the host: containers of one machine are hosts, but can share memory.
    let host = |rank: &Rank| world.seats.get(rank.index()).map(|seat| seat.host.machine_name());
    let mut leader_of = HashMap::new();
    let mut leaders: Vec<u32> = Vec::new();
    let parents = (0u32..)
        .zip(members)
        // Members ascend, so the first of each machine becomes its leader, on every rank alike.
        .map(|(member, rank)| match *leader_of.entry(host(rank)).or_insert(member) {
            leader if leader < member => Some(leader),
            _ => {
                let index = leaders.len();
                leaders.push(member);
                // Binomial: a leader's parent is its index without the lowest set bit.
                (index > 0).then(|| leaders[index & (index - 1)])
            }
        })
        .collect();
    (parents, leaders.len())
}

impl ControlTree {
    /// Returns the place of `me` in the tree, or `None` if it is not a member.
    pub fn new(world: &World, members: &[Rank], me: Rank) -> Option<Self> {
        let me = u32::try_from(members.iter().position(|rank| *rank == me)?).ok()?;
        let (parents, hosts) = control_parents(world, members);
        let all = || (0u32..).take(members.len());
        let children: Vec<u32> =
            all().filter(|member| parents[*member as usize] == Some(me)).collect();
        // A parent has a lower number than its child, so the walk up ends.
        let is_below = |top: u32, mut member: u32| loop {
            if member == top {
                return true;
            }
            match parents[member as usize] {
                Some(parent) => member = parent,
                None => return false,
            }
        };
        let below =
            |top: u32| -> Vec<u32> { all().filter(|member| is_below(top, *member)).collect() };
        Some(Self {
            me,
            parent: parents[me as usize],
            below: children.iter().map(|child| below(*child)).collect(),
            subtree: below(me),
            children,
            hosts,
        })
    }
}

/// Returns the ranks to which this world's rank needs a control link in a set of these members.
pub fn control_peers(world: &World, members: &[Rank]) -> Vec<Rank> {
    let Some(tree) = ControlTree::new(world, members, world.rank) else { return Vec::new() };
    tree.parent.iter().chain(&tree.children).map(|member| members[*member as usize]).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use farandole_world::{Generation, HostHash, TaskId, TaskPlacement, assign_ranks};

    use super::*;

    /// A world with this many ranks on each host.
    pub(crate) fn world(hosts: &[u32]) -> World {
        let mut places = Vec::new();
        for (host, ranks) in hosts.iter().enumerate() {
            for _ in 0..*ranks {
                let task = TaskId(u32::try_from(places.len()).unwrap());
                places.push(TaskPlacement { task, host: HostHash(format!("host{host}")) });
            }
        }
        assign_ranks(Generation(0), &places).unwrap()
    }

    fn ranks(count: u32) -> Vec<Rank> {
        (0..count).map(Rank).collect()
    }

    #[test]
    fn every_member_hangs_under_member_0_through_its_leader() {
        let world = world(&[2, 2, 2, 2, 2]);
        let tree = |rank| ControlTree::new(&world, &ranks(10), Rank(rank)).unwrap();
        assert_eq!(tree(0).children, [1, 2, 4, 8]);
        assert_eq!(tree(4).children, [5, 6]);
        assert_eq!((tree(6).parent, tree(7).parent, tree(8).parent), (Some(4), Some(6), Some(0)));
        assert_eq!(tree(4).subtree, [4, 5, 6, 7]);
        assert_eq!(tree(0).subtree.len(), 10);
    }

    #[test]
    fn links_are_wanted_by_both_ends() {
        let world = world(&[3, 1, 4, 1, 2]);
        let members: Vec<Rank> = [0, 2, 3, 5, 6, 8, 10].map(Rank).to_vec();
        for rank in &members {
            for peer in control_peers(&world.seen_from(*rank).unwrap(), &members) {
                assert!(control_peers(&world.seen_from(peer).unwrap(), &members).contains(rank));
            }
        }
        assert!(control_peers(&world.seen_from(Rank(1)).unwrap(), &members).is_empty());
    }

    #[test]
    fn the_coordinator_of_many_hosts_has_few_children() {
        let world = world(&[4; 64]);
        let tree = ControlTree::new(&world, &ranks(256), Rank(0)).unwrap();
        assert_eq!(tree.children.len(), 3 + 6, "three local ranks and log2 of 64 hosts");
    }
}
