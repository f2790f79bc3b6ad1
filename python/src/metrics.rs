// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole._native.metrics`: names of all metrics, and the counters of this process.

use std::collections::BTreeMap;

use farandole::store::failed_store_attempts;
use farandole::telemetry::metric_names::{METRICS, MetricDefinition};
use farandole::telemetry::{EXPOSITION_CONTENT_TYPE, MetricSample, collective_wait};
use farandole::transport::{LinkKind, sent_link_bytes};
use pyo3::prelude::*;

/// Fills the submodule.
pub(crate) fn register_submodule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CONTENT_TYPE", EXPOSITION_CONTENT_TYPE)?;
    module.add_function(wrap_pyfunction!(definitions, module)?)?;
    module.add_function(wrap_pyfunction!(format_exposition, module)?)?;
    module.add_function(wrap_pyfunction!(process_counters, module)?)
}

/// Name, kind, unit, documentation, and the name in Prometheus.
type MetricFields = (&'static str, &'static str, &'static str, &'static str, String);

#[pyfunction]
fn definitions() -> Vec<MetricFields> {
    METRICS
        .iter()
        .map(|metric| {
            let MetricDefinition { name, kind, unit, help } = *metric;
            (name, kind.as_str(), unit, help, metric.prometheus_name())
        })
        .collect()
}

#[pyfunction]
#[pyo3(signature = (samples, /))]
fn format_exposition(samples: Vec<(String, BTreeMap<String, String>, f64)>) -> String {
    let samples: Vec<MetricSample> = samples
        .into_iter()
        .map(|(metric, labels, value)| MetricSample {
            metric,
            labels: labels.into_iter().collect(),
            value,
        })
        .collect();
    farandole::telemetry::format_exposition(&samples)
}

/// Returns the sums since the start of this process, by name.
#[pyfunction]
#[expect(clippy::cast_precision_loss, reason = "metrics are doubles, as in Prometheus")]
fn process_counters() -> BTreeMap<&'static str, f64> {
    BTreeMap::from([
        ("shared_memory_bytes", sent_link_bytes(LinkKind::SharedMemory) as f64),
        ("tcp_bytes", sent_link_bytes(LinkKind::Tcp) as f64),
        ("collective_wait_seconds", collective_wait().as_secs_f64()),
        ("store_retries", failed_store_attempts() as f64),
    ])
}
