// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Chooses the ranks that exchange heartbeats.
//!
//! Ranks of a machine watch each other. Machines form a ring with chords: each machine is connected
//! with the machines that are 1, 2, 4, 8, ... positions away in both directions. Rank `i` of a
//! machine exchanges heartbeats with rank `i` of each connected machine. If one of the two machines
//! has fewer ranks, its ranks are counted again from the first. A rank receives reports of all
//! other losses from these peers ([`service`](crate::service)).
//!
//! - The number of peers on other machines grows with the logarithm of the number of machines.
//! - The ranks with the same index on all machines stay connected with each other after the loss of
//!   any three of these machines. A tree would be cut by the first loss.
//! - With up to five machines, and with seven, every machine is connected with every other.

use std::collections::{BTreeSet, HashMap};

use farandole_world::Rank;

/// The ranks of each machine, ascending. Machines are ordered by their first ranks.
#[derive(Debug)]
pub(crate) struct HeartbeatTopology {
    machines: Vec<Vec<Rank>>,
}

impl HeartbeatTopology {
    /// Builds the topology from the machine name of each rank, in rank order.
    pub(crate) fn new<'a>(machines: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut places, mut circle) = (HashMap::new(), Vec::<Vec<Rank>>::new());
        for (rank, machine) in (0u32..).map(Rank).zip(machines) {
            let place = *places.entry(machine).or_insert(circle.len());
            match circle.get_mut(place) {
                Some(ranks) => ranks.push(rank),
                None => circle.push(vec![rank]),
            }
        }
        Self { machines: circle }
    }

    /// Returns the ranks with which a rank exchanges heartbeats, unless it shares memory with them.
    pub(crate) fn heartbeat_peers(&self, own: Rank) -> BTreeSet<Rank> {
        let found = self.machines.iter().enumerate().find_map(|(place, ranks)| {
            ranks.iter().position(|rank| *rank == own).map(|number| (place, number, ranks))
        });
        let Some((place, number, near)) = found else { return BTreeSet::new() };
        let mut peers: BTreeSet<Rank> = near.iter().copied().filter(|rank| *rank != own).collect();
        for far in neighbour_machines(self.machines.len(), place)
            .into_iter()
            .map(|place| &self.machines[place])
        {
            // Both machines compute the same pairs from the same two sizes, so each pair agrees on
            // it.
            let turns = 0..near.len().max(far.len());
            peers.extend(
                turns.filter(|turn| turn % near.len() == number).map(|turn| far[turn % far.len()]),
            );
        }
        peers
    }

    /// Returns whether all ranks watch each other, so that no rank relies on reports of others.
    pub(crate) fn is_fully_connected(&self) -> bool {
        let count = self.machines.len();
        // Ranks watch only their counterparts on other machines. If two machines have several
        // ranks, some pairs of ranks do not watch each other.
        let shared = self.machines.iter().filter(|ranks| ranks.len() > 1).count();
        neighbour_machines(count, 0).len() + 1 >= count && (count == 1 || shared <= 1)
    }
}

/// Returns the positions in a ring of `count` machines that are connected with the machine at
/// `place`.
fn neighbour_machines(count: usize, place: usize) -> BTreeSet<usize> {
    let steps =
        std::iter::successors(Some(1), |step| Some(step * 2)).take_while(|step| *step < count);
    let joined = steps.flat_map(|step| [(place + step) % count, (place + count - step) % count]);
    joined.filter(|other| *other != place).collect()
}

/// Returns the ranks with which a rank exchanges heartbeats if ranks of one machine share no
/// memory. `machines` names the machine of each rank.
pub fn heartbeat_peers(machines: &[&str], own: Rank) -> BTreeSet<Rank> {
    HeartbeatTopology::new(machines.iter().copied()).heartbeat_peers(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a topology with this many ranks on each machine.
    fn circle(ranks: &[u32]) -> HeartbeatTopology {
        let mut next = 0..;
        let machines =
            ranks.iter().map(|count| next.by_ref().take(*count as usize).map(Rank).collect());
        HeartbeatTopology { machines: machines.collect() }
    }

    fn all(circle: &HeartbeatTopology) -> Vec<Rank> {
        circle.machines.iter().flatten().copied().collect()
    }

    /// Returns the largest number of hops from the first machine that is not in `lost` to any other
    /// machine; `None` if one cannot be reached.
    fn hops(count: usize, lost: &[usize]) -> Option<usize> {
        let mut seen: BTreeSet<usize> = lost.iter().copied().collect();
        let start = (0..count).find(|place| !seen.contains(place))?;
        let (mut hops, mut last) = (0, vec![start]);
        seen.insert(start);
        while seen.len() < count {
            let mut next: Vec<usize> = last
                .iter()
                .flat_map(|place| neighbour_machines(count, *place))
                .filter(|to| !seen.contains(to))
                .collect();
            next.sort_unstable();
            next.dedup();
            if next.is_empty() {
                return None;
            }
            seen.extend(&next);
            (hops, last) = (hops + 1, next);
        }
        Some(hops)
    }

    #[test]
    fn machines_are_distinguished_by_name_wherever_their_ranks_are() {
        let circle = HeartbeatTopology::new(["b", "a", "b", "c", "a"]);
        assert_eq!(
            circle.machines,
            [vec![Rank(0), Rank(2)], vec![Rank(1), Rank(4)], vec![Rank(3)]]
        );
        assert_eq!(circle.heartbeat_peers(Rank(2)), [Rank(0), Rank(3), Rank(4)].into());
        assert_eq!(circle.heartbeat_peers(Rank(3)), [0, 1, 2, 4].map(Rank).into());
        assert!(circle.heartbeat_peers(Rank(5)).is_empty());
    }

    #[test]
    fn heartbeats_are_wanted_by_both_ends_and_reach_every_joined_machine() {
        for ranks in
            [&[1][..], &[3], &[2, 2], &[4, 1, 2], &[1, 5, 3, 2, 2, 7, 1], &[8; 10], &[1; 23]]
        {
            let circle = circle(ranks);
            for rank in all(&circle) {
                let peers = circle.heartbeat_peers(rank);
                assert!(
                    peers.iter().all(|peer| circle.heartbeat_peers(*peer).contains(&rank)),
                    "{ranks:?} {rank}"
                );
                let place = circle.machines.iter().position(|ranks| ranks.contains(&rank)).unwrap();
                for other in neighbour_machines(ranks.len(), place) {
                    assert!(
                        circle.machines[other].iter().any(|peer| peers.contains(peer)),
                        "{ranks:?} {rank}"
                    );
                }
                assert!(
                    circle.machines[place].iter().all(|near| *near == rank || peers.contains(near))
                );
            }
        }
    }

    #[test]
    fn a_rank_of_64_hosts_with_8_ranks_exchanges_heartbeats_with_11_ranks_of_other_hosts() {
        let circle = circle(&[8; 64]);
        for rank in all(&circle) {
            assert_eq!(circle.heartbeat_peers(rank).len(), 7 + 11);
        }
        let names: Vec<String> = (0..512).map(|rank| format!("host-{}", rank / 8)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(heartbeat_peers(&names, Rank(77)), circle.heartbeat_peers(Rank(77)));
    }

    #[test]
    fn a_rank_that_relies_on_no_report_is_a_peer_of_all() {
        for ranks in [
            &[1][..],
            &[8],
            &[1, 1],
            &[8, 1],
            &[8, 2],
            &[1; 5],
            &[1; 6],
            &[1; 7],
            &[1; 8],
            &[1, 1, 3, 1],
        ] {
            let circle = circle(ranks);
            let size = all(&circle).len();
            let complete =
                all(&circle).into_iter().all(|rank| circle.heartbeat_peers(rank).len() == size - 1);
            assert_eq!(circle.is_fully_connected(), complete, "{ranks:?}");
        }
    }

    #[test]
    fn machines_stay_connected_when_any_three_are_lost() {
        for count in 5..=14 {
            for one in 0..count {
                for two in 0..one {
                    for three in 0..two {
                        assert!(
                            hops(count, &[one, two, three]).is_some(),
                            "{count}: {one} {two} {three}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn news_of_a_loss_takes_few_steps() {
        let most = [(5, 1), (8, 2), (64, 3), (512, 5), (4096, 6)];
        assert_eq!(most.map(|(count, _)| (count, hops(count, &[]).unwrap())), most);
    }
}
