// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Process sets of an elastic job, from one world to the next.
//!
//! A set keeps its number and those members that are in the next world; a set without any such
//! member ends. New workers are in no carried set. Every rank publishes its sets of the previous
//! world, and the lowest rank that has left a world decides: so an interrupted change of the sets
//! is either complete or undone on all ranks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use farandole_registrar::{Error as RegistrarError, TaskClient};
use farandole_world::{ProcessSetId, Rank, TaskId, World};

use crate::registrar_rendezvous::{INTERRUPT_POLL_INTERVAL, InterruptCheck};
use crate::{Error, Result};

/// The process sets of the world that a process left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CarriedProcessSets {
    /// Whether sets may be added and removed.
    pub(crate) dynamic: bool,
    /// The largest number so far.
    pub(crate) last_id: u32,
    /// Members by number, without the set of all ranks.
    pub(crate) sets: BTreeMap<ProcessSetId, Vec<TaskId>>,
    /// The sets that `init` was asked for, and that still exist.
    pub(crate) from_init: BTreeSet<ProcessSetId>,
}

impl CarriedProcessSets {
    /// Formats a first line with `dynamic` and `last_id`, then a line for each set: its number,
    /// whether `init` requested it, and its members.
    fn to_text(&self) -> String {
        let mut text = format!("{} {}", u8::from(self.dynamic), self.last_id);
        for (set, members) in &self.sets {
            text.push_str(&format!("\n{} {}", set.0, u8::from(self.from_init.contains(set))));
            // Task numbers, not ranks: the ranks of the next world are different.
            members.iter().for_each(|task| text.push_str(&format!(" {}", task.0)));
        }
        text
    }

    /// Parses the text of [`Self::to_text`]; `None` if `text` is empty or malformed.
    fn from_text(text: &str) -> Option<Self> {
        let mut lines =
            text.lines().map(|line| line.split(' ').map(|word| word.parse::<u32>().ok()));
        let mut first = lines.next()?;
        let mut carried =
            Self { dynamic: first.next()?? == 1, last_id: first.next()??, ..Self::default() };
        for mut line in lines {
            let set = ProcessSetId(line.next()??);
            if line.next()?? == 1 {
                carried.from_init.insert(set);
            }
            carried.sets.insert(set, line.map(|task| task.map(TaskId)).collect::<Option<_>>()?);
        }
        Some(carried)
    }

    /// Returns the remaining ranks of each set in another world, by number.
    pub(crate) fn remaining_ranks_in_world(
        &self,
        world: &World,
    ) -> BTreeMap<ProcessSetId, Vec<Rank>> {
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

    /// Returns the numbers up to `last_id` that none of these sets has, ascending.
    pub(crate) fn unused_set_ids(
        &self,
        sets: &BTreeMap<ProcessSetId, Vec<Rank>>,
    ) -> VecDeque<ProcessSetId> {
        // A set that ended with its members gives its number back, as `remove_process_set` does.
        (1..=self.last_id).map(ProcessSetId).filter(|set| !sets.contains_key(set)).collect()
    }
}

/// Returns the sets that all ranks of a world use; `None` if no rank has left a world with its
/// sets.
///
/// # Errors
/// `Interrupted`; the errors of the registrar.
pub(crate) fn exchange_carried_sets(
    client: &TaskClient,
    world: &World,
    own: Option<&CarriedProcessSets>,
    deadline: Instant,
    interrupted: &mut InterruptCheck<'_>,
) -> Result<Option<CarriedProcessSets>> {
    // Parts of a world are disjoint, so the first member identifies a part.
    let first = world.seats.first().map(|seat| seat.task.0).unwrap_or_default();
    let key = |rank: u32| format!("process_sets/{first}/{rank}");
    client.put_value(
        &key(world.rank.0),
        // A rank without sets publishes an empty value, because every rank waits for each value in
        // turn.
        own.map(CarriedProcessSets::to_text).unwrap_or_default().as_bytes(),
    )?;
    for rank in (0u32..).take(world.size()) {
        let value = loop {
            match client
                .await_value(&key(rank), deadline.min(Instant::now() + INTERRUPT_POLL_INTERVAL))
            {
                Err(RegistrarError::Timeout { .. }) if Instant::now() < deadline => {}
                other => break other?,
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
        };
        if let Some(carried) = CarriedProcessSets::from_text(&String::from_utf8_lossy(&value)) {
            // The first rank with sets decides, so that all ranks come to the same sets.
            return Ok(Some(carried));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, TaskPlacement, assign_ranks};

    use super::*;

    fn carried() -> CarriedProcessSets {
        let tasks = |numbers: &[u32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        CarriedProcessSets {
            dynamic: true,
            last_id: 4,
            sets: BTreeMap::from([
                (ProcessSetId(1), tasks(&[0, 2])),
                (ProcessSetId(2), tasks(&[1])),
                (ProcessSetId(4), tasks(&[2, 3])),
            ]),
            from_init: BTreeSet::from([ProcessSetId(1)]),
        }
    }

    #[test]
    fn a_record_reads_as_it_was_written_and_garbage_as_none() {
        assert_eq!(CarriedProcessSets::from_text(&carried().to_text()), Some(carried()));
        assert_eq!(
            CarriedProcessSets::from_text(&CarriedProcessSets::default().to_text()),
            Some(CarriedProcessSets::default())
        );
        for garbage in ["", "1", "1 x", "1 2\n3", "1 2\n3 0 x"] {
            assert_eq!(CarriedProcessSets::from_text(garbage), None, "{garbage}");
        }
    }

    #[test]
    fn sets_are_formed_of_the_members_that_are_left_under_their_numbers() {
        let place = |task| TaskPlacement { task: TaskId(task), host: HostHash("a".to_owned()) };
        let world = assign_ranks(Generation(2), &[0, 2, 3, 7].map(place))
            .unwrap()
            .seen_from(Rank(0))
            .unwrap();
        let ranks = carried().remaining_ranks_in_world(&world);
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
        assert_eq!(carried().unused_set_ids(&ranks), [ProcessSetId(2), ProcessSetId(3)]);
    }
}
