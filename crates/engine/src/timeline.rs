// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Observers of operations: the timeline, and NVIDIA's profilers.
//!
//! Rank 0 coordinates the global process set and so knows when every rank announced a tensor; its
//! file is the main one. Ranks below one node of the control tree appear together, when the last of
//! them has announced. Other ranks write their own files if the path contains [`RANK_PLACEHOLDER`];
//! each file shows the events on that rank.

use std::path::PathBuf;

use farandole_kernels::ReduceOp;
use farandole_negotiation::CollectiveCall;
use farandole_telemetry::{NvtxDomain, Timeline, TimelineOptions, TimelineOwner};
use farandole_world::World;

use crate::{Engine, Error, Result};

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

impl Engine {
    /// Starts writing a timeline to `path`; a running timeline is ended first. Only rank 0 writes,
    /// unless the path contains [`RANK_PLACEHOLDER`]: then every rank writes its own file, and each
    /// gets an equal share of the size limit. With `mark_cycles` every negotiation round has a
    /// mark. Returns when the file exists.
    ///
    /// # Errors
    /// `Timeline` if the file cannot be created or the previous timeline cannot be completed;
    /// `Forked`.
    pub fn start_timeline(&self, path: &str, mark_cycles: bool) -> Result<()> {
        self.check_original_process()?;
        let rank = self.world().rank;
        if rank.0 != 0 && !path.contains(RANK_PLACEHOLDER) {
            return Ok(());
        }
        let own = path.contains(RANK_PLACEHOLDER);
        let limit = Some(self.inner.settings.timeline_limit).filter(|limit| own && *limit > 0);
        let limit = limit.map(|limit| limit / self.world().size() as u64);
        let extent = TimelineOptions { mark_cycles, own_arrivals_only: own, max_bytes: limit };
        let path = path.replace(RANK_PLACEHOLDER, &rank.to_string());
        let name = format!("farandole rank {rank}");
        self.tracer
            .timeline
            .start_writing(&PathBuf::from(&path), timeline_owner(self.world(), &name), extent)
            .map_err(|error| timeline_error(path, &error))
    }

    /// Ends the timeline, if there is one, and completes its file.
    ///
    /// # Errors
    /// `Timeline` if the file could not be written to its end; `Forked`.
    pub fn stop_timeline(&self) -> Result<()> {
        self.check_original_process()?;
        self.tracer
            .timeline
            .stop_writing()
            .map_err(|error| timeline_error("its end".to_owned(), &error))
    }
}

impl Engine {
    /// Returns whether this process writes a timeline.
    pub fn has_timeline(&self) -> bool {
        self.tracer.timeline.is_recording_events()
    }

    /// Begins a phase of a training step in the timeline, nested in the phases that are open.
    pub fn enter_step_phase(&self, name: &str) {
        self.tracer.timeline.enter_step_phase(name);
    }

    /// Ends the innermost open phase.
    pub fn leave_step_phase(&self) {
        self.tracer.timeline.leave_step_phase();
    }
}

fn timeline_owner<'a>(world: &'a World, name: &'a str) -> TimelineOwner<'a> {
    TimelineOwner {
        name,
        rank: world.rank.0,
        // Containers of one machine have one clock, so they count as one host in a timeline.
        host: world.own_placement().host.machine_name(),
        size: world.size(),
        generation: world.generation.0,
    }
}

fn timeline_error(path: String, error: &std::io::Error) -> Error {
    Error::Timeline { path, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, Rank, TaskId, TaskPlacement, assign_ranks};

    use super::*;

    #[test]
    fn containers_of_one_machine_have_one_clock_in_a_timeline() {
        let places = [(0, "m/1"), (1, "m/2"), (2, "n")].map(|(task, host)| TaskPlacement {
            task: TaskId(task),
            host: HostHash(host.to_owned()),
        });
        let world = assign_ranks(Generation(4), &places).unwrap();
        let worlds = [0, 1, 2].map(|rank| world.seen_from(Rank(rank)).unwrap());
        let titles: Vec<TimelineOwner<'_>> =
            worlds.iter().map(|world| timeline_owner(world, "x")).collect();
        let named: Vec<_> = titles.iter().map(|title| (title.rank, title.host)).collect();
        assert_eq!(named, [(0, "m"), (1, "m"), (2, "n")]);
        assert!(titles.iter().all(|title| (title.size, title.generation) == (3, 4)));
    }
}
