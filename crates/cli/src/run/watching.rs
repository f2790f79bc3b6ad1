// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run --ui`: what happens in a job, told to the run viewer.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use farandole::launcher::Report;
use farandole::telemetry::{Record, Sink};
use farandole::world::World;

use super::options::RunOptions;
use crate::surroundings::{Surroundings, Watch};

/// The viewer, if it was requested.
#[derive(Clone)]
pub(super) struct Watching(Option<Arc<dyn Watch>>);

impl Watching {
    /// Opens it.
    ///
    /// # Errors
    /// The store cannot be written, or the page is not installed.
    pub(super) fn open(
        options: &RunOptions,
        ranks: u32,
        surroundings: &dyn Surroundings,
    ) -> Result<Self> {
        let Some(store) = &options.ui else { return Ok(Self(None)) };
        // Of `python train.py`, the script names the run.
        let named =
            options.command.iter().find(|word| word.ends_with(".py")).or(options.command.first());
        let name = named.and_then(|word| Path::new(word).file_stem()?.to_str()).unwrap_or("run");
        let opened = surroundings.watch(store.as_deref(), name, ranks);
        Ok(Self(Some(
            opened.map_err(|error| anyhow!("the run viewer cannot show the job: {error}"))?,
        )))
    }

    pub(super) fn watch(&self) -> Option<&dyn Watch> {
        self.0.as_deref()
    }

    /// Returns a sink that passes records on to `next`.
    pub(super) fn before(&self, next: Arc<dyn Sink>) -> Arc<dyn Sink> {
        match &self.0 {
            Some(watch) => Arc::new(Metrics { watch: Arc::clone(watch), next }),
            None => next,
        }
    }

    /// Reports the members of a world. `host` names the host of a task.
    pub(super) fn world(&self, world: &World, host: impl Fn(u32) -> String) {
        if let Some(watch) = &self.0 {
            let places: Vec<(u32, String)> =
                world.seats.iter().map(|seat| (seat.task.0, host(seat.task.0))).collect();
            watch.world(world.generation.0, &places);
        }
    }

    pub(super) fn ended(&self, report: &Result<Report>) {
        if let Some(watch) = &self.0 {
            match report {
                Ok(report) => watch.ended(report.reason(), report.interrupted),
                Err(error) => watch.ended(Some(&format!("{error:#}")), false),
            }
        }
    }
}

struct Metrics {
    watch: Arc<dyn Watch>,
    next: Arc<dyn Sink>,
}

impl Sink for Metrics {
    fn accept(&self, record: Record) {
        match record {
            Record::Metric(metric) => self.watch.metric(&metric),
            record @ Record::Log(_) => self.next.accept(record),
        }
    }
}
