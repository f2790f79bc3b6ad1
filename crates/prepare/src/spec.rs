// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The specification of a preparation, which is the same for all partitions.

use std::collections::BTreeMap;

use farandole_dataset::ColumnRole;
use serde::Deserialize;

use crate::error::{Error, Result};

/// Compression of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageCompression {
    /// No compression: the fastest to read if the disk is fast enough.
    #[default]
    None,
    /// Snappy.
    Snappy,
    /// LZ4, raw format.
    Lz4,
    /// Zstandard, level 1.
    Zstd,
}

/// Rule that selects validation rows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ValidationRule {
    /// This fraction of the rows, selected by a hash of their content.
    Fraction(f64),
    /// Rows whose hash is below this value. Replaces a fraction that selects no row because there
    /// are too few rows.
    Below(u64),
    /// Rows in which this column is true or above 0.
    Column(String),
}

/// The specification of a preparation.
#[derive(Clone, Debug, PartialEq, Deserialize)]
// A misspelled option must be an error: ignored, it would prepare other data than requested.
#[serde(deny_unknown_fields)]
pub struct PrepareSpec {
    /// Directory of training data: relative to the store, or a URL.
    pub train: String,
    /// Directory of validation data.
    #[serde(default)]
    pub val: Option<String>,
    /// Columns to keep, in this order; all if absent.
    #[serde(default)]
    pub columns: Option<Vec<String>>,
    /// Label columns.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Column of sample weights.
    #[serde(default)]
    pub weight: Option<String>,
    /// Rule that selects validation rows.
    #[serde(default)]
    pub validation: Option<ValidationRule>,
    /// Seed of the split by fraction.
    #[serde(default)]
    pub seed: u64,
    /// Compression of pages.
    #[serde(default)]
    pub compression: PageCompression,
    /// Whether Spark's vectors are compressed with every setting of `compression`: vectors are
    /// written dense, and sparse ones are mostly zeros.
    #[serde(default)]
    pub compress_sparse: bool,
    /// Replacement of nulls and NaN, as text, by column; `"*"` is for all other columns that can
    /// represent it. Without a replacement, they are errors.
    #[serde(default)]
    pub fill: BTreeMap<String, String>,
    /// Whether NaN and infinities are accepted.
    #[serde(default)]
    pub allow_nan: bool,
    /// Rows of a row group; chosen by size if absent.
    #[serde(default)]
    pub row_group_rows: Option<u64>,
    /// Hash that identifies the source data.
    #[serde(default)]
    pub fingerprint: String,
}

impl PrepareSpec {
    /// Parses and checks a specification.
    ///
    /// # Errors
    /// JSON of another form, or an invalid value.
    pub fn parse_json(text: &str) -> Result<Self> {
        let spec: Self = serde_json::from_str(text).map_err(|source| Error::Spec { source })?;
        let wrong = |what, value: String| Err(Error::InvalidValue { what, value });
        // A fraction of 1 would leave no rows for training.
        if let Some(ValidationRule::Fraction(fraction)) = spec.validation
            && !(0.0..1.0).contains(&fraction)
        {
            return wrong("the validation fraction must be in [0, 1)", fraction.to_string());
        }
        if spec.validation.is_some() && spec.val.is_none() {
            return wrong("validation needs a place to go to, \"val\"", spec.train);
        }
        if spec.row_group_rows == Some(0) {
            return wrong("a row group needs rows", "0".to_owned());
        }
        if let Some(columns) = &spec.columns {
            if columns.is_empty() {
                return wrong("no columns to keep", "[]".to_owned());
            }
            for (number, column) in columns.iter().enumerate() {
                if columns.iter().take(number).any(|other| other == column) {
                    return wrong("a column is named twice", column.clone());
                }
            }
            if let Some(ValidationRule::Column(column)) = &spec.validation
                && columns.contains(column)
            {
                return wrong("the validation column cannot be kept as well", column.clone());
            }
            // The replacement for a misspelled column would silently have no effect.
            if let Some(column) = spec.fill.keys().find(|key| *key != "*" && !columns.contains(key))
            {
                return wrong(
                    "there is something to fill in for a column that is not kept",
                    column.clone(),
                );
            }
        }
        Ok(spec)
    }

    /// Returns the replacement of nulls and NaN of `column`, and whether it was given for this
    /// column by name.
    pub fn fill_for_column(&self, column: &str) -> Option<(&str, bool)> {
        let named = self.fill.get(column).map(|text| (text.as_str(), true));
        named.or_else(|| self.fill.get("*").map(|text| (text.as_str(), false)))
    }

    /// Returns the role of `column`.
    pub fn column_role(&self, column: &str) -> ColumnRole {
        if self.weight.as_deref() == Some(column) {
            ColumnRole::Weight
        } else if self.labels.iter().any(|label| label == column) {
            ColumnRole::Label
        } else {
            ColumnRole::Feature
        }
    }

    /// Returns whether validation rows are expected.
    pub fn has_validation(&self) -> bool {
        !matches!(self.validation, None | Some(ValidationRule::Fraction(0.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_specification_has_a_place() {
        let spec = PrepareSpec::parse_json(r#"{"train": "t"}"#).unwrap();
        assert_eq!((spec.compression, spec.has_validation()), (PageCompression::None, false));
    }

    #[test]
    fn an_invalid_specification_is_refused_with_its_value() {
        for (text, expected) in [
            (
                r#"{"train": "t", "val": "v", "validation": {"fraction": 1.5}}"#,
                "must be in [0, 1): 1.5",
            ),
            (r#"{"train": "t", "validation": {"fraction": 0.5}}"#, "a place to go to"),
            (r#"{"train": "t", "columns": ["a", "b", "a"]}"#, "named twice: a"),
            (
                r#"{"train": "t", "val": "v", "columns": ["a"], "validation": {"column": "a"}}"#,
                "kept as well: a",
            ),
            (r#"{"train": "t", "columns": ["a"], "fill": {"*": "0", "b": "0"}}"#, "not kept: b"),
            (r#"{"train": "t", "colums": []}"#, "unknown field"),
        ] {
            let error = PrepareSpec::parse_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
