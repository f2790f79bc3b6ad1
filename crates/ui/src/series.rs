// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The numbers of a run as columns, from the files that it writes them to.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;

/// Largest file of numbers that is read.
pub(crate) const MAX_SERIES_BYTES: u64 = 512 << 20;
/// Names of numbers that one file may have. A file with more was not written by a training.
const MAX_COLUMNS: usize = 4096;

/// The file has more than [`MAX_COLUMNS`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it has more than {MAX_COLUMNS} names of numbers")]
pub(crate) struct TooManyColumns;

/// The numbers of one name. Rows without a number take no memory, so the memory of a file's
/// columns is in proportion to the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MetricColumn {
    /// Rows that have a number, ascending.
    rows: Vec<usize>,
    /// Their numbers, NaN where the file has `null`.
    values: Vec<f64>,
}

impl MetricColumn {
    /// Returns the number of one row; NaN where there is none.
    pub(crate) fn value_at(&self, row: usize) -> f64 {
        self.rows.binary_search(&row).map_or(f64::NAN, |at| self.values[at])
    }

    /// Returns `x` and `y` of a curve: all numbers, and one NaN in each gap between them.
    pub(crate) fn curve_with_gap_marks<'a>(
        &'a self,
        x: &'a [f64],
    ) -> (Cow<'a, [f64]>, Cow<'a, [f64]>) {
        if self.rows.len() == x.len() {
            return (Cow::Borrowed(x), Cow::Borrowed(&self.values));
        }
        let (mut curve_x, mut curve_y) = (Vec::new(), Vec::new());
        let mut next = self.rows.first().copied().unwrap_or_default();
        for (&row, &value) in self.rows.iter().zip(&self.values) {
            if row > next {
                curve_x.push(x[next]);
                curve_y.push(f64::NAN);
            }
            curve_x.push(x[row]);
            curve_y.push(value);
            next = row + 1;
        }
        (Cow::Owned(curve_x), Cow::Owned(curve_y))
    }

    fn set_value(&mut self, row: usize, value: f64) {
        // A line may have a name twice; like in JSON, the last number counts.
        if self.rows.last() == Some(&row) {
            self.values.pop();
        } else {
            self.rows.push(row);
        }
        self.values.push(value);
    }
}

/// Numbers by epoch or by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunSeries {
    /// Place in the training: the epoch's number from 1, with a fraction within an epoch.
    pub(crate) epoch: Vec<f64>,
    /// Seconds of training at that place.
    pub(crate) seconds: Vec<f64>,
    /// The numbers by name.
    pub(crate) columns: BTreeMap<String, MetricColumn>,
}

impl RunSeries {
    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.epoch.len()
    }

    /// Returns the numbers that it holds.
    pub(crate) fn number_count(&self) -> usize {
        // A number has its row and its value.
        let held = self.columns.values().map(|column| column.values.len() * 2);
        self.len() * 2 + held.sum::<usize>()
    }

    /// Sets a number of the last row.
    fn set_value(&mut self, name: &str, value: f64) -> Result<(), TooManyColumns> {
        let row = self.epoch.len() - 1;
        if let Some(column) = self.columns.get_mut(name) {
            column.set_value(row, value);
            return Ok(());
        }
        if self.columns.len() == MAX_COLUMNS {
            return Err(TooManyColumns);
        }
        self.columns.entry(name.to_owned()).or_default().set_value(row, value);
        Ok(())
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
///
/// # Errors
/// [`TooManyColumns`].
pub(crate) fn parse_history(text: &[u8]) -> Result<RunSeries, TooManyColumns> {
    let mut series = RunSeries::default();
    let mut clock = 0.0;
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let plain = replace_non_finite_words(line);
        // A killed writer leaves half a line.
        let Ok(entry) = serde_json::from_slice::<HistoryLine<'_>>(&plain) else { continue };
        // The history has the seconds of each epoch, and charts show the time since the start.
        clock += entry.seconds.unwrap_or(0.0);
        // Files count epochs from 0, and charts from 1.
        series.epoch.push(entry.epoch + 1.0);
        series.seconds.push(clock);
        for (prefix, scores) in [("", entry.train), ("val_", entry.validation)] {
            let Some(scores) = scores else { continue };
            let metrics =
                scores.all_metrics.iter().flatten().map(|(name, value)| (name.as_ref(), *value));
            for (name, value) in [("loss", scores.loss)].into_iter().chain(metrics) {
                let value = value.unwrap_or(f64::NAN);
                if prefix.is_empty() {
                    series.set_value(name, value)?;
                } else {
                    series.set_value(&format!("{prefix}{name}"), value)?;
                }
            }
        }
        if let Some(seconds) = entry.seconds {
            series.set_value("seconds", seconds)?;
        }
        if let Some(rows) = entry.rows {
            series.set_value("rows", rows)?;
        }
        if let (Some(rows), Some(seconds)) = (entry.rows, entry.seconds)
            && seconds > 0.0
        {
            series.set_value("rows_per_second", rows / seconds)?;
        }
    }
    Ok(series)
}

/// Returns the columns of `logs/steps.jsonl`, whose lines are flat: `epoch`, `seconds` and further
/// numbers by name.
///
/// # Errors
/// [`TooManyColumns`].
pub(crate) fn parse_steps(text: &[u8]) -> Result<RunSeries, TooManyColumns> {
    let mut series = RunSeries::default();
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let plain = replace_non_finite_words(line);
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
            series.set_value(name, value.unwrap_or(f64::NAN))?;
        }
    }
    Ok(series)
}

/// Replaces `NaN` and infinities, which Python writes and JSON does not have, by `null`.
pub(crate) fn replace_non_finite_words(text: &[u8]) -> Cow<'_, [u8]> {
    const NON_FINITE_WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let has = |word: &[u8]| text.windows(word.len()).any(|part| part == word);
    // Few files have such a word, and the copy of a large file costs time and memory.
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
        let series = parse_history(text).unwrap();
        assert_eq!(series.epoch, [1.0, 2.0]);
        assert_eq!(series.seconds, [2.0, 5.0]);
        assert!(
            series.columns["loss"].value_at(1).is_nan()
                && series.columns["accuracy"].value_at(1).is_nan()
        );
        assert!(
            series.columns["f1"].value_at(0).is_nan()
                && series.columns["val_loss"].value_at(1).is_nan()
        );
        assert_eq!(series.columns["val_loss"].value_at(0), 0.6);
        assert_eq!(series.columns["rows_per_second"].value_at(0), 50.0);
    }

    #[test]
    fn steps_are_flat_lines() {
        let series = parse_steps(b"{\"epoch\": 0.5, \"seconds\": 1.0, \"loss\": 2.0}\n{\"epoch\": 0.7}\n{\"epoch\": 1.0, \"seconds\": 2.0, \"x\": null}\n").unwrap();
        assert_eq!(series.epoch, [0.5, 1.0]);
        assert_eq!(series.columns["loss"].value_at(0), 2.0);
        assert!(
            series.columns["x"].value_at(1).is_nan() && series.columns["loss"].value_at(1).is_nan()
        );
    }

    #[test]
    fn a_column_with_gaps_is_a_curve_with_gaps() {
        let text: Vec<u8> = (0..8u32)
            .flat_map(|row| {
                let more = if [1, 2, 5, 7].contains(&row) {
                    format!(", \"x\": {row}")
                } else {
                    String::new()
                };
                format!("{{\"epoch\": {row}, \"seconds\": {row}, \"loss\": 1{more}}}\n")
                    .into_bytes()
            })
            .collect();
        let series = parse_steps(&text).unwrap();
        let (x, y) = series.columns["x"].curve_with_gap_marks(&series.epoch);
        assert_eq!(&*x, [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]);
        let shown: Vec<_> = y.iter().map(|value| value.is_finite().then_some(*value)).collect();
        assert_eq!(shown, [Some(1.0), Some(2.0), None, Some(5.0), None, Some(7.0)]);
        assert!(matches!(
            series.columns["loss"].curve_with_gap_marks(&series.epoch),
            (Cow::Borrowed(_), _)
        ));
    }

    /// A line with a new name each takes memory in proportion to the file: rows x names would be
    /// 17 million numbers here.
    #[test]
    fn new_names_in_every_line_take_little_memory_and_have_a_limit() {
        let lines = |count: usize| -> Vec<u8> {
            let line = |row: usize| {
                format!(
                    "{{\"epoch\": {row}, \"train\": {{\"all_metrics\": [{{\"m{row}\": 1}}]}}}}\n"
                )
            };
            (0..count).flat_map(|row| line(row).into_bytes()).collect()
        };
        // `loss` is a name, too.
        let series = parse_history(&lines(MAX_COLUMNS - 1)).unwrap();
        assert_eq!(series.columns.len(), MAX_COLUMNS);
        assert!(series.number_count() < 8 * MAX_COLUMNS, "{}", series.number_count());
        assert_eq!(parse_history(&lines(MAX_COLUMNS)), Err(TooManyColumns));
    }

    #[test]
    fn words_within_texts_stay() {
        let text = br#"{"NaN": NaN, "a": "x\"NaN", "b": -Infinity}"#;
        assert_eq!(&*replace_non_finite_words(text), br#"{"NaN": null, "a": "x\"NaN", "b": null}"#);
        assert!(matches!(replace_non_finite_words(b"{\"a\": 1}"), Cow::Borrowed(_)));
        assert_eq!(&*replace_non_finite_words(b"NaN\"\\"), b"null\"\\");
    }
}
