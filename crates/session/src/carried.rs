// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets of an elastic job, from one world to the next.
//!
//! A set is carried over with its number and those of its members that are in the next world; one
//! without any is gone. Workers that are new are in none of them. Every rank says what it knows of
//! the world that it has left, and the word of the lowest rank that has left one counts: so a
//! change that broke off in the middle stands or falls on all ranks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use farandole_registrar::{Client, Error as RegistrarError};
use farandole_world::{ProcessSetId, Rank, TaskId, World};

use crate::meeting::{Interrupted, SLICE};
use crate::{Error, Result};

/// The sets of a world that was left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Whether sets may be added and removed.
    pub(crate) dynamic: bool,
    /// The largest number so far.
    pub(crate) next: u32,
    /// Members by number, without the set of all ranks.
    pub(crate) sets: BTreeMap<ProcessSetId, Vec<TaskId>>,
    /// The sets that `init` was asked for, and that still exist.
    pub(crate) given: BTreeSet<ProcessSetId>,
}

impl Carried {
    /// A line with `dynamic` and `next`, then one for each set: its number, whether it was given,
    /// and its members.
    fn spelled(&self) -> String {
        let mut text = format!("{} {}", u8::from(self.dynamic), self.next);
        for (set, members) in &self.sets {
            text.push_str(&format!("\n{} {}", set.0, u8::from(self.given.contains(set))));
            members.iter().for_each(|task| text.push_str(&format!(" {}", task.0)));
        }
        text
    }

    /// `None` for what is no record.
    fn read(text: &str) -> Option<Self> {
        let mut lines =
            text.lines().map(|line| line.split(' ').map(|word| word.parse::<u32>().ok()));
        let mut first = lines.next()?;
        let mut carried =
            Self { dynamic: first.next()?? == 1, next: first.next()??, ..Self::default() };
        for mut line in lines {
            let set = ProcessSetId(line.next()??);
            if line.next()?? == 1 {
                carried.given.insert(set);
            }
            carried.sets.insert(set, line.map(|task| task.map(TaskId)).collect::<Option<_>>()?);
        }
        Some(carried)
    }

    /// The remaining ranks of each set in another world, by number.
    pub(crate) fn ranks(&self, world: &World) -> BTreeMap<ProcessSetId, Vec<Rank>> {
        let seats = || (0u32..).zip(&world.seats);
        let found = |members: &Vec<TaskId>| -> Vec<Rank> {
            seats()
                .filter(|(_, seat)| members.contains(&seat.task))
                .map(|(rank, _)| Rank(rank))
                .collect()
        };
        let left = self.sets.iter().map(|(set, members)| (*set, found(members)));
        left.filter(|(_, ranks)| !ranks.is_empty()).collect()
    }

    /// Numbers that are not taken by these sets, ascending.
    pub(crate) fn free(&self, sets: &BTreeMap<ProcessSetId, Vec<Rank>>) -> VecDeque<ProcessSetId> {
        (1..=self.next).map(ProcessSetId).filter(|set| !sets.contains_key(set)).collect()
    }
}

/// The sets that all ranks of a world use; `None` if no rank has left a world with its sets.
///
/// # Errors
/// `Interrupted`; what the registrar says.
pub(crate) fn agreed(
    client: &Client,
    world: &World,
    own: Option<&Carried>,
    deadline: Instant,
    interrupted: &mut Interrupted<'_>,
) -> Result<Option<Carried>> {
    // Parts of a world are disjoint, and so are their first members.
    let first = world.seats.first().map(|seat| seat.task.0).unwrap_or_default();
    let key = |rank: u32| format!("process_sets/{first}/{rank}");
    client.put(&key(world.rank.0), own.map(Carried::spelled).unwrap_or_default().as_bytes())?;
    for rank in (0u32..).take(world.size()) {
        let told = loop {
            match client.get(&key(rank), deadline.min(Instant::now() + SLICE)) {
                Err(RegistrarError::Timeout { .. }) if Instant::now() < deadline => {}
                other => break other?,
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
        };
        if let Some(carried) = Carried::read(&String::from_utf8_lossy(&told)) {
            return Ok(Some(carried));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, TaskPlace, assign};

    use super::*;

    fn carried() -> Carried {
        let tasks = |numbers: &[u32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        Carried {
            dynamic: true,
            next: 4,
            sets: BTreeMap::from([
                (ProcessSetId(1), tasks(&[0, 2])),
                (ProcessSetId(2), tasks(&[1])),
                (ProcessSetId(4), tasks(&[2, 3])),
            ]),
            given: BTreeSet::from([ProcessSetId(1)]),
        }
    }

    #[test]
    fn a_record_reads_as_it_was_written_and_garbage_as_none() {
        assert_eq!(Carried::read(&carried().spelled()), Some(carried()));
        assert_eq!(Carried::read(&Carried::default().spelled()), Some(Carried::default()));
        for garbage in ["", "1", "1 x", "1 2\n3", "1 2\n3 0 x"] {
            assert_eq!(Carried::read(garbage), None, "{garbage}");
        }
    }

    #[test]
    fn sets_are_formed_of_the_members_that_are_left_under_their_numbers() {
        let place = |task| TaskPlace { task: TaskId(task), host: HostHash("a".to_owned()) };
        let world =
            assign(Generation(2), &[0, 2, 3, 7].map(place)).unwrap().seen_from(Rank(0)).unwrap();
        let ranks = carried().ranks(&world);
        let rank = |task| world.seats.iter().position(|seat| seat.task == TaskId(task)).unwrap();
        let of = |tasks: &[u32]| {
            let mut ranks: Vec<Rank> =
                tasks.iter().map(|task| Rank(u32::try_from(rank(*task)).unwrap())).collect();
            ranks.sort_unstable();
            ranks
        };
        assert_eq!(
            ranks,
            BTreeMap::from([(ProcessSetId(1), of(&[0, 2])), (ProcessSetId(4), of(&[2, 3]))])
        );
        assert_eq!(carried().free(&ranks), [ProcessSetId(2), ProcessSetId(3)]);
    }
}
