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

use std::time::Instant;

use farandole_negotiation::{
    CollectiveCall, FastHashMap, PlannedListItem, PrioritizedTensor, ReadyTensor, TensorRefusal,
    plan_fused_operations, plan_prioritized_list,
};
use farandole_world::ProcessSetId;

use super::set_scope::SetScope;
use crate::EngineSettings;
use crate::tune::Autotuner;

/// A decision that waits for the next list.
#[derive(Debug)]
enum CoordinatorDecision {
    Run(ReadyTensor),
    Refuse(TensorRefusal),
    /// All members have joined; this one was the last.
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

/// Divides decisions into those of the next list, by descending priority, and those that wait.
/// Without priorities, all come in the next list.
fn divide_by_priority(
    decisions: Vec<CoordinatorDecision>,
    priority_of: impl Fn(&str) -> i32,
) -> (Vec<CoordinatorDecision>, Vec<CoordinatorDecision>) {
    if decisions.len() < 2 {
        return (decisions, Vec::new());
    }
    let mut tensors = Vec::with_capacity(decisions.len());
    for decision in &decisions {
        // A join is decided after all tensors before it, and refusals are rare.
        let CoordinatorDecision::Run(ready) = decision else { return (decisions, Vec::new()) };
        let (priority, bytes) = (priority_of(&ready.agreed.name), ready.agreed.tensor_bytes());
        tensors.push(PrioritizedTensor { priority, bytes, group: ready.agreed.signature.group });
    }
    let next = plan_prioritized_list(&tensors);
    let mut decisions: Vec<_> = decisions.into_iter().map(Some).collect();
    let first = next.iter().filter_map(|index| decisions[*index].take()).collect();
    (first, decisions.into_iter().flatten().collect())
}

/// Returns the largest number of response lists that may be in execution at a time. With one list,
/// tensors accumulate and are fused. A second list hides the latency of the way down a tree of
/// hosts.
pub fn max_lists_in_execution(hosts: usize) -> u64 {
    if hosts > 1 { 2 } else { 1 }
}

/// Reports the allreduces of the next list to the autotuner.
fn report_allreduces_to_tuner(tuner: &mut Autotuner, decisions: &[CoordinatorDecision]) {
    let now = Instant::now();
    for decision in decisions {
        if let CoordinatorDecision::Run(ready) = decision
            && matches!(ready.agreed.signature.call, CollectiveCall::Allreduce { .. })
        {
            tuner.observe_allreduce(&ready.agreed.name, ready.agreed.tensor_bytes(), now);
        }
    }
}

/// Fuses tensors, see [`plan_fused_operations`]. An operation comes where its first tensor was.
fn fuse_decisions(
    decisions: Vec<CoordinatorDecision>,
    threshold: u64,
    across: bool,
) -> Vec<PlannedListItem> {
    let tensors: Vec<_> = decisions
        .iter()
        .filter_map(|decision| match decision {
            CoordinatorDecision::Run(ready) => {
                Some((&ready.agreed.signature, ready.agreed.tensor_bytes()))
            }
            _ => None,
        })
        .collect();
    let mut operations = plan_fused_operations(&tensors, threshold, across).into_iter();
    let mut positions: Vec<usize> = Vec::new();
    let mut plan: Vec<PlannedListItem> = Vec::with_capacity(decisions.len());
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
        // Operations are numbered by their first tensors.
        let number = operations.next().unwrap_or(positions.len());
        match positions.get(number).and_then(|position| plan.get_mut(*position)) {
            Some(PlannedListItem::Run(operation)) => operation.push(ready),
            _ => {
                positions.push(plan.len());
                plan.push(PlannedListItem::Run(vec![ready]));
            }
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use farandole_kernels::DataType;
    use farandole_negotiation::{CachedResponse, PRIORITIZED_LIST_BYTES, RequestSignature};

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
