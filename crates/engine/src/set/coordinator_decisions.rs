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
    CacheId, CachedResponse, CollectiveCall, FastHashMap, MemorySite, RequestSignature,
};
use farandole_world::ProcessSetId;

use super::set_scope::SetScope;
use crate::EngineSettings;
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

pub(super) struct SetCoordinator {
    decisions: Vec<CoordinatorDecision>,
    /// Ready tensors of incomplete groups.
    groups: FastHashMap<u64, Vec<ReadyTensor>>,
    /// Only at the coordinator of the global set, while autotune is on.
    tuner: Option<Autotuner>,
}

impl SetCoordinator {
    pub(super) fn new(scope: &SetScope) -> Self {
        let settings = &scope.context.settings;
        // Tested first, because a search overwrites its log.
        let tunes = scope.id == ProcessSetId::GLOBAL && scope.is_coordinator();
        let tune = settings.tune.clone().filter(|_| tunes);
        Self {
            decisions: Vec::new(),
            groups: FastHashMap::default(),
            tuner: tune.map(|tune| {
                Autotuner::new(tune, settings.fusion_threshold, settings.cache_capacity > 0)
            }),
        }
    }

    pub(super) fn has_decisions(&self) -> bool {
        !self.decisions.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.decisions.clear();
        self.groups.clear();
    }

    pub(super) fn push_all_joined_decision(&mut self, last: u32) {
        self.decisions.push(CoordinatorDecision::Joined(last));
    }

    pub(super) fn accept_tensor(&mut self, ready: ReadyTensor) {
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

    pub(super) fn refuse_tensor(&mut self, refusal: TensorRefusal) {
        // The other tensors of the group must not run without this one (EN-3).
        self.groups.remove(&refusal.group);
        self.decisions.push(CoordinatorDecision::Refuse(refusal));
    }

    /// Fuses the tensors that became ready since the last list. If they have priorities, those of
    /// the lowest wait for a later list.
    pub(super) fn plan_next_list(
        &mut self,
        settings: &EngineSettings,
        priority_of: impl Fn(&str) -> i32,
    ) -> Vec<PlannedListItem> {
        let decisions = std::mem::take(&mut self.decisions);
        let (decisions, later) = divide_by_priority(decisions, priority_of);
        self.decisions = later;
        let mut threshold = settings.fusion_threshold;
        if let Some(tuner) = &mut self.tuner {
            threshold = tuner.current_threshold();
            report_allreduces_to_tuner(tuner, &decisions);
        }
        fuse_decisions(decisions, threshold, settings.group_fusion)
    }
}

/// Bytes of tensors in a list whose tensors have priorities. Tensors that become ready during a list
/// cannot overtake it, and many small lists cost more than a few large ones.
pub const PRIORITIZED_LIST_BYTES: u64 = 32 << 20;

/// Divides decisions into those of the next list, by descending priority, and those that wait.
/// Without priorities, all come in the next list.
fn divide_by_priority(
    decisions: Vec<CoordinatorDecision>,
    priority_of: impl Fn(&str) -> i32,
) -> (Vec<CoordinatorDecision>, Vec<CoordinatorDecision>) {
    if decisions.len() < 2 {
        return (decisions, Vec::new());
    }
    let mut units: Vec<PriorityUnit> = Vec::with_capacity(decisions.len());
    for decision in &decisions {
        // A join is decided after all tensors before it, and refusals are rare.
        let CoordinatorDecision::Run(ready) = decision else { return (decisions, Vec::new()) };
        let group = ready.agreed.signature.group;
        let (priority, bytes) = (priority_of(&ready.agreed.name), tensor_bytes(&ready.agreed));
        match units.last_mut() {
            Some(unit) if group != 0 && unit.group == group => {
                unit.tensors += 1;
                unit.priority = unit.priority.max(priority);
                unit.bytes = unit.bytes.saturating_add(bytes);
            }
            _ => units.push(PriorityUnit { group, tensors: 1, priority, bytes }),
        }
    }
    let weights: Vec<_> = units.iter().map(|unit| (unit.priority, unit.bytes)).collect();
    let next = plan_prioritized_list(&weights);
    let mut remaining = decisions.into_iter();
    let mut members: Vec<Vec<CoordinatorDecision>> =
        units.iter().map(|unit| remaining.by_ref().take(unit.tensors).collect()).collect();
    let first = next.iter().flat_map(|unit| std::mem::take(&mut members[*unit])).collect();
    (first, members.into_iter().flatten().collect())
}

/// A tensor, or the members of a group, which come one after the other and in one list (EN-3).
struct PriorityUnit {
    group: u64,
    tensors: usize,
    priority: i32,
    bytes: u64,
}

/// Chooses the tensors of the next list, if some have a priority: the highest first, those of one
/// priority in order of readiness, up to [`PRIORITIZED_LIST_BYTES`] or one larger tensor.
/// `tensors` holds the priority and the bytes of each tensor, in order of readiness. Returns
/// indices; all of them, in order, if no tensor has a priority other than 0.
pub fn plan_prioritized_list(tensors: &[(i32, u64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    if tensors.iter().all(|(priority, _)| *priority == 0) {
        return order;
    }
    order.sort_by_key(|index| std::cmp::Reverse(tensors[*index].0));
    let (mut sum, mut count) = (0u64, 0);
    for index in &order {
        sum = sum.saturating_add(tensors[*index].1);
        if count > 0 && sum > PRIORITIZED_LIST_BYTES {
            break;
        }
        count += 1;
    }
    order.truncate(count);
    order
}

/// Returns the largest number of response lists that may be in execution at a time. With one list,
/// tensors accumulate and are fused. A second list hides the latency of the way down a tree of
/// hosts.
pub fn max_lists_in_execution(hosts: usize) -> u64 {
    if hosts > 1 { 2 } else { 1 }
}

/// Fuses allreduces that are ready at once into operations of at most `threshold` bytes. `bytes`
/// holds the size of each tensor, in order of readiness. Returns one list per operation, with the
/// indices of its tensors.
pub fn plan_fused_allreduces(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
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
    fn the_plan_of_a_simulator_fuses_as_the_coordinator_does() {
        assert_eq!(plan_fused_allreduces(&[2, 3, 2, 1], 4), [vec![0, 2], vec![1, 3]]);
        assert_eq!(plan_fused_allreduces(&[2, 3], 0), [vec![0], vec![1]]);
        assert!(plan_fused_allreduces(&[], 4).is_empty());
    }

    #[test]
    fn tensors_without_priorities_come_in_one_list_in_order() {
        assert_eq!(plan_prioritized_list(&[(0, u64::MAX), (0, 5)]), [0, 1]);
    }

    #[test]
    fn a_list_has_the_highest_priorities_and_a_limit_of_bytes() {
        let half = PRIORITIZED_LIST_BYTES / 2;
        assert_eq!(plan_prioritized_list(&[(-3, half), (-1, half), (0, half)]), [2, 1]);
        assert_eq!(plan_prioritized_list(&[(-3, half), (-3, half), (-3, 1)]), [0, 1]);
        assert_eq!(plan_prioritized_list(&[(-1, 3 * half), (-2, 1)]), [0], "too large, but first");
        assert_eq!(plan_prioritized_list(&[(-2, 1), (-1, 3 * half)]), [1]);
    }

    #[test]
    fn tensors_that_wait_come_in_later_lists_and_groups_stay_together() {
        let rows = PRIORITIZED_LIST_BYTES / 8;
        let grouped = |group| RequestSignature { group, group_size: 2, ..plain(&[rows]) };
        let decisions = vec![
            ready("x", plain(&[rows])),
            ready("a", grouped(7)),
            ready("b", grouped(7)),
            ready("y", plain(&[rows])),
        ];
        let priority_of = |name: &str| if name == "x" { -9 } else { -1 };
        let (first, later) = divide_by_priority(decisions, priority_of);
        assert_eq!(names(&fuse_decisions(first, 0, true)), ["a", "b"]);
        let (first, later) = divide_by_priority(later, priority_of);
        assert_eq!(names(&fuse_decisions(first, 0, true)), ["y", "x"]);
        assert!(later.is_empty());
    }

    #[test]
    fn a_join_does_not_overtake_tensors() {
        let decisions =
            vec![ready("x", plain(&[PRIORITIZED_LIST_BYTES])), CoordinatorDecision::Joined(1)];
        let (first, later) = divide_by_priority(decisions, |_| -1);
        assert_eq!((first.len(), later.len()), (2, 0));
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
