// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Assignment of ranks to registered tasks.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{
    CrossRank, Error, Generation, HostHash, LocalRank, Rank, RankPlacement, TaskId, World,
};

/// A task and the host it runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPlacement {
    /// The task.
    pub task: TaskId,
    /// Its host.
    pub host: HostHash,
}

/// Groups tasks by host and hosts by machine, orders machines, hosts and local ranks by their
/// lowest task, and numbers the result.
/// The returned world is seen from rank 0.
///
/// # Errors
/// `DuplicateTask` if two placements have the same task; `RankOutOfRange` if there is no task.
pub fn assign_ranks(generation: Generation, places: &[TaskPlacement]) -> Result<World, Error> {
    let mut sorted: Vec<&TaskPlacement> = places.iter().collect();
    sorted.sort_by_key(|place| place.task);
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].task == pair[1].task) {
        return Err(Error::DuplicateTask { task: pair[0].task });
    }
    if sorted.is_empty() {
        return Err(Error::RankOutOfRange { rank: Rank(0), size: 0 });
    }
    // A list beside the map: the order of a hash map would differ between processes.
    let mut order: Vec<&HostHash> = Vec::new();
    let mut tasks: HashMap<&HostHash, Vec<TaskId>> = HashMap::new();
    for place in sorted {
        tasks.entry(&place.host).or_insert_with(|| {
            order.push(&place.host);
            Vec::new()
        });
        tasks.entry(&place.host).or_default().push(place.task);
    }
    let mut machines: HashMap<&str, usize> = HashMap::new();
    // A stable sort: hosts of one machine become neighbours, and keep their order otherwise.
    order.sort_by_cached_key(|host| {
        let next = machines.len();
        *machines.entry(host.machine_name()).or_insert(next)
    });
    let mut cross_sizes: BTreeMap<u32, u32> = BTreeMap::new();
    let mut seats = Vec::with_capacity(places.len());
    for host in order {
        let members = &tasks[host];
        for (local_rank, task) in (0u32..).zip(members) {
            let cross = cross_sizes.entry(local_rank).or_default();
            seats.push(RankPlacement {
                task: *task,
                host: host.clone(),
                local_rank: LocalRank(local_rank),
                local_size: u32::try_from(members.len()).unwrap_or(u32::MAX),
                cross_rank: CrossRank(*cross),
                cross_size: 0,
            });
            *cross += 1;
        }
    }
    for seat in &mut seats {
        // Known only after all hosts: a host with fewer ranks lacks the higher local ranks.
        seat.cross_size = cross_sizes[&seat.local_rank.0];
    }
    Ok(World { generation, rank: Rank(0), seats })
}

/// Gives every task the rank of its position among the sorted tasks, whatever the hosts: for ranks
/// that were assigned before any task registered. Local ranks have the order of the ranks on a
/// host, and cross ranks have the order of the ranks with one local rank. The returned world is
/// seen from rank 0.
///
/// # Errors
/// Like [`assign_ranks`].
pub fn assign_in_task_order(
    generation: Generation,
    places: &[TaskPlacement],
) -> Result<World, Error> {
    let mut sorted: Vec<&TaskPlacement> = places.iter().collect();
    sorted.sort_by_key(|place| place.task);
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].task == pair[1].task) {
        return Err(Error::DuplicateTask { task: pair[0].task });
    }
    if sorted.is_empty() {
        return Err(Error::RankOutOfRange { rank: Rank(0), size: 0 });
    }
    Ok(world_from_ordered_placements(generation, sorted))
}

/// Gives the tasks ranks in the order of `places`, whatever the hosts: for a world that keeps the
/// ranks of the previous one. Local ranks have the order of the ranks on a host, and cross ranks
/// have the order of the ranks with one local rank. The returned world is seen from rank 0.
///
/// # Errors
/// Like [`assign_ranks`].
pub fn assign_ranks_as_listed(
    generation: Generation,
    places: &[TaskPlacement],
) -> Result<World, Error> {
    let mut seen = HashSet::with_capacity(places.len());
    if let Some(place) = places.iter().find(|place| !seen.insert(place.task)) {
        return Err(Error::DuplicateTask { task: place.task });
    }
    if places.is_empty() {
        return Err(Error::RankOutOfRange { rank: Rank(0), size: 0 });
    }
    Ok(world_from_ordered_placements(generation, places.iter().collect()))
}

/// Returns the world whose ranks are the positions in `places`.
fn world_from_ordered_placements(generation: Generation, places: Vec<&TaskPlacement>) -> World {
    let mut local_sizes: HashMap<&HostHash, u32> = HashMap::new();
    let mut cross_sizes: HashMap<u32, u32> = HashMap::new();
    let mut seats = Vec::with_capacity(places.len());
    for place in &places {
        let local = local_sizes.entry(&place.host).or_default();
        let cross = cross_sizes.entry(*local).or_default();
        seats.push(RankPlacement {
            task: place.task,
            host: place.host.clone(),
            local_rank: LocalRank(*local),
            local_size: 0,
            cross_rank: CrossRank(*cross),
            cross_size: 0,
        });
        *local += 1;
        *cross += 1;
    }
    for (seat, place) in seats.iter_mut().zip(places) {
        seat.local_size = local_sizes[&place.host];
        seat.cross_size = cross_sizes[&seat.local_rank.0];
    }
    World { generation, rank: Rank(0), seats }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(task: u32, host: &str) -> TaskPlacement {
        TaskPlacement { task: TaskId(task), host: HostHash(host.into()) }
    }

    #[test]
    fn hosts_follow_their_lowest_task_and_local_ranks_follow_task_order() {
        let world = assign_ranks(
            Generation(1),
            &[place(3, "b"), place(0, "b"), place(1, "a"), place(2, "a")],
        )
        .unwrap();
        let tasks: Vec<u32> = world.seats.iter().map(|seat| seat.task.0).collect();
        assert_eq!(tasks, [0, 3, 1, 2]);
        assert_eq!(world.seats[3].cross_rank, CrossRank(1));
        assert!(world.is_homogeneous());
    }

    #[test]
    fn a_task_registered_twice_is_refused() {
        assert_eq!(
            assign_ranks(Generation(0), &[place(1, "a"), place(1, "b")]),
            Err(Error::DuplicateTask { task: TaskId(1) })
        );
    }

    #[test]
    fn containers_of_a_machine_follow_each_other() {
        let hosts = ["m/1", "n/2", "m/3", "n/4", "m/1"];
        let places: Vec<TaskPlacement> =
            (0u32..).zip(hosts).map(|(task, host)| place(task, host)).collect();
        let world = assign_ranks(Generation(0), &places).unwrap();
        let seats =
            world.seats.iter().map(|seat| (seat.task.0, seat.host.0.as_str(), seat.local_size));
        let expected = [(0, "m/1", 2), (4, "m/1", 2), (2, "m/3", 1), (1, "n/2", 1), (3, "n/4", 1)];
        assert_eq!(seats.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ranks_that_are_given_out_go_round_the_hosts_as_they_did() {
        let world = assign_in_task_order(
            Generation(1),
            &[place(3, "a"), place(0, "a"), place(1, "b"), place(2, "b")],
        )
        .unwrap();
        let seats: Vec<(u32, u32, u32)> = world
            .seats
            .iter()
            .map(|seat| (seat.task.0, seat.local_rank.0, seat.cross_rank.0))
            .collect();
        assert_eq!(seats, [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]);
        assert!(assign_in_task_order(Generation(1), &[]).is_err());
        assert!(assign_in_task_order(Generation(1), &[place(1, "a"), place(1, "b")]).is_err());
    }

    proptest! {
        /// W-1, W-3, W-4.
        #[test]
        fn a_rank_given_out_is_the_task_and_every_seat_is_addressed_once(
            hosts in prop::collection::vec(0u8..5, 1..24), turn: prop::sample::Index
        ) {
            let mut places: Vec<TaskPlacement> =
                (0u32..).zip(&hosts).map(|(task, host)| place(task, &host.to_string())).collect();
            let world = assign_in_task_order(Generation(0), &places).unwrap();
            places.rotate_left(turn.index(hosts.len()));
            prop_assert_eq!(&assign_in_task_order(Generation(0), &places).unwrap(), &world);
            let mut locals = std::collections::HashSet::new();
            let mut crosses = std::collections::HashSet::new();
            for (rank, seat) in (0u32..).zip(&world.seats) {
                prop_assert_eq!(seat.task, TaskId(rank));
                prop_assert!(seat.local_rank.0 < seat.local_size && seat.cross_rank.0 < seat.cross_size);
                prop_assert!(locals.insert((&seat.host, seat.local_rank)));
                prop_assert!(crosses.insert((seat.cross_rank, seat.local_rank)));
                prop_assert_eq!(world.ranks_on_host(&seat.host).len(), seat.local_size as usize);
            }
        }

        /// Checks that both rules give one world if the tasks of each host are consecutive.
        #[test]
        fn both_rules_agree_where_tasks_of_a_host_follow_each_other(sizes in prop::collection::vec(1usize..5, 1..6)) {
            let hosts = sizes.iter().enumerate().flat_map(|(host, size)| std::iter::repeat_n(host, *size));
            let places: Vec<TaskPlacement> =
                (0u32..).zip(hosts).map(|(task, host)| place(task, &host.to_string())).collect();
            prop_assert_eq!(assign_ranks(Generation(0), &places), assign_in_task_order(Generation(0), &places));
        }

        /// W-1, W-2, W-3.
        #[test]
        fn any_registration_order_gives_one_consistent_world(hosts in prop::collection::vec(0u8..5, 1..24), seed: u64) {
            let places: Vec<TaskPlacement> = (0u32..).zip(&hosts).map(|(task, host)| place(task, &host.to_string())).collect();
            let world = assign_ranks(Generation(0), &places).unwrap();
            let mut shuffled = places.clone();
            let turn = usize::try_from(seed % hosts.len() as u64).unwrap();
            shuffled.rotate_left(turn);
            prop_assert_eq!(&assign_ranks(Generation(0), &shuffled).unwrap(), &world);
            prop_assert_eq!(&world.seats[0].host, &places[0].host);
            for host in world.host_hashes() {
                let ranks = world.ranks_on_host(&host);
                prop_assert!(ranks.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1));
                prop_assert_eq!(ranks.len(), world.seats[ranks[0].index()].local_size as usize);
            }
            for seat in &world.seats {
                prop_assert!(seat.local_rank.0 < seat.local_size && seat.cross_rank.0 < seat.cross_size);
            }
        }
    }
}
