// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Observers of operations: the timeline, and NVIDIA's profilers.
//!
//! Rank 0 coordinates the global process set and so knows when every rank arrived; its file is the
//! one to look at. Ranks below one node of the tree arrive together, when the last of them is known
//! there. Other ranks write files of their own if the path has a place for their number; those show
//! what a rank itself saw.

use std::path::PathBuf;

use farandole_collectives::ReduceOp;
use farandole_telemetry::{Extent, Nvtx, Timeline, Title};
use farandole_world::World;

use crate::signature::Call;
use crate::{Engine, Error, Result};

/// The placeholder of the rank in the path of a timeline.
pub const RANK_PLACEHOLDER: &str = "{rank}";

/// Hears of every operation while anybody listens.
pub(crate) struct Tracer {
    pub(crate) timeline: Timeline,
    pub(crate) nvtx: Option<Nvtx>,
}

impl Tracer {
    pub(crate) fn new(nvtx: bool) -> Self {
        Self { timeline: Timeline::default(), nvtx: if nvtx { Nvtx::load() } else { None } }
    }

    /// Returns whether anybody listens.
    pub(crate) fn is_on(&self) -> bool {
        self.nvtx.is_some() || self.timeline.is_on()
    }
}

/// Names of the spans of an operation: negotiation, everything after it, and the transfer itself.
pub(crate) struct Labels {
    pub(crate) negotiate: &'static str,
    pub(crate) operation: &'static str,
    pub(crate) transfer: &'static str,
}

/// From its list until the batches before it have started.
pub(crate) const QUEUE: &str = "QUEUE";
/// Until the framework has computed the input.
pub(crate) const WAIT_FOR_DATA: &str = "WAIT_FOR_DATA";
/// From a device to the host.
pub(crate) const MEMCPY_IN_HOST_BUFFER: &str = "MEMCPY_IN_HOST_BUFFER";
/// From the host to a device.
pub(crate) const MEMCPY_OUT_HOST_BUFFER: &str = "MEMCPY_OUT_HOST_BUFFER";

macro_rules! labels {
    ($name:literal) => {
        Labels {
            negotiate: concat!("NEGOTIATE_", $name),
            operation: $name,
            transfer: concat!("FARANDOLE_", $name),
        }
    };
}

pub(crate) fn labels(call: &Call) -> Labels {
    if matches!(call, Call::Allreduce { op: ReduceOp::Adasum, .. }) {
        return labels!("ADASUM");
    }
    match call.name() {
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
    /// Writes a timeline to `path` from now on; one that runs is ended first. Rank 0 writes, other
    /// ranks only if the path has [`RANK_PLACEHOLDER`] in it, and then each takes its share of the
    /// limit. With `mark_cycles` every negotiation round has a mark. Returns when the file is
    /// there.
    ///
    /// # Errors
    /// `Timeline` when the file cannot be made, or the last one not be ended; `Forked`.
    pub fn start_timeline(&self, path: &str, mark_cycles: bool) -> Result<()> {
        self.check_process()?;
        let rank = self.world().rank;
        if rank.0 != 0 && !path.contains(RANK_PLACEHOLDER) {
            return Ok(());
        }
        let own = path.contains(RANK_PLACEHOLDER);
        let limit = Some(self.inner.settings.timeline_limit).filter(|limit| own && *limit > 0);
        let limit = limit.map(|limit| limit / self.world().size() as u64);
        let extent = Extent { cycles: mark_cycles, own, limit };
        let path = path.replace(RANK_PLACEHOLDER, &rank.to_string());
        let name = format!("farandole rank {rank}");
        self.tracer
            .timeline
            .start(&PathBuf::from(&path), title(self.world(), &name), extent)
            .map_err(|error| refused(path, &error))
    }

    /// Ends the timeline, if there is one, and completes its file.
    ///
    /// # Errors
    /// `Timeline` when the file could not be written to its end; `Forked`.
    pub fn stop_timeline(&self) -> Result<()> {
        self.check_process()?;
        self.tracer.timeline.stop().map_err(|error| refused("its end".to_owned(), &error))
    }
}

impl Engine {
    /// Returns whether a timeline is written in this process.
    pub fn has_timeline(&self) -> bool {
        self.tracer.timeline.is_on()
    }

    /// A phase of a training step begins in the timeline, inside of those that have begun.
    pub fn enter_phase(&self, name: &str) {
        self.tracer.timeline.enter(name);
    }

    /// The phase that began last ends.
    pub fn leave_phase(&self) {
        self.tracer.timeline.leave();
    }
}

fn title<'a>(world: &'a World, name: &'a str) -> Title<'a> {
    Title {
        name,
        rank: world.rank.0,
        host: world.seat().host.machine(),
        size: world.size(),
        generation: world.generation.0,
    }
}

fn refused(path: String, error: &std::io::Error) -> Error {
    Error::Timeline { path, reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use farandole_world::{Generation, HostHash, Rank, TaskId, TaskPlace, assign};

    use super::*;

    #[test]
    fn containers_of_one_machine_have_one_clock_in_a_timeline() {
        let places = [(0, "m/1"), (1, "m/2"), (2, "n")]
            .map(|(task, host)| TaskPlace { task: TaskId(task), host: HostHash(host.to_owned()) });
        let world = assign(Generation(4), &places).unwrap();
        let worlds = [0, 1, 2].map(|rank| world.seen_from(Rank(rank)).unwrap());
        let titles: Vec<Title<'_>> = worlds.iter().map(|world| title(world, "x")).collect();
        let told: Vec<_> = titles.iter().map(|title| (title.rank, title.host)).collect();
        assert_eq!(told, [(0, "m"), (1, "m"), (2, "n")]);
        assert!(titles.iter().all(|title| (title.size, title.generation) == (3, 4)));
    }
}
