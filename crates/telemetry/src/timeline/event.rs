// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Events of a timeline, and the names of their tracks.

use std::sync::Arc;
use std::time::Instant;

use crate::RingWeight;

/// The result of a finished operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducedTensor {
    /// Element type.
    pub dtype: &'static str,
    /// Dimensions.
    pub shape: Vec<u64>,
}

/// One tensor of one process set: a "process" of the trace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TimelineTrack {
    /// The process set.
    pub set: u32,
    /// The tensor.
    pub tensor: Arc<str>,
}

/// The owner of a timeline: the facts that merging the files of all ranks needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimelineOwner<'a> {
    /// Name of the process in the trace.
    pub name: &'a str,
    /// Its rank.
    pub rank: u32,
    /// Its host: processes with the same one have the same clock.
    pub host: &'a str,
    /// Number of ranks.
    pub size: usize,
    /// Number of the world of an elastic job.
    pub generation: u64,
}

/// A change of a track.
#[derive(Clone, Debug)]
pub(super) enum TimelineEventKind {
    Begin(TimelineTrack, &'static str, Option<u64>),
    Arrived(TimelineTrack, u32),
    End(TimelineTrack, Option<ProducedTensor>),
    Enter(Arc<str>),
    Leave,
    Cycle,
}

/// A change, and the time at which it happened.
#[derive(Clone, Debug)]
pub(super) struct TimelineEvent {
    pub(super) at: Instant,
    pub(super) kind: TimelineEventKind,
}

impl RingWeight for TimelineEvent {
    fn weight_bytes(&self) -> usize {
        size_of::<Self>()
    }
}
