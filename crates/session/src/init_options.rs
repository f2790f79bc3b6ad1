// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The arguments of `init`, and the checks that need no other ranks.

use std::fmt;

use farandole_world::{Rank, World};

use crate::{Error, Result};

/// The arguments of `init`; all ranks that form a world must pass the same.
#[derive(Clone, Debug, Default)]
pub struct InitOptions {
    /// Ranks of the launched world that form this one, renumbered in their order; `None`: all.
    pub ranks: Option<Vec<u32>>,
    /// Initial process sets, by ranks of the new world. They get the numbers 1, 2 and so on.
    pub process_sets: Vec<Vec<u32>>,
    /// Whether process sets may be added and removed later.
    pub dynamic: bool,
    /// The world and the rank of this process in it, if the caller assigns them instead of the
    /// environment.
    pub assigned_rank: Option<AssignedRank>,
}

/// A rank that the owner of another communicator assigns: see [`crate::host_registrar`].
#[derive(Clone)]
pub struct AssignedRank {
    /// The ticket that rank 0 got from [`crate::host_registrar`].
    pub ticket: String,
    /// The rank of this process.
    pub rank: u32,
}

impl fmt::Debug for AssignedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The ticket is a secret and must not appear in a log.
        f.debug_struct("Told").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl InitOptions {
    /// Returns the ranks of this world that form the new one, ascending; `None` when all do.
    ///
    /// # Errors
    /// `InvalidRanks`, and `NotInWorld` when the calling rank is left out.
    pub(crate) fn selected_ranks(&self, world: &World) -> Result<Option<Vec<Rank>>> {
        let Some(ranks) = &self.ranks else { return Ok(None) };
        let ranks = checked_sorted_ranks("the ranks of a world", ranks, world.size())?;
        match ranks.contains(&world.rank) {
            // A list of all ranks is the same request as no list, so both kinds of ranks form one
            // world.
            _ if ranks.len() == world.size() => Ok(None),
            true => Ok(Some(ranks)),
            false => Err(Error::NotInWorld { rank: world.rank, ranks }),
        }
    }
}

/// Returns distinct ranks of a world of `size`, ascending.
///
/// # Errors
/// `InvalidRanks` with `what` if a rank is repeated or out of range, or if there are none.
pub(crate) fn checked_sorted_ranks(what: &str, ranks: &[u32], size: usize) -> Result<Vec<Rank>> {
    let mut sorted: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let known = sorted.last().is_some_and(|last| last.index() < size);
    if sorted.len() == ranks.len() && known {
        return Ok(sorted);
    }
    Err(Error::InvalidRanks { what: what.to_owned(), size, ranks: ranks.to_vec() })
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, TaskId, TaskPlacement, assign_ranks};

    use super::*;

    fn part(rank: u32, ranks: &[u32]) -> Result<Option<Vec<Rank>>> {
        let place = |task| TaskPlacement { task: TaskId(task), host: HostHash("a".to_owned()) };
        let world = assign_ranks(Generation(0), &(0..3).map(place).collect::<Vec<_>>()).unwrap();
        let options = InitOptions { ranks: Some(ranks.to_vec()), ..InitOptions::default() };
        options.selected_ranks(&world.seen_from(Rank(rank)).unwrap())
    }

    #[test]
    fn ranks_are_a_part_in_any_order_or_all() {
        assert_eq!(part(2, &[2, 0]).unwrap(), Some(vec![Rank(0), Rank(2)]));
        assert_eq!(part(2, &[2, 0, 1]).unwrap(), None);
    }

    #[test]
    fn a_rank_that_is_left_out_and_ranks_that_do_not_exist_are_named() {
        let message = |rank, ranks: &[u32]| part(rank, ranks).unwrap_err().to_string();
        assert_eq!(
            message(1, &[2, 0]),
            "rank 1 is not among the ranks that init was asked for: 0, 2"
        );
        let wrong = "the ranks of a world must be at least one rank of 0 to 2, each once: ";
        assert_eq!(message(0, &[0, 3]), format!("{wrong}[0, 3]"));
        assert_eq!(message(0, &[0, 0]), format!("{wrong}[0, 0]"));
        assert_eq!(message(0, &[]), format!("{wrong}[]"));
    }
}
