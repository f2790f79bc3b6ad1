// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The facts about a run: from its `_record.json`, or for a run without one from its history and
//! fingerprint.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use farandole_store::Store;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::series::{self, MAX_SERIES_BYTES, RunSeries, replace_non_finite_words};
use crate::source::{FINGERPRINT_FILE, FileStamp, HISTORY_FILE, RECORD_FILE, RunFiles};

/// Largest `_record.json` or fingerprint that is read.
// The limit of docs/specs/store.md for files of JSON.
const MAX_RECORD_BYTES: u64 = 16 << 20;
/// Characters of a text that the list shows.
const MAX_TEXT_CHARS: usize = 300;
/// Heartbeats that a driver may miss before its run is shown as silent.
const MAX_MISSED_HEARTBEATS: f64 = 4.0;

/// A line in the list of runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RunSummary {
    /// Number of the source and the run's path there: `0/a`.
    pub(crate) run: String,
    pub(crate) name: String,
    /// `running`, `silent`, `ended`, `failed`, `interrupted`, or empty if unknown.
    pub(crate) state: String,
    pub(crate) what: String,
    pub(crate) model: String,
    pub(crate) data: String,
    pub(crate) user: String,
    pub(crate) reason: String,
    /// Milliseconds since 1970.
    pub(crate) started: Option<f64>,
    pub(crate) ended: Option<f64>,
    pub(crate) updated: Option<f64>,
    /// The planned and the finished number of epochs.
    pub(crate) epochs: Option<f64>,
    pub(crate) done: Option<f64>,
    pub(crate) size: Option<f64>,
    pub(crate) restarts: Option<f64>,
    /// Losses and metrics of the last epoch.
    pub(crate) last: BTreeMap<String, f64>,
    pub(crate) best: Option<BestEpoch>,
    #[serde(skip)]
    pub(crate) heartbeat: f64,
}

/// The best epoch: by the validation loss, or else by the training loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BestEpoch {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) epoch: f64,
}

/// Returns the run's record, as its driver wrote it; empty if there is none.
///
/// # Errors
/// [`Error::Damaged`], and a store that cannot be read.
pub(crate) fn read_record(directory: &Store, files: &RunFiles) -> Result<Map<String, Value>> {
    read_json_object(directory, files, RECORD_FILE)
}

/// Returns the arguments of a run: each part's name and a short description.
pub(crate) fn read_run_arguments(directory: &Store, files: &RunFiles) -> BTreeMap<String, String> {
    // A damaged fingerprint ends the next fit with this run, which names the file.
    let summary = read_json_object(directory, files, FINGERPRINT_FILE).unwrap_or_default();
    let parts = summary.get("parts").and_then(Value::as_array).into_iter().flatten();
    parts
        .filter_map(|part| {
            Some((part.get("name")?.as_str()?.to_owned(), part.get("told")?.as_str()?.to_owned()))
        })
        .collect()
}

fn read_json_object(directory: &Store, files: &RunFiles, name: &str) -> Result<Map<String, Value>> {
    let Some((bytes, _)) = files.get(name) else { return Ok(Map::new()) };
    let damaged = |reason: &str| Error::Damaged {
        file: directory.display_path(name),
        reason: reason.to_owned(),
    };
    if *bytes > MAX_RECORD_BYTES {
        return Err(damaged("it is larger than any record"));
    }
    let text = match directory.read(name) {
        Ok(text) => text,
        // It was deleted after the listing.
        Err(farandole_store::Error::Missing { .. }) => return Ok(Map::new()),
        Err(error) => return Err(error.into()),
    };
    match serde_json::from_slice(&replace_non_finite_words(&text)) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) | Err(_) => Err(damaged("it is no JSON object")),
    }
}

/// Returns the summary of a run.
pub(crate) fn summarize_run(
    run: String,
    id: &str,
    directory: &Store,
    files: &RunFiles,
) -> RunSummary {
    // A damaged record must not hide the other runs of the list: its own line shows the problem.
    let (record, problem) = match read_record(directory, files) {
        Ok(record) => (record, None),
        Err(error) => (Map::new(), Some(error.to_string())),
    };
    let of = |name: &str| json_text_value(record.get(name));
    let number = |name: &str| record.get(name).and_then(Value::as_f64);
    let mut summary = RunSummary {
        run,
        name: of("name"),
        state: of("state"),
        what: of("what"),
        model: of("model"),
        data: json_text_value(record.get("data").and_then(|data| data.get("told"))),
        user: of("user"),
        reason: problem.unwrap_or_else(|| of("reason")),
        started: number("started"),
        ended: number("ended"),
        updated: number("updated"),
        epochs: number("epochs"),
        done: number("done"),
        size: number("size"),
        restarts: number("restarts"),
        last: json_number_map(record.get("last")),
        best: recorded_best_epoch(record.get("best")),
        heartbeat: number("heartbeat").unwrap_or(0.0),
    };
    // A source may itself be the directory of a run, which then has no path below it.
    if summary.name.is_empty() {
        summary.name = if id.is_empty() { directory_name(directory) } else { id.to_owned() };
    }
    if record.is_empty() {
        complete_summary_from_history(&mut summary, directory, files);
    }
    summary
}

/// Completes the summary of a run without a record from its history and fingerprint.
fn complete_summary_from_history(summary: &mut RunSummary, directory: &Store, files: &RunFiles) {
    let parts = read_run_arguments(directory, files);
    let part = |name: &str| parts.get(name).cloned().unwrap_or_default();
    (summary.model, summary.data) = (part("model"), part("training data"));
    let time = |name: &str| files.get(name).and_then(|stamp| file_stamp_milliseconds(*stamp));
    summary.started = time(FINGERPRINT_FILE);
    summary.updated = time(HISTORY_FILE).or(summary.started).or_else(|| {
        files.values().filter_map(|stamp| file_stamp_milliseconds(*stamp)).reduce(f64::max)
    });
    let fits = files.get(HISTORY_FILE).is_some_and(|(bytes, _)| *bytes <= MAX_SERIES_BYTES);
    let history = if fits { directory.read(HISTORY_FILE).ok() } else { None };
    if let Some(series) = history.and_then(|history| series::parse_history(&history).ok()) {
        summary.done = series.epoch.last().copied();
        summary.last = last_epoch_values(&series);
        summary.best = best_epoch(&series);
    }
}

/// Losses and metrics of the last epoch.
fn last_epoch_values(series: &RunSeries) -> BTreeMap<String, f64> {
    // They are facts of the run and no results of the model.
    let hidden = ["seconds", "rows", "rows_per_second"];
    let last = series.len().saturating_sub(1);
    let columns = series.columns.iter().filter(|(name, _)| !hidden.contains(&name.as_str()));
    columns
        .filter_map(|(name, column)| {
            Some((name.clone(), Some(column.value_at(last)).filter(|value| value.is_finite())?))
        })
        .collect()
}

fn best_epoch(series: &RunSeries) -> Option<BestEpoch> {
    // The validation loss comes first, because the training loss hides overfitting.
    let name = ["val_loss", "loss"].into_iter().find(|name| series.columns.contains_key(*name))?;
    let (epochs, values) = series.columns.get(name)?.curve_with_gap_marks(&series.epoch);
    let rows = epochs.iter().zip(values.iter()).filter(|(_, value)| value.is_finite());
    let (epoch, value) = rows.min_by(|a, b| a.1.total_cmp(b.1))?;
    Some(BestEpoch { name: name.to_owned(), value: *value, epoch: *epoch })
}

/// Returns the state to show: a running run whose driver has missed its heartbeats is silent.
pub(crate) fn run_state_at(summary: &RunSummary, now: SystemTime) -> &str {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3;
    let timeout = summary.heartbeat * MAX_MISSED_HEARTBEATS * 1e3;
    let late = summary.updated.is_some_and(|updated| now - updated > timeout);
    // Without a heartbeat in the record, silence shows nothing.
    if summary.state == "running" && timeout > 0.0 && late { "silent" } else { &summary.state }
}

fn directory_name(directory: &Store) -> String {
    let url = directory.url();
    url.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned()
}

fn file_stamp_milliseconds(stamp: FileStamp) -> Option<f64> {
    Some(stamp.1?.duration_since(UNIX_EPOCH).ok()?.as_secs_f64() * 1e3)
}

fn json_text_value(value: Option<&Value>) -> String {
    match value {
        // By characters, because bytes could end within one.
        Some(Value::String(text)) => text.chars().take(MAX_TEXT_CHARS).collect(),
        _ => String::new(),
    }
}

fn json_number_map(value: Option<&Value>) -> BTreeMap<String, f64> {
    let map = value.and_then(Value::as_object).into_iter().flatten();
    map.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
}

fn recorded_best_epoch(value: Option<&Value>) -> Option<BestEpoch> {
    let value = value?;
    let number = |name: &str| value.get(name).and_then(Value::as_f64);
    Some(BestEpoch {
        name: json_text_value(value.get("name")),
        value: number("value")?,
        epoch: number("epoch")?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn files(names: &[&str]) -> RunFiles {
        names
            .iter()
            .map(|name| ((*name).to_owned(), (10, Some(UNIX_EPOCH + Duration::from_secs(5)))))
            .collect()
    }

    #[test]
    fn a_run_without_a_record_is_shown_by_its_history_and_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("logs")).unwrap();
        let lines = r#"{"epoch": 0, "train": {"loss": 1.0, "all_metrics": [{"accuracy": 0.5}]}, "validation": {"loss": 0.7, "all_metrics": []}}
{"epoch": 1, "train": {"loss": 0.5, "all_metrics": []}, "validation": {"loss": 0.9, "all_metrics": []}}"#;
        std::fs::write(folder.path().join(HISTORY_FILE), lines).unwrap();
        let parts =
            r#"{"version": 1, "parts": [{"name": "model", "digest": "1", "told": "Sequential"}]}"#;
        std::fs::write(folder.path().join(FINGERPRINT_FILE), parts).unwrap();
        let store = Store::open(&folder.path().to_string_lossy()).unwrap();
        let summary = summarize_run(
            "0/old".to_owned(),
            "old",
            &store,
            &files(&[HISTORY_FILE, FINGERPRINT_FILE]),
        );
        assert_eq!(
            (summary.name.as_str(), summary.state.as_str(), summary.model.as_str()),
            ("old", "", "Sequential")
        );
        assert_eq!(summary.done, Some(2.0));
        assert_eq!(
            summary.best,
            Some(BestEpoch { name: "val_loss".to_owned(), value: 0.7, epoch: 1.0 })
        );
        assert_eq!(summary.last["val_loss"], 0.9);
        assert_eq!(summary.started, Some(5000.0));
    }

    #[test]
    fn a_damaged_record_is_named_and_a_missing_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().to_string_lossy()).unwrap();
        let reason = |files: &RunFiles| summarize_run("0/r".to_owned(), "r", &store, files).reason;
        for text in ["{\"name\": ", "[1]", ""] {
            std::fs::write(folder.path().join(RECORD_FILE), text).unwrap();
            let found = reason(&files(&[RECORD_FILE]));
            assert!(found.starts_with("damaged: ") && found.contains(RECORD_FILE), "{found}");
        }
        let large: RunFiles = [(RECORD_FILE.to_owned(), (MAX_RECORD_BYTES + 1, None))].into();
        assert!(reason(&large).contains("larger than any record"));
        std::fs::remove_file(folder.path().join(RECORD_FILE)).unwrap();
        assert_eq!(reason(&files(&[RECORD_FILE])), "", "deleted after the listing");
    }

    #[test]
    fn a_record_is_taken_as_it_is_and_wrong_types_are_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let record = r#"{"name": "a", "state": "running", "updated": 1000, "heartbeat": 5, "epochs": "many",
            "last": {"loss": 0.5, "x": "y", "z": NaN}, "data": {"told": "3 rows"}, "what": ["no text"]}"#;
        std::fs::write(folder.path().join(RECORD_FILE), record).unwrap();
        let store = Store::open(&folder.path().to_string_lossy()).unwrap();
        let summary = summarize_run("0/a".to_owned(), "a", &store, &files(&[RECORD_FILE]));
        assert_eq!(
            (summary.name.as_str(), summary.data.as_str(), summary.what.as_str()),
            ("a", "3 rows", "")
        );
        assert_eq!((summary.epochs, summary.last.len()), (None, 1));
        assert_eq!(run_state_at(&summary, UNIX_EPOCH + Duration::from_secs(20)), "running");
        assert_eq!(run_state_at(&summary, UNIX_EPOCH + Duration::from_secs(22)), "silent");
    }

    #[test]
    fn a_damaged_record_is_a_run_without_one() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(RECORD_FILE), "{").unwrap();
        let store = Store::open(&folder.path().to_string_lossy()).unwrap();
        assert_eq!(summarize_run("0/a".to_owned(), "a", &store, &files(&[RECORD_FILE])).name, "a");
    }
}
