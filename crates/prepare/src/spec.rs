// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The description of a preparation, the same for all partitions.

use std::collections::BTreeMap;

use farandole_dataset::Role;
use serde::Deserialize;

use crate::error::{Error, Result};

/// Compression of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Not at all: the fastest to read where the disk keeps up.
    #[default]
    None,
    /// Snappy.
    Snappy,
    /// LZ4, raw.
    Lz4,
    /// Zstandard, level 1.
    Zstd,
}

/// The choice of validation rows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Validation {
    /// This part of them, by a hash of their content.
    Fraction(f64),
    /// Rows whose hash is below this value: a fraction that is too small for the number of rows
    /// becomes this.
    Below(u64),
    /// Rows in which this column is true or above 0.
    Column(String),
}

/// The description of a preparation.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Target of training data: relative to the store, or a URL.
    pub train: String,
    /// Target of validation data.
    #[serde(default)]
    pub val: Option<String>,
    /// Columns to keep, in this order; all if absent.
    #[serde(default)]
    pub columns: Option<Vec<String>>,
    /// The label columns.
    #[serde(default)]
    pub labels: Vec<String>,
    /// The one that weighs samples.
    #[serde(default)]
    pub weight: Option<String>,
    /// The choice of validation rows.
    #[serde(default)]
    pub validation: Option<Validation>,
    /// Seed of the split by fraction.
    #[serde(default)]
    pub seed: u64,
    /// Compression of pages.
    #[serde(default)]
    pub compression: Compression,
    /// Whether Spark's vectors are compressed whatever `compression` says: they are written dense,
    /// and sparse ones are mostly zeros.
    #[serde(default)]
    pub compress_sparse: bool,
    /// The replacement of nulls and NaN, as text, by column; `"*"` is for all other columns that
    /// can hold it. Without it they are errors.
    #[serde(default)]
    pub fill: BTreeMap<String, String>,
    /// Takes NaN and infinities as values like any others.
    #[serde(default)]
    pub allow_nan: bool,
    /// Rows of a row group; chosen by size when absent.
    #[serde(default)]
    pub row_group_rows: Option<u64>,
    /// The source of the data.
    #[serde(default)]
    pub fingerprint: String,
}

impl Spec {
    /// Reads and checks one.
    ///
    /// # Errors
    /// No JSON of this form, or a value that cannot be.
    pub fn parse(text: &str) -> Result<Self> {
        let spec: Self = serde_json::from_str(text).map_err(|source| Error::Spec { source })?;
        let wrong = |what, value: String| Err(Error::Value { what, value });
        if let Some(Validation::Fraction(fraction)) = spec.validation
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
            if let Some(Validation::Column(column)) = &spec.validation
                && columns.contains(column)
            {
                return wrong("the validation column cannot be kept as well", column.clone());
            }
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
    /// column alone.
    pub fn fill(&self, column: &str) -> Option<(&str, bool)> {
        let named = self.fill.get(column).map(|text| (text.as_str(), true));
        named.or_else(|| self.fill.get("*").map(|text| (text.as_str(), false)))
    }

    /// Returns the role of `column`.
    pub fn role(&self, column: &str) -> Role {
        if self.weight.as_deref() == Some(column) {
            Role::Weight
        } else if self.labels.iter().any(|label| label == column) {
            Role::Label
        } else {
            Role::Feature
        }
    }

    /// Returns whether validation rows are expected.
    pub fn validates(&self) -> bool {
        !matches!(self.validation, None | Some(Validation::Fraction(0.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_specification_has_a_place() {
        let spec = Spec::parse(r#"{"train": "t"}"#).unwrap();
        assert_eq!((spec.compression, spec.validates()), (Compression::None, false));
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
            let error = Spec::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
