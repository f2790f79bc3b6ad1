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

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_kernels::{DataType, HostMemory, ReduceOp, neutral_element};
use farandole_negotiation::{AnnouncementTally, CachedResponse, CollectiveCall};
use farandole_world::Rank;

use super::{FinishedRequest, PendingEntry, ProcessSet, StepResult};
use crate::{RequestCompletion, RequestHandle};

/// Handle of an operation that this rank did not submit.
pub(super) const NO_HANDLE: RequestHandle = RequestHandle(0);

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
    /// Sources that announce nothing more; see [`ProcessSet::record_announcement`].
    finished_sources: Vec<u32>,
    own: Option<PendingEntry>,
    /// Start of the time in which joined ranks have waited without any operation, and time of the
    /// last report of it.
    since: Option<Instant>,
    reported: Option<Instant>,
}

/// Common name of the joins of all members in reports.
pub(super) const JOIN_TENSOR_NAME: &str = "join.noname";

impl JoinState {
    pub(super) fn has_joined_members(&self) -> bool {
        !self.joined.is_empty()
    }

    /// Returns this member's own join.
    pub(super) fn own_join(&self) -> Option<&PendingEntry> {
        self.own.as_ref()
    }

    pub(super) fn into_own_join(self) -> Option<PendingEntry> {
        self.own
    }

    pub(super) fn joined_members(&self) -> impl Iterator<Item = u32> + '_ {
        self.joined.iter().map(|joined| joined.member)
    }

    /// Returns the number of finished sources that are not in `submitters`. The tally does not wait
    /// for them.
    pub(super) fn count_fully_joined_sources(&self, submitters: &[u32]) -> usize {
        self.finished_sources.iter().filter(|source| !submitters.contains(source)).count()
    }

    /// Restarts the time of the wait, because other ranks still execute operations.
    pub(super) fn restart_join_wait(&mut self) {
        if self.since.is_some() {
            let now = Instant::now();
            (self.since, self.reported) = (Some(now), None);
            if let Some(own) = &mut self.own {
                (own.since, own.missing) = (now, None);
            }
        }
    }

    /// Returns the start of the wait of joined ranks if a report of it is due now.
    pub(super) fn take_overdue_join_wait(
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

    /// Stores the ranks that are missing according to the coordinator.
    pub(super) fn set_missing_ranks(&mut self, missing: Vec<Rank>) {
        if let Some(own) = &mut self.own {
            own.missing = Some(missing);
        }
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

impl ProcessSet {
    /// Joins on behalf of this member.
    pub(super) fn join_own_member(&mut self, entry: PendingEntry, gather: bool) -> StepResult {
        self.joins.own = Some(entry);
        self.record_joined_member(self.tree.me, gather);
        self.record_fully_joined_source(0)
    }

    /// Records that a member has joined. Tensors that it announced before may still wait for other
    /// members below.
    pub(super) fn record_joined_member(&mut self, member: u32, gather: bool) {
        self.joins.joined.push(JoinedMember { member, gather });
        self.joins.since.get_or_insert_with(Instant::now);
        if !self.is_coordinator() {
            let (mut writer, _) = self.upward_announcement_frame();
            writer.write_byte(2);
            writer.write_varint(member.into());
            writer.write_byte(gather.into());
        }
    }

    /// Records that all members of a source have joined and that all their announcements have
    /// arrived.
    pub(super) fn record_fully_joined_source(&mut self, source: u32) -> StepResult {
        self.joins.finished_sources.push(source);
        let children = self.tree.children.len();
        let complete = |tally: &AnnouncementTally| {
            tally.sources.len() + self.joins.count_fully_joined_sources(&tally.sources) > children
        };
        let complete = self.pending.iter().filter(|(_, tally)| complete(tally));
        let complete: Vec<Arc<str>> = complete.map(|(name, _)| Arc::clone(name)).collect();
        complete.iter().try_for_each(|name| self.complete_pending_tensor(name))?;
        if self.joins.finished_sources.len() <= children {
            return Ok(());
        }
        if !self.is_coordinator() {
            // Written after the announcements of the members below.
            self.upward_announcement_frame().0.write_byte(4);
        } else if let Some(last) = self.joins.joined.last() {
            // The order of arrival at the coordinator decides, so that all ranks report the same
            // rank.
            self.coordinator.push_all_joined_decision(last.member);
        }
        Ok(())
    }

    /// Completes this rank's join after a list has said that all ranks have joined.
    pub(super) fn complete_join(&mut self, last: u32, finished: &mut Vec<FinishedRequest>) {
        let own = std::mem::take(&mut self.joins).into_own_join();
        let last = self.members.get(last as usize).copied();
        finished.extend(own.map(|entry| FinishedRequest {
            handle: entry.handle,
            name: entry.name,
            result: Ok(RequestCompletion { last, ..RequestCompletion::default() }),
        }));
    }
}

/// Returns the entry of a joined member in an operation of the other members.
pub(super) fn substitute_entry(agreed: &CachedResponse) -> PendingEntry {
    let signature = &agreed.signature;
    let bytes = usize::try_from(signature.row_or_tensor_bytes()).unwrap_or(usize::MAX);
    let (input, output) = match signature.call {
        // It contributes no rows and receives the rows of all others.
        CollectiveCall::Allgather => (HostMemory::new(0), None),
        CollectiveCall::Allreduce { op, prescale, .. } => {
            let element = neutral_after_prescale(signature.dtype, op, f64::from_bits(prescale));
            let memory = HostMemory::filled_with(bytes, &element[..signature.dtype.element_size()]);
            (memory.clone(), Some(memory))
        }
        _ => {
            let memory = HostMemory::new(bytes);
            (memory.clone(), Some(memory))
        }
    };
    PendingEntry {
        handle: NO_HANDLE,
        name: Arc::clone(&agreed.name),
        operation: signature.call.operation_name(),
        change_text: None,
        group: signature.group,
        rows: Vec::new(),
        input: input.as_buffer(),
        output: output.map(|memory| memory.as_buffer()),
        ready: None,
        since: Instant::now(),
        missing: None,
    }
}

/// Returns an element that is neutral after a multiplication by `prescale`. Returns zero if the
/// reduction is not defined; all members get an error then.
fn neutral_after_prescale(dtype: DataType, op: ReduceOp, prescale: f64) -> [u8; 16] {
    let op = match op {
        ReduceOp::Product => op,
        _ if prescale > 0.0 => op,
        // A negative factor turns the smallest element into the largest.
        ReduceOp::Min if prescale < 0.0 => ReduceOp::Max,
        ReduceOp::Max if prescale < 0.0 => ReduceOp::Min,
        // A factor of 0 turns every input into 0.
        _ => return [0; 16],
    };
    neutral_element(dtype, op).unwrap_or([0; 16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_substitute_of_a_joined_rank_has_no_effect_after_scaling() {
        let float = |op, prescale: f64| {
            let bytes = neutral_after_prescale(DataType::F64, op, prescale);
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
        let whole = neutral_after_prescale(DataType::I32, ReduceOp::Max, -1.0);
        assert_eq!(i32::from_ne_bytes(whole[..4].try_into().unwrap()), i32::MAX);
    }

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
