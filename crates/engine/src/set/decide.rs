// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The coordinator: checks tensors that all ranks have announced, keeps groups together, and fuses.
//!
//! Nothing is held back for a fuller operation: what becomes ready while a list is executed makes
//! the next one. That is all the plan a training loop needs. Two ranks that submit 100 tensors at
//! once take 1.2 to 1.7 lists a step, whether of 4 KiB or 64 KiB each; holding every list until
//! nothing new has come for 20 us took 1.1 to 1.7, and 69 us instead of 52 us for a synchronous
//! operation of 4 bytes. Tensors that come 50 us apart, as out of a backward pass, go in 6 to 11
//! lists, each of what came during the one before, and there a fuller list only leaves the links
//! idle.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use farandole_collectives::{DataType, ReduceOp};

use super::{Finished, ProcessSet, Step, kind};
use crate::Cause;
use crate::cache::{Agreed, CacheId};
use crate::hash::Map;
use crate::set::list::{self, Item};
use crate::signature::{Call, Signature, Site};
use crate::tally::{Variant, Wish, verdict};
use crate::tune::Tuner;

/// A tensor all ranks want.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) agreed: Arc<Agreed>,
    /// Its id in the caches of all ranks, if all have it.
    pub(super) known: Option<CacheId>,
}

/// The ranks differ: all ranks' requests of this name, and the whole group that it is in (0: none),
/// fail.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) name: Arc<str>,
    pub(super) group: u64,
    pub(super) text: String,
}

/// The decisions that wait for the next list.
#[derive(Debug)]
enum Decision {
    Run(Ready),
    Refuse(Refusal),
    /// All have joined; the last member was this.
    Joined(u32),
}

/// A step of the next list.
#[derive(Debug)]
pub(super) enum Planned {
    /// One operation over these.
    Run(Vec<Ready>),
    Refuse(Refusal),
    Joined(u32),
}

#[derive(Default)]
pub(super) struct Coordinator {
    decisions: Vec<Decision>,
    /// Members of groups that are not complete.
    groups: Map<u64, Vec<Ready>>,
}

impl Coordinator {
    pub(super) fn is_empty(&self) -> bool {
        self.decisions.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn all_joined(&mut self, last: u32) {
        self.decisions.push(Decision::Joined(last));
    }

    fn agree(&mut self, ready: Ready) {
        let (group, size) = (ready.agreed.signature.group, ready.agreed.signature.group_size);
        if size == 0 {
            self.decisions.push(Decision::Run(ready));
            return;
        }
        let members = self.groups.entry(group).or_default();
        members.push(ready);
        if members.len() >= size as usize {
            let members = self.groups.remove(&group).unwrap_or_default();
            self.decisions.extend(members.into_iter().map(Decision::Run));
        }
    }
}

impl ProcessSet {
    /// All ranks have submitted `name`: checks that their requests agree.
    ///
    /// # Errors
    /// `Disagreement` when they put it into different groups. Other members of these groups may
    /// have been submitted in any other way, or may not come at all, so there is no limit for a
    /// wait.
    pub(super) fn decide(&mut self, name: &Arc<str>, wish: Wish) -> Step {
        self.watch.forget(name);
        self.inquiries.forget(name);
        let variants = match wish {
            Wish::Known(id, agreed, absent) if absent.is_empty() => {
                let known = self.cache.holds(id).then_some(id);
                self.coordinator.agree(Ready { agreed, known });
                return Ok(());
            }
            Wish::Known(id, agreed, absent) => {
                self.agree_without(agreed, Some(id), &absent);
                return Ok(());
            }
            Wish::Told(variants) => variants,
        };
        let absent = if self.joins.any() { self.absent_of(&variants) } else { Vec::new() };
        let group = variants.first().map_or(0, |variant| variant.signature.group);
        let divided = variants.iter().any(|variant| variant.signature.group != group);
        match verdict(name, variants, &self.members) {
            Ok(agreed) if absent.is_empty() => {
                self.coordinator.agree(Ready { agreed: Arc::new(agreed), known: None });
            }
            Ok(agreed) => self.agree_without(Arc::new(agreed), None, &absent),
            Err(text) if divided => return Err(Cause::Disagreement { text }),
            Err(text) => self.decide_against(name, group, text),
        }
        Ok(())
    }

    /// Members none of these is from.
    fn absent_of(&self, variants: &[Variant]) -> Vec<u32> {
        let came = |member: &u32| variants.iter().any(|variant| variant.members.contains(member));
        (0u32..).take(self.members.len()).filter(|member| !came(member)).collect()
    }

    /// All agree but members that have joined: can it be done with those standing in?
    fn agree_without(&mut self, agreed: Arc<Agreed>, known: Option<CacheId>, absent: &[u32]) {
        if let Err(why) = self.joins.suffices(&agreed.signature.call, absent, &self.members) {
            let operation = agreed.signature.call.name();
            let text = format!(
                "{operation} of {} is not possible while ranks have joined: {why}",
                agreed.name
            );
            return self.decide_against(&agreed.name, agreed.signature.group, text);
        }
        // A rank that has joined brings host memory.
        let known =
            known.filter(|id| self.cache.holds(*id) && agreed.signature.site != Site::Device);
        let agreed = match agreed.signature.site {
            Site::Device => Arc::new(Agreed::new(
                Arc::clone(&agreed.name),
                Signature { site: Site::Mixed, ..agreed.signature.clone() },
                agreed.rows.clone(),
            )),
            _ => agreed,
        };
        if agreed.signature.call != Call::Allgather
            || absent.iter().all(|member| agreed.counts_of(*member) == [0])
        {
            return self.coordinator.agree(Ready { agreed, known });
        }
        // What was agreed on before had rows of members that bring none now.
        let mut rows = agreed.rows.clone();
        absent
            .iter()
            .filter_map(|member| rows.get_mut(*member as usize).map(|rows| *rows = 0))
            .for_each(drop);
        let agreed = Agreed::new(Arc::clone(&agreed.name), agreed.signature.clone(), rows);
        self.coordinator.agree(Ready { agreed: Arc::new(agreed), known: None });
    }

    fn decide_against(&mut self, name: &Arc<str>, group: u64, text: String) {
        self.coordinator.groups.remove(&group);
        self.forget_group(group);
        let refusal = Refusal { name: Arc::clone(name), group, text };
        self.coordinator.decisions.push(Decision::Refuse(refusal));
    }

    /// All ranks put the same tensors into a refused group, and announced them together: drop their
    /// tallies.
    pub(super) fn forget_group(&mut self, group: u64) {
        if group == 0 {
            return;
        }
        let (watch, inquiries) = (&mut self.watch, &mut self.inquiries);
        self.pending.retain(|name, tally| {
            let other = !tally.is_in(group);
            if !other {
                watch.forget(name);
                inquiries.forget(name);
            }
            other
        });
    }

    /// Sends the next list when there is one and the last ones are done: what becomes ready
    /// meanwhile is fused.
    pub(super) fn emit(&mut self, finished: &mut Vec<Finished>) -> Step<bool> {
        if self.coordinator.is_empty() || self.leaving.is_some() {
            return Ok(false);
        }
        if self.execution.lists() >= lists_at_a_time(self.tree.hosts) {
            return Ok(false);
        }
        let decisions = std::mem::take(&mut self.coordinator.decisions);
        let settings = &self.options.settings;
        let threshold = self.tuner.as_ref().map_or(settings.fusion_threshold, Tuner::threshold);
        if let Some(tuner) = &mut self.tuner {
            observe(tuner, &decisions);
        }
        let plan = fuse(decisions, threshold, settings.group_fusion);
        let mut frame = std::mem::take(&mut self.scratch);
        frame.clear();
        let number = self.lists + 1;
        let items: Vec<Item> = list::encode(number, plan, &mut self.cache, &mut frame);
        self.send_down(kind::LIST, &frame)?;
        self.scratch = frame;
        self.apply(number, items, finished)?;
        Ok(true)
    }
}

/// Lists that may be executed at a time: one lets tensors meet, a second one hides the way down a
/// tree of hosts.
pub(crate) fn lists_at_a_time(hosts: usize) -> u64 {
    if hosts > 1 { 2 } else { 1 }
}

/// Tensors of one kind with these bytes, in order of readiness: the places of those that share an
/// operation.
pub(crate) fn operations(bytes: &[u64], threshold: u64) -> Vec<Vec<usize>> {
    let one = 1f64.to_bits();
    let signature = |bytes: u64| Signature {
        call: Call::Allreduce { op: ReduceOp::Sum, prescale: one, postscale: one },
        dtype: DataType::U8,
        shape: vec![bytes],
        site: Site::Host,
        group: 0,
        group_size: 0,
    };
    let decision = |(place, bytes): (usize, &u64)| {
        let agreed = Agreed::new(place.to_string().into(), signature(*bytes), Vec::new());
        Decision::Run(Ready { agreed: Arc::new(agreed), known: None })
    };
    let decisions = bytes.iter().enumerate().map(decision).collect();
    let places = |planned: Planned| match planned {
        Planned::Run(tensors) => {
            tensors.iter().filter_map(|ready| ready.agreed.name.parse::<usize>().ok()).collect()
        }
        Planned::Refuse(_) | Planned::Joined(_) => Vec::new(),
    };
    fuse(decisions, threshold, true).into_iter().map(places).collect()
}

/// Shows autotune what goes out.
fn observe(tuner: &mut Tuner, decisions: &[Decision]) {
    let now = Instant::now();
    for decision in decisions {
        if let Decision::Run(ready) = decision
            && matches!(ready.agreed.signature.call, Call::Allreduce { .. })
        {
            tuner.observe(&ready.agreed.name, bytes(&ready.agreed), now);
        }
    }
}

/// Bytes an operation moves for this tensor.
fn bytes(agreed: &Agreed) -> u64 {
    let unit = agreed.signature.unit_bytes();
    if agreed.signature.call.counts() == 0 {
        return unit;
    }
    agreed.rows.iter().fold(0u64, |sum, rows| sum.saturating_add(*rows)).saturating_mul(unit)
}

/// Returns whether two tensors may share an operation. Without `across`, groups keep to themselves.
fn fit(one: &Signature, two: &Signature, across: bool) -> bool {
    !one.call.is_meeting()
        && !matches!(one.call, Call::Alltoall { .. })
        && one.call == two.call
        && one.dtype == two.dtype
        && one.site == two.site
        && (across || (one.group, one.group_size) == (two.group, two.group_size))
}

/// Operations of one kind that are looked at for room before a new one is begun.
const LOOK_BACK: usize = 4;

/// Joins tensors in order of readiness: each goes into the first operation of its kind that has
/// room, among the last few. So a tensor too large for an operation does not keep later ones from
/// it.
fn fuse(decisions: Vec<Decision>, threshold: u64, across: bool) -> Vec<Planned> {
    let mut plan: Vec<Planned> = Vec::with_capacity(decisions.len());
    // Operations with room: of each kind, the places in the plan with their bytes.
    let mut kinds: Vec<VecDeque<(usize, u64)>> = Vec::new();
    for decision in decisions {
        let ready = match decision {
            Decision::Run(ready) => ready,
            Decision::Refuse(refusal) => {
                plan.push(Planned::Refuse(refusal));
                continue;
            }
            Decision::Joined(last) => {
                plan.push(Planned::Joined(last));
                continue;
            }
        };
        let (bytes, next) = (bytes(&ready.agreed), plan.len());
        let kind = kinds.iter_mut().find(|open| {
            match open.front().and_then(|(index, _)| plan.get(*index)) {
                Some(Planned::Run(operation)) => {
                    fit(&operation[0].agreed.signature, &ready.agreed.signature, across)
                }
                _ => false,
            }
        });
        let Some(open) = kind else {
            kinds.push(VecDeque::from([(next, bytes)]));
            plan.push(Planned::Run(vec![ready]));
            continue;
        };
        let room = open.iter_mut().find(|(_, sum)| sum.saturating_add(bytes) <= threshold);
        if let Some((index, sum)) = room
            && let Planned::Run(operation) = &mut plan[*index]
        {
            *sum += bytes;
            operation.push(ready);
            continue;
        }
        open.push_back((next, bytes));
        if open.len() > LOOK_BACK {
            open.pop_front();
        }
        plan.push(Planned::Run(vec![ready]));
    }
    plan
}

#[cfg(test)]
mod tests {
    use farandole_collectives::DataType;

    use super::*;
    use crate::signature::tests::plain;

    fn ready(name: &str, signature: Signature) -> Decision {
        Decision::Run(Ready {
            agreed: Arc::new(Agreed::new(name.into(), signature, Vec::new())),
            known: None,
        })
    }

    fn names(plan: &[Planned]) -> Vec<String> {
        let name = |step: &Planned| match step {
            Planned::Run(operation) => operation.iter().map(|ready| &*ready.agreed.name).collect(),
            Planned::Refuse(refusal) => refusal.text.clone(),
            Planned::Joined(last) => last.to_string(),
        };
        plan.iter().map(name).collect()
    }

    #[test]
    fn tensors_of_one_kind_share_operations_up_to_the_threshold() {
        let double = Signature { dtype: DataType::F64, ..plain(&[2]) };
        let decisions = vec![
            ready("a", plain(&[2])),
            ready("b", double.clone()),
            ready("c", plain(&[2])),
            ready("d", plain(&[2])),
            ready("e", double),
        ];
        assert_eq!(names(&fuse(decisions, 16, true)), ["ac", "b", "d", "e"]);
    }

    #[test]
    fn a_threshold_of_zero_fuses_nothing() {
        let decisions = vec![ready("a", plain(&[2])), ready("b", plain(&[2]))];
        assert_eq!(names(&fuse(decisions, 0, true)), ["a", "b"]);
    }

    #[test]
    fn a_tensor_above_the_threshold_runs_alone() {
        let decisions =
            vec![ready("a", plain(&[100])), ready("b", plain(&[1])), ready("c", plain(&[1]))];
        assert_eq!(names(&fuse(decisions, 16, true)), ["a", "bc"]);
    }

    #[test]
    fn a_tensor_that_does_not_fit_keeps_no_later_one_from_room_before_it() {
        let sizes = [("a", 2), ("b", 3), ("c", 2), ("d", 1)];
        let decisions = sizes.map(|(name, size)| ready(name, plain(&[size]))).into();
        assert_eq!(names(&fuse(decisions, 16, true)), ["ac", "bd"]);
    }

    #[test]
    fn groups_keep_to_themselves_where_that_is_asked_for() {
        let grouped = |group| Signature { group, group_size: 2, ..plain(&[1]) };
        let decisions = || {
            let tensors =
                [("a", grouped(7)), ("x", plain(&[1])), ("b", grouped(7)), ("c", grouped(8))];
            tensors.map(|(name, signature)| ready(name, signature)).into()
        };
        assert_eq!(names(&fuse(decisions(), 64, false)), ["ab", "x", "c"]);
        assert_eq!(names(&fuse(decisions(), 64, true)), ["axbc"]);
    }

    #[test]
    fn barriers_and_all_to_alls_run_alone() {
        let of = |call| Signature { call, ..plain(&[0, 1]) };
        for call in [Call::Barrier, Call::Alltoall { members: 2 }] {
            let decisions = vec![ready("a", of(call)), ready("b", of(call))];
            assert_eq!(names(&fuse(decisions, 64, true)), ["a", "b"]);
        }
    }
}
