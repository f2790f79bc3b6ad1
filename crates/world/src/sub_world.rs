// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Worlds that consist of some ranks of another world.

use crate::{Error, Rank, TaskId, TaskPlacement, World, assign_in_task_order};

impl World {
    /// Returns the world of these ranks alone, numbered from 0 in their old order and seen from the
    /// same process.
    ///
    /// # Errors
    /// `RankOutOfRange` if this world does not have one of the ranks, or if its own rank is not
    /// among them; `DuplicateTask` if a rank is listed twice.
    pub fn sub_world(&self, ranks: &[Rank]) -> Result<Self, Error> {
        let size = self.size();
        // Use the old ranks as task numbers, to keep their order.
        let place = |rank: &Rank| {
            let seat =
                self.seats.get(rank.index()).ok_or(Error::RankOutOfRange { rank: *rank, size })?;
            Ok(TaskPlacement { task: TaskId(rank.0), host: seat.host.clone() })
        };
        // A world is always seen from one of its ranks.
        if !ranks.contains(&self.rank) {
            return Err(Error::RankOutOfRange { rank: self.rank, size: ranks.len() });
        }
        let places = ranks.iter().map(place).collect::<Result<Vec<_>, Error>>()?;
        let mut part = assign_in_task_order(self.generation, &places)?;
        for (rank, seat) in (0u32..).zip(&mut part.seats) {
            let old = Rank(seat.task.0);
            // The registrar knows tasks by their own numbers.
            seat.task = self.seats[old.index()].task;
            if old == self.rank {
                part.rank = Rank(rank);
            }
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Error, Generation, HostHash, Rank, TaskId, TaskPlacement, World, assign_in_task_order,
        assign_ranks,
    };

    /// Hosts a, b, a, b, a: ranks 0 to 2 are on a.
    fn world(rank: u32) -> World {
        let place = |task: u32| TaskPlacement {
            task: TaskId(task),
            host: HostHash(["a", "b"][task as usize % 2].into()),
        };
        let places: Vec<TaskPlacement> = (0..5).map(place).collect();
        assign_ranks(Generation(3), &places).unwrap().seen_from(Rank(rank)).unwrap()
    }

    #[test]
    fn ranks_keep_their_order_and_seats_are_counted_again() {
        let part = world(2).sub_world(&[Rank(4), Rank(2), Rank(1)]).unwrap();
        assert_eq!((part.size(), part.rank, part.generation), (3, Rank(1), Generation(3)));
        let tasks: Vec<u32> = part.seats.iter().map(|seat| seat.task.0).collect();
        assert_eq!(tasks, [2, 4, 3]);
        assert_eq!(
            (
                part.own_placement().local_size,
                part.own_placement().local_rank.0,
                part.own_placement().cross_size
            ),
            (2, 1, 1)
        );
        assert_eq!(part.seats[2].cross_rank.0, 1);
    }

    #[test]
    fn ranks_that_go_round_the_hosts_keep_their_order() {
        let place = |task: u32| TaskPlacement {
            task: TaskId(task),
            host: HostHash(["a", "b"][task as usize % 2].into()),
        };
        let places: Vec<TaskPlacement> = (0..5).map(place).collect();
        let whole =
            assign_in_task_order(Generation(3), &places).unwrap().seen_from(Rank(3)).unwrap();
        let part = whole.sub_world(&[Rank(0), Rank(1), Rank(2), Rank(3)]).unwrap();
        let tasks: Vec<u32> = part.seats.iter().map(|seat| seat.task.0).collect();
        assert_eq!((tasks, part.rank), (vec![0, 1, 2, 3], Rank(3)));
        assert_eq!((part.own_placement().local_rank.0, part.own_placement().cross_rank.0), (1, 1));
    }

    #[test]
    fn a_part_needs_the_looking_rank_and_only_ranks_that_exist_once_each() {
        let of = |ranks: &[u32]| {
            world(0).sub_world(&ranks.iter().copied().map(Rank).collect::<Vec<_>>())
        };
        assert_eq!(of(&[1, 2]), Err(Error::RankOutOfRange { rank: Rank(0), size: 2 }));
        assert_eq!(of(&[0, 9]), Err(Error::RankOutOfRange { rank: Rank(9), size: 5 }));
        assert!(matches!(of(&[0, 1, 1]), Err(Error::DuplicateTask { .. })));
    }
}
