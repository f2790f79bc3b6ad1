// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Joined ranks: they have no more data and wait for the other ranks.
//!
//! A join travels upward among the announcements, so every node knows which announcements came
//! after the join. When all members of a subtree have joined, the subtree sends this after their
//! announcements, and no node waits for it any more. A node that announces on behalf of members
//! lists the absent ones. A joined member executes the response lists like all others, with memory
//! that does not change any result. When all members have joined, a list ends the join and names
//! the last member.

use std::time::{Duration, Instant};

use farandole_kernels::ReduceOp;
use farandole_negotiation::{AnnouncementTally, CollectiveCall};
use farandole_world::Rank;

/// Common name of the joins of all members in reports.
pub(super) const JOIN_TENSOR_NAME: &str = "join.noname";

/// A member that has joined.
#[derive(Clone, Copy, Debug)]
struct JoinedMember {
    member: u32,
    /// Whether it takes part in gathers and broadcasts.
    gather: bool,
}

/// The joined members that this member knows: members below it, and itself.
#[derive(Default)]
pub(super) struct JoinState {
    joined: Vec<JoinedMember>,
    /// Sources that announce nothing more; 0 is this member, `n + 1` its `n`th child.
    finished_sources: Vec<u32>,
    /// Start of the time in which joined ranks have waited without any operation, and time of the
    /// last report of it.
    since: Option<Instant>,
    reported: Option<Instant>,
}

impl JoinState {
    pub(super) fn has_joined_members(&self) -> bool {
        !self.joined.is_empty()
    }

    pub(super) fn joined_members(&self) -> impl Iterator<Item = u32> + '_ {
        self.joined.iter().map(|joined| joined.member)
    }

    /// Records that a member has joined. Tensors that it announced before may still wait for other
    /// members below.
    pub(super) fn record_member(&mut self, member: u32, gather: bool) {
        self.joined.push(JoinedMember { member, gather });
        self.since.get_or_insert_with(Instant::now);
    }

    /// Records that all members of a source have joined and that all their announcements have
    /// arrived.
    pub(super) fn record_finished_source(&mut self, source: u32) {
        self.finished_sources.push(source);
    }

    /// Returns whether no source has anything to announce any more.
    pub(super) fn has_finished_all(&self, sources: usize) -> bool {
        self.finished_sources.len() >= sources
    }

    /// Returns whether each of the sources has announced the tensor or will never do so.
    pub(super) fn completes_tally(&self, tally: &AnnouncementTally, sources: usize) -> bool {
        let silent =
            self.finished_sources.iter().filter(|source| !tally.sources.contains(source)).count();
        tally.sources.len() + silent >= sources
    }

    /// Restarts the time of the wait, because other ranks still execute operations.
    pub(super) fn restart_wait(&mut self, now: Instant) {
        (self.since, self.reported) = (self.since.map(|_| now), None);
    }

    /// Returns the start of the wait of joined ranks if a report of it is due now.
    pub(super) fn take_overdue_wait(
        &mut self,
        now: Instant,
        report_age: Duration,
    ) -> Option<Instant> {
        let since = self.since?;
        let due = now.saturating_duration_since(self.reported.unwrap_or(since)) >= report_age;
        due.then(|| {
            self.reported = Some(now);
            since
        })
    }

    /// Checks that an operation can run with substitutes for the absent members; the error has the
    /// reason.
    pub(super) fn check_runs_without_absent(
        &self,
        call: &CollectiveCall,
        absent: &[u32],
        ranks: &[Rank],
    ) -> Result<(), String> {
        let list = |members: &[u32]| -> String {
            let ranks = members.iter().filter_map(|member| ranks.get(*member as usize));
            ranks.map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        match *call {
            CollectiveCall::Allreduce { op: ReduceOp::Product, prescale, .. }
                // The neutral element would be 1 / prescale, which the type may not be able to
                // express.
                if f64::from_bits(prescale) != 1.0 =>
            {
                Err(format!(
                    "a product with a prescale factor needs all ranks, {} have joined",
                    list(absent)
                ))
            }
            CollectiveCall::Allreduce { .. } => Ok(()),
            CollectiveCall::Broadcast { root }
                if absent.iter().any(|member| ranks[*member as usize].0 == root) =>
            {
                Err(format!("its root, rank {root}, has joined"))
            }
            CollectiveCall::Allgather | CollectiveCall::Broadcast { .. } => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_needs_all_ranks_names_the_missing_ones() {
        let joined = |member, gather| JoinedMember { member, gather };
        let joins =
            JoinState { joined: vec![joined(1, true), joined(2, false)], ..JoinState::default() };
        let ranks = [Rank(4), Rank(6), Rank(9)];
        let judge = |call, absent: &[u32]| {
            joins.check_runs_without_absent(&call, absent, &ranks).err().unwrap_or_default()
        };
        let one = 1f64.to_bits();
        let sum = |op, prescale| CollectiveCall::Allreduce { op, prescale, postscale: one };
        assert_eq!(judge(sum(ReduceOp::Min, 7), &[1, 2]), "");
        assert_eq!(judge(sum(ReduceOp::Product, one), &[1]), "");
        assert!(judge(sum(ReduceOp::Product, 0), &[1]).ends_with("needs all ranks, 6 have joined"));
        assert_eq!(judge(CollectiveCall::Barrier, &[1, 2]), "6, 9");
        assert_eq!(judge(CollectiveCall::Allgather, &[1]), "");
        assert_eq!(judge(CollectiveCall::Allgather, &[1, 2]), "9 did so without allow_gather");
        assert_eq!(judge(CollectiveCall::Broadcast { root: 4 }, &[1]), "");
        assert_eq!(
            judge(CollectiveCall::Broadcast { root: 6 }, &[1]),
            "its root, rank 6, has joined"
        );
    }
}
