// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The coordinator: checks tensors that all ranks have announced, keeps groups together, and fuses
//! tensors.
//!
//! The coordinator does not delay tensors to fuse more of them: tensors that become ready while a
//! list is executed form the next list. This is enough for a training loop. Two ranks that submit
//! 100 tensors at once need 1.2 to 1.7 lists a step, with tensors of 4 KiB or 64 KiB. If every list
//! was delayed until no new tensor had come for 20 us, they needed 1.1 to 1.7 lists, and a
//! synchronous operation of 4 bytes took 69 us instead of 52 us. Tensors that come 50 us apart, as
//! from a backward pass, need 6 to 11 lists, each with the tensors that came during the previous
//! list; there a fuller list only leaves the links idle.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use farandole_kernels::{DataType, ReduceOp};
use farandole_negotiation::{
    Announcement, CacheId, CachedResponse, CollectiveCall, FastHashMap, MemorySite,
    RequestSignature, RequestVariant, resolve_variants,
};

use super::{FinishedRequest, ProcessSet, StepResult, frame_kinds};
use crate::StopCause;
use crate::set::response_list::{self, ResponseItem};
use crate::tune::Autotuner;

/// A tensor that all ranks have announced.
#[derive(Debug)]
pub(super) struct ReadyTensor {
    pub(super) agreed: Arc<CachedResponse>,
    /// Its id in the cache, if it is in the caches of all ranks.
    pub(super) known: Option<CacheId>,
}

/// Refusal of a tensor because the requests of the ranks differ. All requests of this name fail,
/// and all members of its group (0: no group).
#[derive(Debug)]
pub(super) struct TensorRefusal {
    pub(super) name: Arc<str>,
    pub(super) group: u64,
    pub(super) text: String,
}

/// A decision that waits for the next list.
#[derive(Debug)]
enum CoordinatorDecision {
    Run(ReadyTensor),
    Refuse(TensorRefusal),
    /// All members have joined; this one was the last.
    Joined(u32),
}

/// An item of the next list.
#[derive(Debug)]
pub(super) enum PlannedListItem {
    /// One operation on these tensors.
    Run(Vec<ReadyTensor>),
    Refuse(TensorRefusal),
    Joined(u32),
}

#[derive(Default)]
pub(super) struct SetCoordinator {
    decisions: Vec<CoordinatorDecision>,
    /// Ready tensors of incomplete groups.
    groups: FastHashMap<u64, Vec<ReadyTensor>>,
}

impl SetCoordinator {
    pub(super) fn is_empty(&self) -> bool {
        self.decisions.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn push_all_joined_decision(&mut self, last: u32) {
        self.decisions.push(CoordinatorDecision::Joined(last));
    }

    fn accept_tensor(&mut self, ready: ReadyTensor) {
        let (group, size) = (ready.agreed.signature.group, ready.agreed.signature.group_size);
        if size == 0 {
            self.decisions.push(CoordinatorDecision::Run(ready));
            return;
        }
        let members = self.groups.entry(group).or_default();
        members.push(ready);
        if members.len() >= size as usize {
            let members = self.groups.remove(&group).unwrap_or_default();
            self.decisions.extend(members.into_iter().map(CoordinatorDecision::Run));
        }
    }
}

impl ProcessSet {
    /// Decides a tensor that all ranks have submitted: checks that their requests agree.
    ///
    /// # Errors
    /// `Disagreement` if ranks put the tensor into different groups. The engine must stop: the
    /// other members of these groups may never become complete, so a wait for them has no limit.
    pub(super) fn decide_tensor(
        &mut self,
        name: &Arc<str>,
        announcement: Announcement,
    ) -> StepResult {
        self.watch.forget_tensor(name);
        self.inquiries.forget_tensor(name);
        let variants = match announcement {
            Announcement::Cached(id, agreed, absent) if absent.is_empty() => {
                let known = self.cache.contains_id(id).then_some(id);
                self.coordinator.accept_tensor(ReadyTensor { agreed, known });
                return Ok(());
            }
            Announcement::Cached(id, agreed, absent) => {
                self.accept_without_absent_members(agreed, Some(id), &absent);
                return Ok(());
            }
            Announcement::Explicit(variants) => variants,
        };
        let absent = if self.joins.has_joined_members() {
            self.absent_members(&variants)
        } else {
            Vec::new()
        };
        let group = variants.first().map_or(0, |variant| variant.signature.group);
        let divided = variants.iter().any(|variant| variant.signature.group != group);
        match resolve_variants(name, variants, &self.members) {
            Ok(agreed) if absent.is_empty() => {
                self.coordinator
                    .accept_tensor(ReadyTensor { agreed: Arc::new(agreed), known: None });
            }
            Ok(agreed) => self.accept_without_absent_members(Arc::new(agreed), None, &absent),
            Err(text) if divided => return Err(StopCause::Disagreement { text }),
            Err(text) => self.refuse_tensor(name, group, text),
        }
        Ok(())
    }

    /// Returns the members without a request among these variants.
    fn absent_members(&self, variants: &[RequestVariant]) -> Vec<u32> {
        let has_submitted =
            |member: &u32| variants.iter().any(|variant| variant.members.contains(member));
        (0u32..).take(self.members.len()).filter(|member| !has_submitted(member)).collect()
    }

    /// Accepts a tensor that all members except joined ones agree on, or refuses it if the
    /// operation cannot run without them.
    fn accept_without_absent_members(
        &mut self,
        agreed: Arc<CachedResponse>,
        known: Option<CacheId>,
        absent: &[u32],
    ) {
        if let Err(conflict) =
            self.joins.check_runs_without_absent(&agreed.signature.call, absent, &self.members)
        {
            let operation = agreed.signature.call.operation_name();
            let text = format!(
                "{operation} of {} is not possible while ranks have joined: {conflict}",
                agreed.name
            );
            return self.refuse_tensor(&agreed.name, agreed.signature.group, text);
        }
        // A joined rank substitutes host memory.
        let known = known.filter(|id| {
            self.cache.contains_id(*id) && agreed.signature.site != MemorySite::Device
        });
        let agreed = match agreed.signature.site {
            MemorySite::Device => Arc::new(CachedResponse::new(
                Arc::clone(&agreed.name),
                RequestSignature { site: MemorySite::Mixed, ..agreed.signature.clone() },
                agreed.rows.clone(),
            )),
            _ => agreed,
        };
        if agreed.signature.call != CollectiveCall::Allgather
            || absent.iter().all(|member| agreed.member_row_counts(*member) == [0])
        {
            return self.coordinator.accept_tensor(ReadyTensor { agreed, known });
        }
        // The cached response has rows of members that now contribute none.
        let mut rows = agreed.rows.clone();
        absent
            .iter()
            .filter_map(|member| rows.get_mut(*member as usize).map(|rows| *rows = 0))
            .for_each(drop);
        let agreed = CachedResponse::new(Arc::clone(&agreed.name), agreed.signature.clone(), rows);
        self.coordinator.accept_tensor(ReadyTensor { agreed: Arc::new(agreed), known: None });
    }

    fn refuse_tensor(&mut self, name: &Arc<str>, group: u64, text: String) {
        // The other tensors of the group must not run without this one (EN-3).
        self.coordinator.groups.remove(&group);
        self.drop_refused_group(group);
        let refusal = TensorRefusal { name: Arc::clone(name), group, text };
        self.coordinator.decisions.push(CoordinatorDecision::Refuse(refusal));
    }

    /// Drops the tallies of a refused group. All ranks put the same tensors into the group and
    /// announced them together.
    pub(super) fn drop_refused_group(&mut self, group: u64) {
        if group == 0 {
            return;
        }
        let (watch, inquiries) = (&mut self.watch, &mut self.inquiries);
        self.pending.retain(|name, tally| {
            let other = !tally.is_in_group(group);
            if !other {
                watch.forget_tensor(name);
                inquiries.forget_tensor(name);
            }
            other
        });
    }

    /// Sends the next list if there are decisions and enough earlier lists are complete. Tensors
    /// that become ready meanwhile are fused.
    pub(super) fn emit_next_response_list(
        &mut self,
        finished: &mut Vec<FinishedRequest>,
    ) -> StepResult<bool> {
        if self.coordinator.is_empty() || self.departure.is_some() {
            return Ok(false);
        }
        // Decisions collect until an earlier list is complete, and are then fused.
        if self.execution.unfinished_list_count() >= max_executing_lists(self.tree.hosts) {
            return Ok(false);
        }
        let decisions = std::mem::take(&mut self.coordinator.decisions);
        let settings = &self.options.settings;
        let threshold =
            self.tuner.as_ref().map_or(settings.fusion_threshold, Autotuner::current_threshold);
        if let Some(tuner) = &mut self.tuner {
            report_allreduces_to_tuner(tuner, &decisions);
        }
        let plan = fuse_decisions(decisions, threshold, settings.group_fusion);
        let mut frame = std::mem::take(&mut self.scratch);
        frame.clear();
        let number = self.lists + 1;
        let items: Vec<ResponseItem> =
            response_list::encode_list_updating_cache(number, plan, &mut self.cache, &mut frame);
        // Children first: the list has a longer way to them, and this member would only delay it.
        self.send_to_children(frame_kinds::RESPONSE_LIST, &frame)?;
        self.scratch = frame;
        self.apply_list(number, items, finished)?;
        Ok(true)
    }
}

/// Returns the largest number of lists in execution at a time. With one list, tensors accumulate
/// and are fused. A second list hides the latency of the way down a tree of hosts.
pub(crate) fn max_executing_lists(hosts: usize) -> u64 {
    if hosts > 1 { 2 } else { 1 }
}

/// Fuses tensors of one kind with these sizes in bytes, in order of readiness. Returns one list per
/// operation, with the indices of its tensors.
pub(crate) fn plan_fused_operations(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
    let one = 1f64.to_bits();
    let signature = |bytes: u64| RequestSignature {
        call: CollectiveCall::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one },
        dtype: DataType::U8,
        shape: vec![bytes],
        site: MemorySite::Host,
        group: 0,
        group_size: 0,
    };
    let decision = |(place, bytes): (usize, &u64)| {
        let agreed = CachedResponse::new(place.to_string().into(), signature(*bytes), Vec::new());
        CoordinatorDecision::Run(ReadyTensor { agreed: Arc::new(agreed), known: None })
    };
    let decisions = bytes.iter().enumerate().map(decision).collect();
    let places = |planned: PlannedListItem| match planned {
        PlannedListItem::Run(tensors) => {
            tensors.iter().filter_map(|ready| ready.agreed.name.parse::<usize>().ok()).collect()
        }
        PlannedListItem::Refuse(_) | PlannedListItem::Joined(_) => Vec::new(),
    };
    fuse_decisions(decisions, threshold, true).into_iter().map(places).collect()
}

/// Reports the allreduces of the next list to the autotuner.
fn report_allreduces_to_tuner(tuner: &mut Autotuner, decisions: &[CoordinatorDecision]) {
    let now = Instant::now();
    for decision in decisions {
        if let CoordinatorDecision::Run(ready) = decision
            && matches!(ready.agreed.signature.call, CollectiveCall::Allreduce { .. })
        {
            tuner.observe_allreduce(&ready.agreed.name, tensor_bytes(&ready.agreed), now);
        }
    }
}

/// Returns the number of bytes of this tensor in its operation.
fn tensor_bytes(agreed: &CachedResponse) -> u64 {
    let unit = agreed.signature.row_or_tensor_bytes();
    if agreed.signature.call.row_counts_per_member() == 0 {
        return unit;
    }
    agreed.rows.iter().fold(0u64, |sum, rows| sum.saturating_add(*rows)).saturating_mul(unit)
}

/// Returns whether two tensors may share an operation. Without `across`, tensors of a group are
/// fused only with tensors of the same group.
fn can_fuse(one: &RequestSignature, two: &RequestSignature, across: bool) -> bool {
    !one.call.moves_no_data()
        // Each alltoall exchanges the row counts of its own tensor.
        && !matches!(one.call, CollectiveCall::Alltoall { .. })
        && one.call == two.call
        && one.dtype == two.dtype
        && one.site == two.site
        && (across || (one.group, one.group_size) == (two.group, two.group_size))
}

/// Number of open operations of one kind that are searched for room before a new one is opened.
const MAX_OPEN_OPERATIONS_PER_KIND: usize = 4;

/// Fuses tensors in order of readiness: each tensor goes into the first of the last few operations
/// of its kind that has room. So a tensor that does not fit does not keep later ones out of this
/// operation.
fn fuse_decisions(
    decisions: Vec<CoordinatorDecision>,
    threshold: u64,
    across: bool,
) -> Vec<PlannedListItem> {
    let mut plan: Vec<PlannedListItem> = Vec::with_capacity(decisions.len());
    // For each kind, the operations with room: their indices in the plan, with their bytes.
    let mut kinds: Vec<VecDeque<(usize, u64)>> = Vec::new();
    for decision in decisions {
        let ready = match decision {
            CoordinatorDecision::Run(ready) => ready,
            CoordinatorDecision::Refuse(refusal) => {
                plan.push(PlannedListItem::Refuse(refusal));
                continue;
            }
            CoordinatorDecision::Joined(last) => {
                plan.push(PlannedListItem::Joined(last));
                continue;
            }
        };
        let (bytes, next) = (tensor_bytes(&ready.agreed), plan.len());
        let kind = kinds.iter_mut().find(|open| {
            match open.front().and_then(|(index, _)| plan.get(*index)) {
                Some(PlannedListItem::Run(operation)) => {
                    can_fuse(&operation[0].agreed.signature, &ready.agreed.signature, across)
                }
                _ => false,
            }
        });
        let Some(open) = kind else {
            kinds.push(VecDeque::from([(next, bytes)]));
            plan.push(PlannedListItem::Run(vec![ready]));
            continue;
        };
        // A tensor above the threshold finds no room and gets an operation of its own.
        let room = open.iter_mut().find(|(_, sum)| sum.saturating_add(bytes) <= threshold);
        if let Some((index, sum)) = room
            && let PlannedListItem::Run(operation) = &mut plan[*index]
        {
            *sum += bytes;
            operation.push(ready);
            continue;
        }
        open.push_back((next, bytes));
        if open.len() > MAX_OPEN_OPERATIONS_PER_KIND {
            open.pop_front();
        }
        plan.push(PlannedListItem::Run(vec![ready]));
    }
    plan
}

#[cfg(test)]
mod tests {

    use farandole_kernels::DataType;

    use super::*;
    use crate::set::tests::plain;

    fn ready(name: &str, signature: RequestSignature) -> CoordinatorDecision {
        CoordinatorDecision::Run(ReadyTensor {
            agreed: Arc::new(CachedResponse::new(name.into(), signature, Vec::new())),
            known: None,
        })
    }

    fn names(plan: &[PlannedListItem]) -> Vec<String> {
        let name = |step: &PlannedListItem| match step {
            PlannedListItem::Run(operation) => {
                operation.iter().map(|ready| &*ready.agreed.name).collect()
            }
            PlannedListItem::Refuse(refusal) => refusal.text.clone(),
            PlannedListItem::Joined(last) => last.to_string(),
        };
        plan.iter().map(name).collect()
    }

    #[test]
    fn tensors_of_one_kind_share_operations_up_to_the_threshold() {
        let double = RequestSignature { dtype: DataType::F64, ..plain(&[2]) };
        let decisions = vec![
            ready("a", plain(&[2])),
            ready("b", double.clone()),
            ready("c", plain(&[2])),
            ready("d", plain(&[2])),
            ready("e", double),
        ];
        assert_eq!(names(&fuse_decisions(decisions, 16, true)), ["ac", "b", "d", "e"]);
    }

    #[test]
    fn a_threshold_of_zero_fuses_nothing() {
        let decisions = vec![ready("a", plain(&[2])), ready("b", plain(&[2]))];
        assert_eq!(names(&fuse_decisions(decisions, 0, true)), ["a", "b"]);
    }

    #[test]
    fn a_tensor_above_the_threshold_runs_alone() {
        let decisions =
            vec![ready("a", plain(&[100])), ready("b", plain(&[1])), ready("c", plain(&[1]))];
        assert_eq!(names(&fuse_decisions(decisions, 16, true)), ["a", "bc"]);
    }

    #[test]
    fn a_tensor_that_does_not_fit_keeps_no_later_one_from_room_before_it() {
        let sizes = [("a", 2), ("b", 3), ("c", 2), ("d", 1)];
        let decisions = sizes.map(|(name, size)| ready(name, plain(&[size]))).into();
        assert_eq!(names(&fuse_decisions(decisions, 16, true)), ["ac", "bd"]);
    }

    #[test]
    fn groups_keep_to_themselves_where_that_is_asked_for() {
        let grouped = |group| RequestSignature { group, group_size: 2, ..plain(&[1]) };
        let decisions = || {
            let tensors =
                [("a", grouped(7)), ("x", plain(&[1])), ("b", grouped(7)), ("c", grouped(8))];
            tensors.map(|(name, signature)| ready(name, signature)).into()
        };
        assert_eq!(names(&fuse_decisions(decisions(), 64, false)), ["ab", "x", "c"]);
        assert_eq!(names(&fuse_decisions(decisions(), 64, true)), ["axbc"]);
    }

    #[test]
    fn barriers_and_all_to_alls_run_alone() {
        let of = |call| RequestSignature { call, ..plain(&[0, 1]) };
        for call in [CollectiveCall::Barrier, CollectiveCall::Alltoall { members: 2 }] {
            let decisions = vec![ready("a", of(call)), ready("b", of(call))];
            assert_eq!(names(&fuse_decisions(decisions, 64, true)), ["a", "b"]);
        }
    }
}
