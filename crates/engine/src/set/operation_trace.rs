// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events of a set for the timeline and NVTX. Called only while one of them is on.

use std::sync::Arc;

use farandole_negotiation::{Announcement, CachedResponse, CollectiveCall};
use farandole_telemetry::{NvtxRange, ProducedTensor, TimelineTrack};

use super::set_scope::SetScope;
use crate::timeline::{OperationTracer, QUEUE_ACTIVITY, timeline_labels_for_call};

fn timeline_track(scope: &SetScope, name: &Arc<str>) -> TimelineTrack {
    TimelineTrack { set: scope.id.0, tensor: Arc::clone(name) }
}

/// Records that members have announced a tensor; `is_pending` if others have announced it before.
pub(super) fn trace_arrival(
    scope: &SetScope,
    name: &Arc<str>,
    announcement: &Announcement,
    members: &[u32],
    is_pending: bool,
) {
    let timeline = &scope.context.tracer.timeline;
    let track = timeline_track(scope, name);
    let ranks = members.iter().filter_map(|member| scope.members.get(*member as usize));
    // If every rank writes its own file, each file has only the rank's own announcements.
    let only = timeline.arrival_filter_rank();
    let ranks: Vec<u32> =
        ranks.map(|rank| rank.0).filter(|rank| only.is_none_or(|only| only == *rank)).collect();
    let begins = if only.is_some() { !ranks.is_empty() } else { !is_pending };
    if begins && let Some(call) = announcement.first_collective_call() {
        timeline.begin_span(&track, timeline_labels_for_call(&call).negotiate);
    }
    ranks.into_iter().for_each(|rank| timeline.record_arrival(&track, rank));
}

/// Ends the span of a tensor that the ranks do not agree on.
pub(super) fn trace_refusal(scope: &SetScope, name: &Arc<str>) {
    scope.context.tracer.timeline.end_span(&timeline_track(scope, name), None);
}

fn produced_tensor(agreed: &CachedResponse) -> ProducedTensor {
    let mut shape = agreed.signature.shape.clone();
    if let (CollectiveCall::Allgather, Some(first)) = (agreed.signature.call, shape.first_mut()) {
        *first = agreed.rows.iter().sum();
    }
    ProducedTensor { dtype: agreed.signature.dtype.name(), shape }
}

/// Span of a batch on the timeline, from its list to its completion or failure.
pub(super) struct BatchSpan {
    tracer: Arc<OperationTracer>,
    tracks: Vec<(TimelineTrack, ProducedTensor)>,
    /// Activity in progress.
    activity: &'static str,
    transfer: &'static str,
    range: Option<NvtxRange>,
    succeeded: bool,
}

impl BatchSpan {
    /// Begins the spans of the tensors in a fused batch.
    pub(super) fn begin(scope: &SetScope, list: u64, tensors: &[&CachedResponse]) -> Option<Self> {
        let (first, others) = tensors.split_first()?;
        let tracer = Arc::clone(&scope.context.tracer);
        let labels = timeline_labels_for_call(&first.signature.call);
        let begin_track = |agreed: &&CachedResponse| {
            let track = timeline_track(scope, &agreed.name);
            tracer.timeline.end_span(&track, None);
            tracer.timeline.begin_response_list_span(&track, labels.operation, list);
            tracer.timeline.begin_span(&track, QUEUE_ACTIVITY);
            (track, produced_tensor(agreed))
        };
        let tracks = tensors.iter().map(begin_track).collect();
        let range = tracer.nvtx.as_ref().map(|nvtx| {
            let more = match others.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            nvtx.start_range(&format!("{} {}{more}", labels.operation, first.name))
        });
        Some(Self {
            tracer,
            tracks,
            activity: QUEUE_ACTIVITY,
            transfer: labels.transfer,
            range,
            succeeded: false,
        })
    }

    /// Ends the current activity and begins the next.
    pub(super) fn enter_timeline_activity(&mut self, activity: &'static str) {
        if std::mem::replace(&mut self.activity, activity) == activity {
            return;
        }
        for (track, _) in &self.tracks {
            self.tracer.timeline.end_span(track, None);
            self.tracer.timeline.begin_span(track, activity);
        }
    }

    /// Begins the transfer by the communicator.
    pub(super) fn enter_transfer(&mut self) {
        self.enter_timeline_activity(self.transfer);
    }

    /// Ends the span as successful.
    pub(super) fn mark_successful(mut self) {
        self.succeeded = true;
    }
}

impl Drop for BatchSpan {
    fn drop(&mut self) {
        for (track, produced) in self.tracks.drain(..) {
            self.tracer.timeline.end_span(&track, None);
            self.tracer.timeline.end_span(&track, self.succeeded.then_some(produced));
        }
        if let (Some(nvtx), Some(range)) = (&self.tracer.nvtx, self.range) {
            nvtx.end_range(range);
        }
    }
}
