// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rank assignment for a world that follows another.

use farandole_world::{HostHash, TaskId};

/// Returns the tasks by rank. Survivors keep their ranks if the new world has these ranks. Rank 0
/// is the lowest survivor. The other ranks go to survivors from the end of the old world, then to
/// newcomers, host by host.
pub(super) fn order_ranks(
    old: &[TaskId],
    survivors: &[TaskId],
    newcomers: &[TaskId],
    host: impl Fn(TaskId) -> Option<HostHash>,
) -> Vec<TaskId> {
    let size = survivors.len() + newcomers.len();
    let mut seats: Vec<Option<TaskId>> = vec![None; size];
    let mut moved = Vec::new();
    for (rank, task) in old.iter().enumerate().filter(|(_, task)| survivors.contains(task)) {
        match seats.get_mut(rank) {
            Some(seat) => *seat = Some(*task),
            // Its rank does not exist in the smaller world.
            None => moved.push(*task),
        }
    }
    // Rank 0 must be a survivor: it has the state that newcomers get (EL-3).
    if seats.first() == Some(&None)
        && let Some(lowest) = survivors.first()
    {
        for seat in &mut seats {
            seat.take_if(|task| task == lowest);
        }
        moved.retain(|task| task != lowest);
        seats[0] = Some(*lowest);
    }
    let mut hosts: Vec<Option<HostHash>> = Vec::new();
    let mut machines: Vec<Option<String>> = Vec::new();
    let machine =
        |host: &Option<HostHash>| host.as_ref().map(|host| host.machine_name().to_owned());
    for task in newcomers {
        let host = host(*task);
        if !machines.contains(&machine(&host)) {
            machines.push(machine(&host));
        }
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let mut grouped = newcomers.to_vec();
    // Containers of one machine are neighbors too, because they may share memory.
    grouped.sort_by_key(|task| {
        let host = host(*task);
        let on = machines.iter().position(|other| *other == machine(&host));
        (on, hosts.iter().position(|other| *other == host), *task)
    });
    let mut others = moved.into_iter().chain(grouped);
    seats.into_iter().filter_map(|seat| seat.or_else(|| others.next())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(old: &[u32], survivors: &[u32], newcomers: &[(u32, &str)]) -> Vec<u32> {
        let tasks = |numbers: &[u32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        let new: Vec<TaskId> = newcomers.iter().map(|(task, _)| TaskId(*task)).collect();
        let host = |task: TaskId| {
            newcomers
                .iter()
                .find(|(other, _)| *other == task.0)
                .map(|(_, host)| HostHash((*host).to_owned()))
        };
        order_ranks(&tasks(old), &tasks(survivors), &new, host).iter().map(|task| task.0).collect()
    }

    #[test]
    fn survivors_keep_their_ranks_and_newcomers_fill_the_gaps() {
        assert_eq!(ranks(&[0, 1, 2, 3], &[0, 2, 3], &[(7, "a")]), [0, 7, 2, 3]);
    }

    #[test]
    fn a_smaller_world_moves_only_its_last_ranks() {
        assert_eq!(ranks(&[0, 1, 2, 3], &[0, 2, 3], &[]), [0, 3, 2]);
    }

    #[test]
    fn rank_0_is_a_survivor() {
        assert_eq!(ranks(&[0, 1, 2, 3], &[1, 2, 3], &[(7, "a")]), [1, 7, 2, 3]);
        assert_eq!(ranks(&[0, 1, 2, 3], &[3], &[(7, "a"), (8, "a")]), [3, 7, 8]);
        assert_eq!(ranks(&[0, 1, 2, 3], &[3], &[]), [3]);
    }

    #[test]
    fn newcomers_of_one_host_follow_each_other() {
        assert_eq!(ranks(&[], &[], &[(0, "a"), (1, "b"), (2, "a"), (3, "b")]), [0, 2, 1, 3]);
    }

    #[test]
    fn newcomers_in_containers_of_one_machine_follow_each_other() {
        assert_eq!(
            ranks(&[], &[], &[(0, "m/1"), (1, "n/2"), (2, "m/3"), (3, "n/4")]),
            [0, 2, 1, 3]
        );
    }
}
