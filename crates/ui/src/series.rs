// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The numbers of a run as columns, from the files that it writes them to.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;

/// Numbers by epoch or by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunSeries {
    /// Place in the training: the epoch's number from 1, with a fraction within an epoch.
    pub(crate) epoch: Vec<f64>,
    /// Seconds of training at that place.
    pub(crate) seconds: Vec<f64>,
    /// The numbers, each as long as `epoch`; NaN where there is none.
    pub(crate) columns: BTreeMap<String, Vec<f64>>,
}

impl RunSeries {
    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.epoch.len()
    }

    /// Returns the numbers that it holds.
    pub(crate) fn number_count(&self) -> usize {
        self.len() * (self.columns.len() + 2)
    }

    fn append_value(&mut self, name: &str, value: f64) {
        let row = self.epoch.len() - 1;
        if let Some(column) = self.columns.get_mut(name) {
            column.resize(row, f64::NAN);
            column.push(value);
        } else {
            let mut column = vec![f64::NAN; row];
            column.push(value);
            self.columns.insert(name.to_owned(), column);
        }
    }

    fn fill_columns(mut self) -> Self {
        let rows = self.len();
        self.columns.values_mut().for_each(|column| column.resize(rows, f64::NAN));
        self
    }
}

/// A line of `logs/history.jsonl`.
#[derive(Deserialize)]
struct HistoryLine<'a> {
    epoch: f64,
    #[serde(borrow, default)]
    train: Option<HistoryScores<'a>>,
    #[serde(borrow, default)]
    validation: Option<HistoryScores<'a>>,
    #[serde(default)]
    seconds: Option<f64>,
    #[serde(default)]
    rows: Option<f64>,
}

#[derive(Deserialize)]
struct HistoryScores<'a> {
    #[serde(default)]
    loss: Option<f64>,
    #[serde(borrow, default)]
    all_metrics: Vec<BTreeMap<Cow<'a, str>, Option<f64>>>,
}

/// Returns the columns of `logs/history.jsonl`: `loss`, each metric, the same with `val_` before
/// it, `seconds`, `rows` and `rows_per_second`. Lines that cannot be read are left out.
pub(crate) fn parse_history(text: &[u8]) -> RunSeries {
    let mut series = RunSeries::default();
    let mut clock = 0.0;
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let plain = without_nan(line);
        let Ok(entry) = serde_json::from_slice::<HistoryLine<'_>>(&plain) else { continue };
        clock += entry.seconds.unwrap_or(0.0);
        series.epoch.push(entry.epoch + 1.0);
        series.seconds.push(clock);
        for (prefix, scores) in [("", entry.train), ("val_", entry.validation)] {
            let Some(scores) = scores else { continue };
            let metrics =
                scores.all_metrics.iter().flatten().map(|(name, value)| (name.as_ref(), *value));
            for (name, value) in [("loss", scores.loss)].into_iter().chain(metrics) {
                let value = value.unwrap_or(f64::NAN);
                if prefix.is_empty() {
                    series.append_value(name, value);
                } else {
                    series.append_value(&format!("{prefix}{name}"), value);
                }
            }
        }
        if let Some(seconds) = entry.seconds {
            series.append_value("seconds", seconds);
        }
        if let Some(rows) = entry.rows {
            series.append_value("rows", rows);
        }
        if let (Some(rows), Some(seconds)) = (entry.rows, entry.seconds)
            && seconds > 0.0
        {
            series.append_value("rows_per_second", rows / seconds);
        }
    }
    series.fill_columns()
}

/// Returns the columns of `logs/steps.jsonl`, whose lines are flat: `epoch`, `seconds` and further
/// numbers by name.
pub(crate) fn parse_steps(text: &[u8]) -> RunSeries {
    let mut series = RunSeries::default();
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let plain = without_nan(line);
        let Ok(mut numbers) = serde_json::from_slice::<BTreeMap<Cow<'_, str>, Option<f64>>>(&plain)
        else {
            continue;
        };
        let (Some(Some(epoch)), Some(Some(seconds))) =
            (numbers.remove("epoch"), numbers.remove("seconds"))
        else {
            continue;
        };
        series.epoch.push(epoch);
        series.seconds.push(seconds);
        for (name, value) in &numbers {
            series.append_value(name, value.unwrap_or(f64::NAN));
        }
    }
    series.fill_columns()
}

/// Replaces `NaN` and infinities, which Python writes and JSON does not have, by `null`.
pub(crate) fn without_nan(text: &[u8]) -> Cow<'_, [u8]> {
    const NON_FINITE_WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let has = |word: &[u8]| text.windows(word.len()).any(|part| part == word);
    if !text.iter().any(|byte| matches!(byte, b'N' | b'I'))
        || !(has(NON_FINITE_WORDS[1]) || has(NON_FINITE_WORDS[2]))
    {
        return Cow::Borrowed(text);
    }
    let mut plain = Vec::with_capacity(text.len());
    let (mut quoted, mut at) = (false, 0);
    while let Some(&byte) = text.get(at) {
        let word = if quoted {
            None
        } else {
            NON_FINITE_WORDS.iter().find(|word| text[at..].starts_with(word))
        };
        if let Some(word) = word {
            plain.extend_from_slice(b"null");
            at += word.len();
            continue;
        }
        if byte == b'"' {
            quoted = !quoted;
        }
        // The byte behind a backslash ends no text.
        let taken = if quoted && byte == b'\\' { 2 } else { 1 };
        let end = (at + taken).min(text.len());
        plain.extend_from_slice(&text[at..end]);
        at = end;
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_becomes_columns_by_name() {
        let text = br#"{"epoch": 0, "train": {"loss": 0.5, "all_metrics": [{"accuracy": 0.9}]}, "validation": {"loss": 0.6, "all_metrics": []}, "seconds": 2.0, "rows": 100}
not a line
{"epoch": 1, "train": {"loss": NaN, "all_metrics": [{"accuracy": Infinity, "f1": 0.1}]}, "seconds": 3.0, "rows": 100}
"#;
        let series = parse_history(text);
        assert_eq!(series.epoch, [1.0, 2.0]);
        assert_eq!(series.seconds, [2.0, 5.0]);
        assert!(series.columns["loss"][1].is_nan() && series.columns["accuracy"][1].is_nan());
        assert!(series.columns["f1"][0].is_nan() && series.columns["val_loss"][1].is_nan());
        assert_eq!(series.columns["val_loss"][0], 0.6);
        assert_eq!(series.columns["rows_per_second"][0], 50.0);
    }

    #[test]
    fn steps_are_flat_lines() {
        let series = parse_steps(b"{\"epoch\": 0.5, \"seconds\": 1.0, \"loss\": 2.0}\n{\"epoch\": 0.7}\n{\"epoch\": 1.0, \"seconds\": 2.0, \"x\": null}\n");
        assert_eq!(series.epoch, [0.5, 1.0]);
        assert_eq!(series.columns["loss"][0], 2.0);
        assert!(series.columns["x"][1].is_nan() && series.columns["loss"][1].is_nan());
    }

    #[test]
    fn words_within_texts_stay() {
        let text = br#"{"NaN": NaN, "a": "x\"NaN", "b": -Infinity}"#;
        assert_eq!(&*without_nan(text), br#"{"NaN": null, "a": "x\"NaN", "b": null}"#);
        assert!(matches!(without_nan(b"{\"a\": 1}"), Cow::Borrowed(_)));
        assert_eq!(&*without_nan(b"NaN\"\\"), b"null\"\\");
    }
}
