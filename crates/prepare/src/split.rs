// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Splits rows into training and validation data.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use farandole_dataset::fold_hash;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::convert::fixed_width_bytes;
use crate::error::{Error, Result};

/// Rows of a batch for training and for validation. Rows in neither are dropped.
#[derive(Debug)]
pub(crate) struct SplitMasks {
    pub(crate) train: BooleanArray,
    pub(crate) val: BooleanArray,
}

/// Returns a hash of each row of `columns`, which must be converted already.
pub(crate) fn hash_rows(columns: &[ArrayRef], rows: usize, seed: u64) -> Vec<u64> {
    let mut hashes = vec![fold_hash(0, seed); rows];
    for column in columns {
        hash_column(&mut hashes, column);
    }
    hashes
}

/// Splits by hashes: this fraction of all possible hashes selects validation rows.
pub(crate) fn split_by_fraction(hashes: &[u64], fraction: f64) -> SplitMasks {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    split_by_hash(hashes, |hash| ((hash >> 11) as f64) < fraction * (1_u64 << 53) as f64)
}

/// Splits by hashes: rows with a hash below `bound` are for validation.
pub(crate) fn split_by_hash_bound(hashes: &[u64], bound: u64) -> SplitMasks {
    split_by_hash(hashes, |hash| hash < bound)
}

fn split_by_hash(hashes: &[u64], is_val: impl Fn(u64) -> bool) -> SplitMasks {
    let val = hashes.iter().map(|hash| Some(is_val(*hash))).collect();
    let train = hashes.iter().map(|hash| Some(!is_val(*hash))).collect();
    SplitMasks { train, val }
}

fn hash_column(hashes: &mut [u64], column: &ArrayRef) {
    match column.data_type() {
        DataType::Boolean => {
            for (hash, value) in hashes.iter_mut().zip(column.as_boolean().values().iter()) {
                *hash = fold_hash(*hash, u64::from(value));
            }
        }
        DataType::Utf8 => {
            for (hash, value) in hashes.iter_mut().zip(column.as_string::<i32>()) {
                // The hash so far is the seed, so equal values in other columns give another hash.
                *hash = xxh3_64_with_seed(value.unwrap_or_default().as_bytes(), *hash);
            }
        }
        DataType::Binary => {
            for (hash, value) in hashes.iter_mut().zip(column.as_binary::<i32>()) {
                *hash = xxh3_64_with_seed(value.unwrap_or_default(), *hash);
            }
        }
        _ => {
            let Some((bytes, width)) = fixed_width_bytes(column) else { return };
            for (hash, row) in hashes.iter_mut().zip(bytes.chunks_exact(width)) {
                *hash = if width <= 8 {
                    fold_hash(*hash, le_bytes_to_u64(row))
                } else {
                    xxh3_64_with_seed(row, *hash)
                };
            }
        }
    }
}

/// Returns up to eight bytes as a little-endian number.
fn le_bytes_to_u64(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Splits by a column. True or a value above 0 selects validation, false or 0 training; rows below
/// 0 or with null are in neither. A string column contains names of splits.
pub(crate) fn split_by_column(name: &str, column: &ArrayRef) -> Result<SplitMasks> {
    let to = |kind: &DataType| {
        cast(column, kind).map_err(|source| Error::Arrow { column: name.to_owned(), source })
    };
    let numbers = match column.data_type() {
        DataType::Boolean => to(&DataType::Int8)?,
        kind if kind.is_numeric() => Arc::clone(column),
        DataType::Dictionary(_, value) => return split_by_column(name, &to(value)?),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            return split_by_split_names(name, to(&DataType::Utf8)?.as_string());
        }
        other => {
            return Err(Error::Type {
                column: name.to_owned(),
                found: format!("{other} as validation column"),
            });
        }
    };
    let floats = cast(&numbers, &DataType::Float64)
        .map_err(|source| Error::Arrow { column: name.to_owned(), source })?;
    let floats = floats.as_primitive::<Float64Type>();
    let side =
        |test: fn(f64) -> bool| floats.iter().map(|value| Some(value.is_some_and(test))).collect();
    // NaN is in neither: both comparisons are false.
    Ok(SplitMasks { train: side(|value| value == 0.0), val: side(|value| value > 0.0) })
}

/// Names of splits in string columns, in any case. Rows with other known names or null are in
/// neither split.
const VALIDATION_WORDS: [&str; 6] = ["validation", "val", "valid", "true", "1", "yes"];
const TRAINING_WORDS: [&str; 5] = ["train", "training", "false", "0", "no"];
const UNUSED_ROW_WORDS: [&str; 2] = ["test", "-1"];

fn split_by_split_names(name: &str, column: &StringArray) -> Result<SplitMasks> {
    let (mut train, mut val) = (Vec::with_capacity(column.len()), Vec::with_capacity(column.len()));
    for word in column {
        let is = |words: &[&str]| {
            word.is_some_and(|word| {
                words.iter().any(|known| known.eq_ignore_ascii_case(word.trim()))
            })
        };
        if let Some(value) = word
            .filter(|_| !is(&VALIDATION_WORDS) && !is(&TRAINING_WORDS) && !is(&UNUSED_ROW_WORDS))
        {
            return Err(Error::UnknownSplitWord {
                column: name.to_owned(),
                value: value.to_owned(),
            });
        }
        train.push(is(&TRAINING_WORDS));
        val.push(is(&VALIDATION_WORDS));
    }
    Ok(SplitMasks { train: train.into(), val: val.into() })
}

#[cfg(test)]
mod tests {
    use arrow::array::{Date32Array, Float32Array, Int64Array};

    use super::*;

    #[test]
    fn pr_1_a_row_lands_on_the_same_side_in_any_batch() {
        let numbers: ArrayRef =
            Arc::new(Float32Array::from_iter_values((0_u16..1000).map(f32::from)));
        let names: ArrayRef =
            Arc::new(StringArray::from_iter_values((0..1000).map(|n| n.to_string())));
        let whole = split_by_fraction(&hash_rows(&[numbers.clone(), names.clone()], 1000, 3), 0.25);
        let part = split_by_fraction(
            &hash_rows(&[numbers.slice(700, 100), names.slice(700, 100)], 100, 3),
            0.25,
        );
        assert_eq!(whole.val.slice(700, 100), part.val);
        let count = whole.val.true_count();
        assert!((200..300).contains(&count), "{count}");
        assert_eq!(whole.train.true_count(), 1000 - count);
        assert_ne!(whole.val, split_by_fraction(&hash_rows(&[numbers, names], 1000, 4), 0.25).val);
    }

    #[test]
    fn a_bound_above_the_least_hash_sends_that_row_alone_to_validation() {
        let sides = split_by_hash_bound(&[7, 3, 9], 4);
        assert_eq!(sides.val, BooleanArray::from(vec![false, true, false]));
        assert_eq!(sides.train, BooleanArray::from(vec![true, false, true]));
    }

    #[test]
    fn a_column_sends_negatives_and_nulls_nowhere() {
        let column: ArrayRef =
            Arc::new(Int64Array::from(vec![Some(1), Some(0), Some(-1), None, Some(7)]));
        let sides = split_by_column("v", &column).unwrap();
        assert_eq!(sides.val, BooleanArray::from(vec![true, false, false, false, true]));
        assert_eq!(sides.train, BooleanArray::from(vec![false, true, false, false, false]));
        let column: ArrayRef = Arc::new(BooleanArray::from(vec![true, false]));
        assert_eq!(split_by_column("v", &column).unwrap().val, column.as_boolean().clone());
        let day: ArrayRef = Arc::new(Date32Array::from(vec![1]));
        assert!(split_by_column("v", &day).unwrap_err().to_string().contains("column v"));
    }

    #[test]
    fn a_column_of_words_says_the_side_and_other_words_are_refused() {
        let words = vec![Some("train"), Some("VAL "), Some("test"), None, Some("true"), Some("0")];
        let column: ArrayRef = Arc::new(StringArray::from(words));
        let sides = split_by_column("v", &column).unwrap();
        assert_eq!(sides.val, BooleanArray::from(vec![false, true, false, false, true, false]));
        assert_eq!(sides.train, BooleanArray::from(vec![true, false, false, false, false, true]));
        let column: ArrayRef = Arc::new(StringArray::from(vec!["train", "holdout"]));
        let error = split_by_column("v", &column).unwrap_err().to_string();
        assert!(
            error.starts_with("validation column v ") && error.ends_with(": holdout"),
            "{error}"
        );
    }
}
