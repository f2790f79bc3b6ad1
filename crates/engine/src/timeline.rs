// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Observers of operations: the timeline, and NVIDIA's profilers.
//!
//! Rank 0 coordinates the global process set and so knows when every rank announced a tensor; its
//! file is the main one. Ranks below one node of the control tree appear together, when the last of
//! them has announced. Other ranks write their own files if the path contains [`RANK_PLACEHOLDER`];
//! each file shows the events on that rank.

use farandole_kernels::ReduceOp;
use farandole_negotiation::CollectiveCall;
use farandole_telemetry::{NvtxDomain, Timeline};

/// The placeholder of the rank in the path of a timeline.
pub const RANK_PLACEHOLDER: &str = "{rank}";

/// Receives the events of every operation while the timeline or NVTX is on.
pub(crate) struct OperationTracer {
    pub(crate) timeline: Timeline,
    pub(crate) nvtx: Option<NvtxDomain>,
}

impl OperationTracer {
    pub(crate) fn new(nvtx: bool) -> Self {
        Self {
            timeline: Timeline::default(),
            nvtx: if nvtx { NvtxDomain::load_domain() } else { None },
        }
    }

    /// Returns whether the timeline or NVTX is on.
    pub(crate) fn is_enabled(&self) -> bool {
        self.nvtx.is_some() || self.timeline.is_recording_events()
    }
}

/// Names of the spans of an operation: negotiation, everything after it, and the transfer itself.
pub(crate) struct TimelineLabels {
    pub(crate) negotiate: &'static str,
    pub(crate) operation: &'static str,
    pub(crate) transfer: &'static str,
}

/// Activity from the arrival of the response list until the earlier batches have started.
pub(crate) const QUEUE_ACTIVITY: &str = "QUEUE";
/// Activity until the framework has computed the input.
pub(crate) const WAIT_FOR_DATA: &str = "WAIT_FOR_DATA";
/// Activity of the copy from a device to the host.
pub(crate) const MEMCPY_IN_HOST_BUFFER: &str = "MEMCPY_IN_HOST_BUFFER";
/// Activity of the copy from the host to a device.
pub(crate) const MEMCPY_OUT_HOST_BUFFER: &str = "MEMCPY_OUT_HOST_BUFFER";

macro_rules! labels {
    ($name:literal) => {
        TimelineLabels {
            negotiate: concat!("NEGOTIATE_", $name),
            operation: $name,
            transfer: concat!("FARANDOLE_", $name),
        }
    };
}

pub(crate) fn timeline_labels_for_call(call: &CollectiveCall) -> TimelineLabels {
    if matches!(call, CollectiveCall::Allreduce { op: ReduceOp::Adasum, .. }) {
        return labels!("ADASUM");
    }
    match call.operation_name() {
        "allreduce" => labels!("ALLREDUCE"),
        "broadcast" => labels!("BROADCAST"),
        "allgather" => labels!("ALLGATHER"),
        "alltoall" => labels!("ALLTOALL"),
        "reducescatter" => labels!("REDUCESCATTER"),
        "join" => labels!("JOIN"),
        "barrier" => labels!("BARRIER"),
        _ => labels!("OPERATION"),
    }
}
