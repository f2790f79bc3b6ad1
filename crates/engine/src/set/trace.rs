// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events of a set for the timeline. Nothing here runs without a listener.

use std::sync::Arc;

use farandole_telemetry::{Produced, Range, Track};

use super::{Entry, ProcessSet};
use crate::cache::Agreed;
use crate::signature::Call;
use crate::tally::Wish;
use crate::timeline::{QUEUE, Tracer, labels};

impl ProcessSet {
    fn track(&self, name: &Arc<str>) -> Track {
        Track { set: self.watch.set.0, tensor: Arc::clone(name) }
    }

    /// Members arrive in the negotiation of a tensor.
    pub(super) fn trace_arrival(&self, name: &Arc<str>, wish: &Wish, members: &[u32]) {
        let timeline = &self.options.tracer.timeline;
        let track = self.track(name);
        let ranks = members.iter().filter_map(|member| self.members.get(*member as usize));
        // Where each rank has a file, what others ask for is in theirs.
        let only = timeline.only();
        let ranks: Vec<u32> =
            ranks.map(|rank| rank.0).filter(|rank| only.is_none_or(|only| only == *rank)).collect();
        let begins =
            if only.is_some() { !ranks.is_empty() } else { !self.pending.contains_key(name) };
        if begins && let Some(call) = wish.call() {
            timeline.begin(&track, labels(&call).negotiate);
        }
        ranks.into_iter().for_each(|rank| timeline.arrived(&track, rank));
    }

    /// The ranks do not agree on a tensor.
    pub(super) fn trace_refusal(&self, name: &Arc<str>) {
        self.options.tracer.timeline.end_of(&self.track(name), None);
    }

    /// A list says that these are one operation.
    pub(super) fn trace_batch(&self, list: u64, entries: &[(Entry, Arc<Agreed>)]) -> Option<Span> {
        let tracer = Arc::clone(&self.options.tracer);
        let labels = labels(&entries.first()?.1.signature.call);
        let mut tracks = Vec::with_capacity(entries.len());
        for (entry, agreed) in entries {
            let track = self.track(&entry.name);
            tracer.timeline.end_of(&track, None);
            tracer.timeline.begin_listed(&track, labels.operation, list);
            tracer.timeline.begin(&track, QUEUE);
            tracks.push((track, produced(agreed)));
        }
        let range = tracer.nvtx.as_ref().map(|nvtx| {
            let more = match entries.len() - 1 {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            nvtx.start(&format!("{} {}{more}", labels.operation, entries[0].0.name))
        });
        Some(Span { tracer, tracks, inside: QUEUE, transfer: labels.transfer, range, good: false })
    }
}

fn produced(agreed: &Agreed) -> Produced {
    let mut shape = agreed.signature.shape.clone();
    if let (Call::Allgather, Some(first)) = (agreed.signature.call, shape.first_mut()) {
        *first = agreed.rows.iter().sum();
    }
    Produced { dtype: agreed.signature.dtype.name(), shape }
}

/// A batch on the timeline, from its list to its end, whatever that is.
pub(super) struct Span {
    tracer: Arc<Tracer>,
    tracks: Vec<(Track, Produced)>,
    /// The activity in progress.
    inside: &'static str,
    transfer: &'static str,
    range: Option<Range>,
    good: bool,
}

impl Span {
    /// One activity ends, the next begins.
    pub(super) fn enter(&mut self, activity: &'static str) {
        if std::mem::replace(&mut self.inside, activity) == activity {
            return;
        }
        for (track, _) in &self.tracks {
            self.tracer.timeline.end_of(track, None);
            self.tracer.timeline.begin(track, activity);
        }
    }

    /// The communicator has it.
    pub(super) fn transfer(&mut self) {
        self.enter(self.transfer);
    }

    /// It ended well.
    pub(super) fn complete(mut self) {
        self.good = true;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        for (track, produced) in self.tracks.drain(..) {
            self.tracer.timeline.end_of(&track, None);
            self.tracer.timeline.end_of(&track, self.good.then_some(produced));
        }
        if let (Some(nvtx), Some(range)) = (&self.tracer.nvtx, self.range) {
            nvtx.end(range);
        }
    }
}
