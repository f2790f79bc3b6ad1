// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Joined ranks: they have no more data and wait for the others.
//!
//! A join travels upward among the announcements, so that every node knows which of them it came
//! before. A subtree whose members have all joined says so after it has passed on their
//! announcements, and is not waited for any more. A node that speaks for members says which of them
//! are absent. A member that joined executes the lists as all others do, with memory that changes
//! no result. When all have joined, a list says so and names the last.

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_collectives::kernel::neutral;
use farandole_collectives::{DataType, Memory, ReduceOp};
use farandole_world::Rank;

use super::{Entry, Finished, ProcessSet, Step};
use crate::cache::Agreed;
use crate::signature::Call;
use crate::tally::Tally;
use crate::{Completion, Handle};

/// The handle of an operation that this rank did not submit.
pub(super) const NOBODY: Handle = Handle(0);

/// A member that has joined.
#[derive(Clone, Copy, Debug)]
struct Joined {
    member: u32,
    /// It takes part in gathers and broadcasts.
    gather: bool,
}

/// The members that have joined, as far as this member knows: those below it, and itself.
#[derive(Default)]
pub(super) struct Joins {
    joined: Vec<Joined>,
    /// Sources that announce nothing more. See [`ProcessSet::announced`].
    gone: Vec<u32>,
    own: Option<Entry>,
    /// The time since which joined ranks have waited without any operation, and the time of the
    /// last report of that.
    since: Option<Instant>,
    reported: Option<Instant>,
}

/// Name of the joins of all members in reports.
pub(super) const JOIN: &str = "join.noname";

impl Joins {
    pub(super) fn any(&self) -> bool {
        !self.joined.is_empty()
    }

    /// This member's own join.
    pub(super) fn own(&self) -> Option<&Entry> {
        self.own.as_ref()
    }

    pub(super) fn into_own(self) -> Option<Entry> {
        self.own
    }

    pub(super) fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.joined.iter().map(|joined| joined.member)
    }

    /// Returns the number of sources besides these that are not waited for.
    pub(super) fn gone(&self, came: &[u32]) -> usize {
        self.gone.iter().filter(|source| !came.contains(source)).count()
    }

    /// Others still work: the time in which something must happen begins again.
    pub(super) fn goes_on(&mut self) {
        if self.since.is_some() {
            let now = Instant::now();
            (self.since, self.reported) = (Some(now), None);
            if let Some(own) = &mut self.own {
                (own.since, own.missing) = (now, None);
            }
        }
    }

    /// The time since which joined ranks have waited, if it is to be reported now.
    pub(super) fn overdue(&mut self, now: Instant, patience: Duration) -> Option<Instant> {
        let since = self.since?;
        let due = now.saturating_duration_since(self.reported.unwrap_or(since)) >= patience;
        due.then(|| {
            self.reported = Some(now);
            since
        })
    }

    /// The coordinator misses these.
    pub(super) fn miss(&mut self, missing: Vec<Rank>) {
        if let Some(own) = &mut self.own {
            own.missing = Some(missing);
        }
    }

    /// Checks that these members can stand in for themselves; the error says why not.
    pub(super) fn suffices(
        &self,
        call: &Call,
        absent: &[u32],
        ranks: &[Rank],
    ) -> Result<(), String> {
        let list = |members: &[u32]| -> String {
            let ranks = members.iter().filter_map(|member| ranks.get(*member as usize));
            ranks.map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        match *call {
            Call::Allreduce { op: ReduceOp::Product, prescale, .. }
                if f64::from_bits(prescale) != 1.0 =>
            {
                Err(format!(
                    "a product with a prescale factor needs all ranks, {} have joined",
                    list(absent)
                ))
            }
            Call::Allreduce { .. } => Ok(()),
            Call::Broadcast { root }
                if absent.iter().any(|member| ranks[*member as usize].0 == root) =>
            {
                Err(format!("its root, rank {root}, has joined"))
            }
            Call::Allgather | Call::Broadcast { .. } => {
                let strict = |member: &&u32| {
                    self.joined.iter().any(|joined| joined.member == **member && !joined.gather)
                };
                let strict: Vec<u32> = absent.iter().filter(strict).copied().collect();
                match strict.is_empty() {
                    true => Ok(()),
                    false => Err(format!("{} did so without allow_gather", list(&strict))),
                }
            }
            _ => Err(list(absent)),
        }
    }
}

impl ProcessSet {
    /// This member joins.
    pub(super) fn join(&mut self, entry: Entry, gather: bool) -> Step {
        self.joins.own = Some(entry);
        self.joined(self.tree.me, gather);
        self.gone(0)
    }

    /// A member has joined; what it announced before may still wait for others below.
    pub(super) fn joined(&mut self, member: u32, gather: bool) {
        self.joins.joined.push(Joined { member, gather });
        self.joins.since.get_or_insert_with(Instant::now);
        if !self.is_coordinator() {
            let (mut writer, _) = self.upward();
            writer.byte(2);
            writer.number(member.into());
            writer.byte(gather.into());
        }
    }

    /// All members of a source have joined, and everything that any of them announced has come.
    pub(super) fn gone(&mut self, source: u32) -> Step {
        self.joins.gone.push(source);
        let children = self.tree.children.len();
        let complete =
            |tally: &Tally| tally.sources.len() + self.joins.gone(&tally.sources) > children;
        let complete = self.pending.iter().filter(|(_, tally)| complete(tally));
        let complete: Vec<Arc<str>> = complete.map(|(name, _)| Arc::clone(name)).collect();
        complete.iter().try_for_each(|name| self.complete_pending(name))?;
        if self.joins.gone.len() <= children {
            return Ok(());
        }
        if !self.is_coordinator() {
            // After what had to be said for those below.
            self.upward().0.byte(4);
        } else if let Some(last) = self.joins.joined.last() {
            self.coordinator.all_joined(last.member);
        }
        Ok(())
    }

    /// A list says that all ranks have joined.
    pub(super) fn all_joined(&mut self, last: u32, finished: &mut Vec<Finished>) {
        let own = std::mem::take(&mut self.joins).into_own();
        let last = self.members.get(last as usize).copied();
        finished.extend(own.map(|entry| Finished {
            handle: entry.handle,
            name: entry.name,
            result: Ok(Completion { last, ..Completion::default() }),
        }));
    }
}

/// The part of a joined member in an operation of the others.
pub(super) fn stand_in(agreed: &Agreed) -> Entry {
    let signature = &agreed.signature;
    let bytes = usize::try_from(signature.unit_bytes()).unwrap_or(usize::MAX);
    let (input, output) = match signature.call {
        // It brings no rows, and takes those of all others.
        Call::Allgather => (Memory::new(0), None),
        Call::Allreduce { op, prescale, .. } => {
            let element = without_effect(signature.dtype, op, f64::from_bits(prescale));
            let memory = Memory::repeating(bytes, &element[..signature.dtype.size()]);
            (memory.clone(), Some(memory))
        }
        _ => {
            let memory = Memory::new(bytes);
            (memory.clone(), Some(memory))
        }
    };
    Entry {
        handle: NOBODY,
        name: Arc::clone(&agreed.name),
        operation: signature.call.name(),
        matter: None,
        group: signature.group,
        rows: Vec::new(),
        input: input.buffer(),
        output: output.map(|memory| memory.buffer()),
        ready: None,
        since: Instant::now(),
        missing: None,
    }
}

/// An element that is neutral once it is multiplied by `prescale`; zero if no reduction is defined,
/// for which all members get an error.
fn without_effect(dtype: DataType, op: ReduceOp, prescale: f64) -> [u8; 16] {
    let op = match op {
        ReduceOp::Product => op,
        _ if prescale > 0.0 => op,
        // The largest becomes the smallest.
        ReduceOp::Min if prescale < 0.0 => ReduceOp::Max,
        ReduceOp::Max if prescale < 0.0 => ReduceOp::Min,
        _ => return [0; 16],
    };
    neutral(dtype, op).unwrap_or([0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_substitute_of_a_joined_rank_has_no_effect_after_scaling() {
        let float = |op, prescale: f64| {
            let bytes = without_effect(DataType::F64, op, prescale);
            f64::from_ne_bytes(bytes[..8].try_into().unwrap()) * prescale
        };
        for prescale in [2.0, 0.5, -3.0] {
            assert_eq!(float(ReduceOp::Sum, prescale), 0.0);
            assert_eq!(float(ReduceOp::Min, prescale), f64::INFINITY);
            assert_eq!(float(ReduceOp::Max, prescale), f64::NEG_INFINITY);
        }
        assert_eq!(float(ReduceOp::Min, 0.0), 0.0, "as everybody's is");
        assert_eq!(float(ReduceOp::Product, 1.0), 1.0);
        assert_eq!(float(ReduceOp::Adasum, 1.0), 0.0);
        let whole = without_effect(DataType::I32, ReduceOp::Max, -1.0);
        assert_eq!(i32::from_ne_bytes(whole[..4].try_into().unwrap()), i32::MAX);
    }

    #[test]
    fn an_operation_that_needs_all_ranks_names_the_missing_ones() {
        let joined = |member, gather| Joined { member, gather };
        let joins = Joins { joined: vec![joined(1, true), joined(2, false)], ..Joins::default() };
        let ranks = [Rank(4), Rank(6), Rank(9)];
        let judge =
            |call, absent: &[u32]| joins.suffices(&call, absent, &ranks).err().unwrap_or_default();
        let one = 1f64.to_bits();
        let sum = |op, prescale| Call::Allreduce { op, prescale, postscale: one };
        assert_eq!(judge(sum(ReduceOp::Min, 7), &[1, 2]), "");
        assert_eq!(judge(sum(ReduceOp::Product, one), &[1]), "");
        assert!(judge(sum(ReduceOp::Product, 0), &[1]).ends_with("needs all ranks, 6 have joined"));
        assert_eq!(judge(Call::Barrier, &[1, 2]), "6, 9");
        assert_eq!(judge(Call::Allgather, &[1]), "");
        assert_eq!(judge(Call::Allgather, &[1, 2]), "9 did so without allow_gather");
        assert_eq!(judge(Call::Broadcast { root: 4 }, &[1]), "");
        assert_eq!(judge(Call::Broadcast { root: 6 }, &[1]), "its root, rank 6, has joined");
    }
}
