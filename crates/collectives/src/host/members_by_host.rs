// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Members, grouped by host.

use std::ops::Range;
use std::sync::Arc;

/// Members, grouped by host. The members of one host follow each other. If they do not, the host
/// counts as several hosts. This costs time and changes the order of sums, for all members in the
/// same way; it changes nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MembersByHost {
    /// First member of each host, and the number of members as the last entry.
    // Shared, because the schedule of each operation has a clone.
    starts: Arc<[usize]>,
    own: usize,
    largest: usize,
}

impl MembersByHost {
    /// Groups members by their host numbers, which are in member order.
    pub(super) fn new(numbers: &[u32], member: usize) -> Self {
        let starts: Arc<[usize]> = (0..numbers.len())
            .filter(|k| *k == 0 || numbers[*k] != numbers[k - 1])
            .chain([numbers.len()])
            .collect();
        let own = starts.partition_point(|start| *start <= member).saturating_sub(1);
        let largest = starts.windows(2).map(|host| host[1] - host[0]).max().unwrap_or(1);
        Self { starts, own, largest }
    }

    pub(super) fn host_count(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the host of this member.
    pub(super) fn own_host(&self) -> usize {
        self.own
    }

    pub(super) fn host_members(&self, host: usize) -> Range<usize> {
        self.starts[host]..self.starts[host + 1]
    }

    /// Returns the other members on the host of a member.
    pub(super) fn local_peers(&self, member: usize) -> impl Iterator<Item = usize> + use<> {
        self.host_members(self.host_of(member)).filter(move |other| *other != member)
    }

    pub(super) fn host_of(&self, member: usize) -> usize {
        self.starts.partition_point(|start| *start <= member).saturating_sub(1)
    }

    /// Returns the number of members on each host.
    pub(super) fn host_sizes(&self) -> Vec<usize> {
        (0..self.host_count()).map(|host| self.host_members(host).len()).collect()
    }

    /// Returns the number of members on the fullest host.
    pub(super) fn largest_host_size(&self) -> usize {
        self.largest
    }

    /// Returns the member that carries number `turn` on a host. The members of a host take turns.
    pub(super) fn carrier_for_turn(&self, host: usize, turn: usize) -> usize {
        let members = self.host_members(host);
        members.start + turn % members.len().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_follow_each_other_share_a_host() {
        let hosts = MembersByHost::new(&[7, 7, 3, 3, 3, 9], 3);
        assert_eq!((hosts.host_count(), hosts.own_host(), hosts.largest_host_size()), (3, 1, 3));
        assert_eq!((hosts.host_members(1), hosts.host_of(1), hosts.host_of(5)), (2..5, 0, 2));
        assert_eq!(hosts.local_peers(3).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(
            (0..4).map(|turn| hosts.carrier_for_turn(1, turn)).collect::<Vec<_>>(),
            [2, 3, 4, 2]
        );
        assert_eq!(MembersByHost::new(&[0, 1, 0, 1], 2).host_sizes(), [1; 4]);
    }
}
