// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The runs of all stores as metrics: `TOKEN/metrics`.

use std::time::{SystemTime, UNIX_EPOCH};

use farandole_telemetry::{MetricSample, format_exposition};

use crate::catalog::{FoundRun, RunCatalog};
use crate::error::Result;
use crate::source::RunFiles;

/// Runs that are shown: the newest.
// Each run has several series, and a store may have thousands of runs that have ended.
const MAX_METRIC_RUNS: usize = 100;
/// File of the last checkpoint or commit.
const CHECKPOINT_FILE: &str = "checkpoint";
const MILLISECONDS_PER_SECOND: f64 = 1e3;

/// Returns the metrics of the newest runs in Prometheus's format.
///
/// # Errors
/// A store that cannot be read.
pub(crate) fn format_run_metrics(catalog: &RunCatalog) -> Result<String> {
    let mut runs = catalog.find_all_runs()?;
    runs.sort_by(|one, other| {
        let begin = |run: &FoundRun| run.summary.started.unwrap_or_default();
        begin(other).total_cmp(&begin(one))
    });
    runs.truncate(MAX_METRIC_RUNS);
    let now = seconds_since_epoch(SystemTime::now()).unwrap_or_default();
    let samples: Vec<MetricSample> = runs.iter().flat_map(|run| run_samples(run, now)).collect();
    Ok(format_exposition(&samples))
}

fn run_samples(found: &FoundRun, now: f64) -> Vec<MetricSample> {
    let summary = &found.summary;
    // Names repeat, so the path in the store is a label, too.
    let of_run = [("run", summary.run.as_str()), ("name", summary.name.as_str())];
    let labels = |more: &[(&'static str, &str)]| -> Vec<(String, String)> {
        of_run
            .iter()
            .chain(more)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    };
    let sample = |metric: &str, more: &[(&'static str, &str)], value: f64| MetricSample {
        metric: metric.to_owned(),
        labels: labels(more),
        value,
    };
    let mut samples =
        vec![sample("farandole.run.state", &[("state", summary.state.as_str())], 1.0)];
    let mut add = |metric, value: Option<f64>| {
        samples.extend(value.map(|value| sample(metric, &[], value)));
    };
    add("farandole.run.epochs", summary.done);
    if matches!(summary.state.as_str(), "running" | "silent") {
        let age = |at: f64| (now - at / MILLISECONDS_PER_SECOND).max(0.0);
        add("farandole.run.silence", summary.updated.map(age));
        add("farandole.job.age", summary.started.map(age));
        // An alarm for old checkpoints must end with its run.
        let saved_at = checkpoint_time(&found.files);
        add("farandole.checkpoint.age", saved_at.map(|at| (now - at).max(0.0)));
        add("farandole.job.ranks", summary.size);
    }
    samples.extend(
        summary.last.iter().map(|(score, value)| {
            sample("farandole.run.score", &[("score", score.as_str())], *value)
        }),
    );
    samples
}

fn checkpoint_time(files: &RunFiles) -> Option<f64> {
    seconds_since_epoch(files.get(CHECKPOINT_FILE)?.1?)
}

fn seconds_since_epoch(at: SystemTime) -> Option<f64> {
    Some(at.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_states_scores_and_the_ages_of_their_checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "runs/a/_record.json",
            r#"{"name": "first \"a\"", "state": "running", "size": 4, "done": 3, "started": 1000,
                "updated": 2000, "last": {"loss": 0.5}}"#,
        );
        write("runs/a/checkpoint", "bytes");
        write("runs/b/checkpoint", "bytes");
        write("runs/b/_record.json", r#"{"name": "b", "state": "ended", "started": 500}"#);
        let catalog = RunCatalog::open(&[folder.path().to_string_lossy().into_owned()]).unwrap();
        let text = format_run_metrics(&catalog).unwrap();
        let labels = r#"run="0/a",name="first \"a\"""#;
        for line in [
            format!("farandole_run_state{{{labels},state=\"running\"}} 1"),
            format!("farandole_run_epochs{{{labels}}} 3"),
            format!("farandole_job_ranks{{{labels}}} 4"),
            format!("farandole_run_score{{{labels},score=\"loss\"}} 0.5"),
            r#"farandole_run_state{run="0/b",name="b",state="ended"} 1"#.to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        let age =
            text.lines().find_map(|line| line.strip_prefix("farandole_checkpoint_age_seconds"));
        let age: f64 = age.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
        assert!((0.0..3600.0).contains(&age), "{age}");
        assert!(!text.contains(r#"farandole_run_silence_seconds{run="0/b""#));
        assert!(text.contains(&format!("farandole_job_age_seconds{{{labels}}}")));
        assert!(!text.contains(r#"farandole_job_age_seconds{run="0/b""#));
        assert!(!text.contains(r#"farandole_checkpoint_age_seconds{run="0/b""#));
    }
}
