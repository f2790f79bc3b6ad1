// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Names of all metrics of a job and of the run viewer, for Prometheus and OpenTelemetry.

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that rises and falls.
    Gauge,
    /// A sum that only grows while a process lives.
    Counter,
}

impl MetricKind {
    /// Returns Prometheus's word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

/// The definition of a metric.
#[derive(Clone, Copy, Debug)]
pub struct MetricDefinition {
    /// Name in OpenTelemetry.
    pub name: &'static str,
    /// The kind.
    pub kind: MetricKind,
    /// Unit as UCUM writes it: `s`, `By`, `1` for a share, or a word in braces.
    pub unit: &'static str,
    /// The documentation, in one line.
    pub help: &'static str,
}

impl MetricDefinition {
    /// Returns the name in Prometheus, by OpenTelemetry's rules: the unit is a suffix without the
    /// words in braces, a rate ends in `_per_second`, and counters end in `_total`.
    pub fn prometheus_name(&self) -> String {
        let unit = match (self.unit, self.kind) {
            ("s", _) => "_seconds",
            ("By", _) => "_bytes",
            ("1", MetricKind::Gauge) => "_ratio",
            (unit, _) if unit.ends_with("}/s") => "_per_second",
            _ => "",
        };
        let total = if self.kind == MetricKind::Counter { "_total" } else { "" };
        format!("{}{unit}{total}", self.name.replace('.', "_"))
    }
}

const fn gauge(name: &'static str, unit: &'static str, help: &'static str) -> MetricDefinition {
    MetricDefinition { name, kind: MetricKind::Gauge, unit, help }
}

const fn counter(name: &'static str, unit: &'static str, help: &'static str) -> MetricDefinition {
    MetricDefinition { name, kind: MetricKind::Counter, unit, help }
}

/// Every metric, in the order of the reference page.
pub const METRICS: &[MetricDefinition] = &[
    gauge("farandole.job.ranks", "{rank}", "Ranks of the present world."),
    counter(
        "farandole.job.worlds",
        "{world}",
        "Worlds that have formed. Each one after the first is a change of the membership.",
    ),
    counter("farandole.job.losses", "{loss}", "Workers and hosts that were lost."),
    gauge("farandole.job.age", "s", "Time since a running run has begun."),
    gauge("farandole.job.rows", "{row}/s", "Rows of all ranks in a second."),
    gauge("farandole.step.duration", "s", "Mean time of a step of a rank."),
    gauge("farandole.step.data_wait", "1", "Share of a step that waits for data."),
    gauge("farandole.step.reduction_wait", "1", "Share of a step that waits for the reduction."),
    gauge("farandole.step.age", "s", "Time since a step of a rank has ended."),
    counter(
        "farandole.rank.collective_wait",
        "s",
        "Time for which calls of a rank have waited for collectives.",
    ),
    counter(
        "farandole.link.sent",
        "By",
        "Bytes that a rank has sent to others, by the kind of the link.",
    ),
    counter(
        "farandole.store.retries",
        "{request}",
        "Requests to stores that have failed and were repeated.",
    ),
    gauge(
        "farandole.checkpoint.age",
        "s",
        "Time since a checkpoint or commit was written to a store.",
    ),
    gauge("farandole.rank.memory", "By", "Resident memory of the process of a rank."),
    gauge("farandole.host.cpu", "1", "Share of a host's processors that is busy."),
    gauge("farandole.host.memory", "By", "Memory of a host that is in use."),
    gauge("farandole.gpu.utilization", "1", "Share of the time in which the GPU of a rank works."),
    gauge("farandole.gpu.memory", "By", "Memory of the GPU of a rank that is in use."),
    gauge("farandole.run.state", "{run}", "1 for the state in which a run of a store is."),
    gauge("farandole.run.epochs", "{epoch}", "Finished epochs of a run."),
    gauge("farandole.run.score", "{score}", "A loss or metric of the last epoch of a run."),
    gauge("farandole.run.silence", "s", "Time since the driver of a running run has reported."),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_differ_and_have_the_form_of_both_systems() {
        let names: BTreeSet<String> = METRICS.iter().map(|one| one.prometheus_name()).collect();
        assert_eq!(names.len(), METRICS.len());
        for name in &names {
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        }
        assert!(names.contains("farandole_link_sent_bytes_total"));
        assert!(names.contains("farandole_step_data_wait_ratio"));
        assert!(names.contains("farandole_job_rows_per_second"));
        assert!(METRICS.iter().all(|one| one.help.ends_with('.') && !one.help.contains('\n')));
    }
}
