// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Metrics as Prometheus reads them: its text format 0.0.4.

use std::fmt::Write as _;

use crate::metric_names::METRICS;

/// Content type of the format.
pub const EXPOSITION_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSample {
    /// Name of the metric in OpenTelemetry.
    pub metric: String,
    /// Names and values of its labels.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: f64,
}

impl MetricSample {
    /// Returns a sample.
    pub fn new(metric: &str, labels: &[(&str, &str)], value: f64) -> Self {
        let labels =
            labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self { metric: metric.to_owned(), labels, value }
    }
}

/// Returns the samples in the text format, in the order of [`METRICS`]. Samples of other metrics
/// are left out.
pub fn format_exposition(samples: &[MetricSample]) -> String {
    let mut text = String::new();
    for definition in METRICS {
        let mut of_metric =
            samples.iter().filter(|sample| sample.metric == definition.name).peekable();
        if of_metric.peek().is_none() {
            continue;
        }
        let name = definition.prometheus_name();
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {}", definition.help);
        let _ = writeln!(text, "# TYPE {name} {}", definition.kind.as_str());
        for sample in of_metric {
            let (labels, value) = (format_labels(sample), format_value(sample.value));
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    }
    text
}

fn format_labels(sample: &MetricSample) -> String {
    let pairs: Vec<String> = sample
        .labels
        .iter()
        .map(|(name, value)| format!("{name}=\"{}\"", escape_label_value(value)))
        .collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

fn escape_label_value(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Returns a number as Prometheus reads it, which is how Go writes it.
fn format_value(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        value.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_follow_its_help_and_type() {
        let text = format_exposition(&[
            MetricSample::new("farandole.step.duration", &[("rank", "1")], 0.25),
            MetricSample::new("farandole.job.ranks", &[], 2.0),
            MetricSample::new("farandole.step.duration", &[("rank", "0")], f64::NAN),
            MetricSample::new("another", &[], 1.0),
        ]);
        assert_eq!(
            text,
            "# HELP farandole_job_ranks Ranks of the present world.\n\
             # TYPE farandole_job_ranks gauge\n\
             farandole_job_ranks 2\n\
             # HELP farandole_step_duration_seconds Mean time of a step of a rank.\n\
             # TYPE farandole_step_duration_seconds gauge\n\
             farandole_step_duration_seconds{rank=\"1\"} 0.25\n\
             farandole_step_duration_seconds{rank=\"0\"} NaN\n"
        );
    }

    #[test]
    fn a_label_value_may_have_any_character() {
        let sample = MetricSample::new("farandole.run.epochs", &[("run", "a\"\\\nb")], 3.0);
        assert!(
            format_exposition(&[sample])
                .ends_with("farandole_run_epochs{run=\"a\\\"\\\\\\nb\"} 3\n")
        );
    }
}
