// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The timeline of an engine, as its callers start and end it.

use std::path::PathBuf;

use farandole_telemetry::{TimelineOptions, TimelineOwner};
use farandole_world::World;

use super::Engine;
use crate::timeline::RANK_PLACEHOLDER;
use crate::{Error, Result};

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
