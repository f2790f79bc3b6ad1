// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run --ui` and `--metrics`: reports the events of a job to the run viewer, and as
//! metrics.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use farandole::launcher::JobReport;
use farandole::telemetry::{RecordSink, WorkerRecord};
use farandole::world::World;

use super::options::RunOptions;
use crate::embedding_interpreter::{EmbeddingInterpreter, JobViewer, JobViewerOptions};

/// The run viewer and the metrics, if they were requested.
#[derive(Clone)]
pub(super) struct OptionalJobViewer(Option<Arc<dyn JobViewer>>);

impl OptionalJobViewer {
    /// Opens the run viewer, and starts to export metrics, if they were requested.
    ///
    /// # Errors
    /// The store is not writable, the page is not installed, or the port of the metrics is taken.
    pub(super) fn open_viewer(
        options: &RunOptions,
        ranks: u32,
        surroundings: &dyn EmbeddingInterpreter,
    ) -> Result<Self> {
        if !options.is_shown() {
            return Ok(Self(None));
        }
        // In `python train.py`, the script names the run.
        let named =
            options.command.iter().find(|word| word.ends_with(".py")).or(options.command.first());
        let name = named.and_then(|word| Path::new(word).file_stem()?.to_str()).unwrap_or("run");
        let opened = surroundings.open_viewer(&JobViewerOptions {
            shows_run: options.ui.is_some(),
            store: options.ui.as_ref().and_then(|store| store.as_deref()),
            metrics_address: &options.config.metrics,
            name,
            ranks,
        });
        Ok(Self(Some(opened.map_err(|error| anyhow!("the job cannot be shown: {error}"))?)))
    }

    pub(super) fn viewer(&self) -> Option<&dyn JobViewer> {
        self.0.as_deref()
    }

    /// Returns a sink that passes records on to `next`.
    pub(super) fn wrap_sink_with_metrics(&self, next: Arc<dyn RecordSink>) -> Arc<dyn RecordSink> {
        match &self.0 {
            Some(watch) => Arc::new(MetricsSink { viewer: Arc::clone(watch), next }),
            None => next,
        }
    }

    /// Shows the members of a world. `host` returns the host of a task.
    pub(super) fn show_world(&self, world: &World, host: impl Fn(u32) -> String) {
        if let Some(watch) = &self.0 {
            let places: Vec<(u32, String)> =
                world.seats.iter().map(|seat| (seat.task.0, host(seat.task.0))).collect();
            watch.show_world(world.generation.0, &places);
        }
    }

    pub(super) fn show_end(&self, report: &Result<JobReport>) {
        if let Some(watch) = &self.0 {
            match report {
                Ok(report) => watch.show_end(report.job_failure_reason(), report.interrupted),
                Err(error) => watch.show_end(Some(&format!("{error:#}")), false),
            }
        }
    }
}

struct MetricsSink {
    viewer: Arc<dyn JobViewer>,
    next: Arc<dyn RecordSink>,
}

impl RecordSink for MetricsSink {
    fn accept_record(&self, record: WorkerRecord) {
        match record {
            // The console shows lines only.
            WorkerRecord::Metric(metric) => self.viewer.show_metric(&metric),
            record @ WorkerRecord::Log(_) => self.next.accept_record(record),
        }
    }
}
