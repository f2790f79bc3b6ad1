// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The split of rows into training and validation.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use farandole_dataset::fold;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::convert::fixed_bytes;
use crate::error::{Error, Result};

/// The sides of a batch: rows of neither are dropped.
#[derive(Debug)]
pub(crate) struct Sides {
    pub(crate) train: BooleanArray,
    pub(crate) val: BooleanArray,
}

/// Returns a hash of each row of `columns`, which are converted already.
pub(crate) fn hashes(columns: &[ArrayRef], rows: usize, seed: u64) -> Vec<u64> {
    let mut hashes = vec![fold(0, seed); rows];
    for column in columns {
        fold_column(&mut hashes, column);
    }
    hashes
}

/// Splits by hashes: this part of all that there could be is validation.
pub(crate) fn by_fraction(hashes: &[u64], fraction: f64) -> Sides {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    by(hashes, |hash| ((hash >> 11) as f64) < fraction * (1_u64 << 53) as f64)
}

/// Splits by hashes: those below `bound` are validation.
pub(crate) fn by_bound(hashes: &[u64], bound: u64) -> Sides {
    by(hashes, |hash| hash < bound)
}

fn by(hashes: &[u64], is_val: impl Fn(u64) -> bool) -> Sides {
    let val = hashes.iter().map(|hash| Some(is_val(*hash))).collect();
    let train = hashes.iter().map(|hash| Some(!is_val(*hash))).collect();
    Sides { train, val }
}

fn fold_column(hashes: &mut [u64], column: &ArrayRef) {
    match column.data_type() {
        DataType::Boolean => {
            for (hash, value) in hashes.iter_mut().zip(column.as_boolean().values().iter()) {
                *hash = fold(*hash, u64::from(value));
            }
        }
        DataType::Utf8 => {
            for (hash, value) in hashes.iter_mut().zip(column.as_string::<i32>()) {
                *hash = xxh3_64_with_seed(value.unwrap_or_default().as_bytes(), *hash);
            }
        }
        DataType::Binary => {
            for (hash, value) in hashes.iter_mut().zip(column.as_binary::<i32>()) {
                *hash = xxh3_64_with_seed(value.unwrap_or_default(), *hash);
            }
        }
        _ => {
            let Some((bytes, width)) = fixed_bytes(column) else { return };
            for (hash, row) in hashes.iter_mut().zip(bytes.chunks_exact(width)) {
                *hash = if width <= 8 {
                    fold(*hash, little(row))
                } else {
                    xxh3_64_with_seed(row, *hash)
                };
            }
        }
    }
}

/// Up to eight bytes as a number.
fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Splits by a column: true or above 0 is validation, false or 0 training; below 0 and null are
/// neither. Texts say it in words.
pub(crate) fn by_column(name: &str, column: &ArrayRef) -> Result<Sides> {
    let to = |kind: &DataType| {
        cast(column, kind).map_err(|source| Error::Arrow { column: name.to_owned(), source })
    };
    let numbers = match column.data_type() {
        DataType::Boolean => to(&DataType::Int8)?,
        kind if kind.is_numeric() => Arc::clone(column),
        DataType::Dictionary(_, value) => return by_column(name, &to(value)?),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            return by_words(name, to(&DataType::Utf8)?.as_string());
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
    Ok(Sides { train: side(|value| value == 0.0), val: side(|value| value > 0.0) })
}

/// Words for validation and for training, in any case; test rows and nulls are neither.
const VALIDATION: [&str; 6] = ["validation", "val", "valid", "true", "1", "yes"];
const TRAINING: [&str; 5] = ["train", "training", "false", "0", "no"];
const NEITHER: [&str; 2] = ["test", "-1"];

fn by_words(name: &str, column: &StringArray) -> Result<Sides> {
    let (mut train, mut val) = (Vec::with_capacity(column.len()), Vec::with_capacity(column.len()));
    for word in column {
        let is = |words: &[&str]| {
            word.is_some_and(|word| {
                words.iter().any(|known| known.eq_ignore_ascii_case(word.trim()))
            })
        };
        if let Some(value) = word.filter(|_| !is(&VALIDATION) && !is(&TRAINING) && !is(&NEITHER)) {
            return Err(Error::Side { column: name.to_owned(), value: value.to_owned() });
        }
        train.push(is(&TRAINING));
        val.push(is(&VALIDATION));
    }
    Ok(Sides { train: train.into(), val: val.into() })
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
        let whole = by_fraction(&hashes(&[numbers.clone(), names.clone()], 1000, 3), 0.25);
        let part =
            by_fraction(&hashes(&[numbers.slice(700, 100), names.slice(700, 100)], 100, 3), 0.25);
        assert_eq!(whole.val.slice(700, 100), part.val);
        let count = whole.val.true_count();
        assert!((200..300).contains(&count), "{count}");
        assert_eq!(whole.train.true_count(), 1000 - count);
        assert_ne!(whole.val, by_fraction(&hashes(&[numbers, names], 1000, 4), 0.25).val);
    }

    #[test]
    fn a_bound_above_the_least_hash_sends_that_row_alone_to_validation() {
        let sides = by_bound(&[7, 3, 9], 4);
        assert_eq!(sides.val, BooleanArray::from(vec![false, true, false]));
        assert_eq!(sides.train, BooleanArray::from(vec![true, false, true]));
    }

    #[test]
    fn a_column_sends_negatives_and_nulls_nowhere() {
        let column: ArrayRef =
            Arc::new(Int64Array::from(vec![Some(1), Some(0), Some(-1), None, Some(7)]));
        let sides = by_column("v", &column).unwrap();
        assert_eq!(sides.val, BooleanArray::from(vec![true, false, false, false, true]));
        assert_eq!(sides.train, BooleanArray::from(vec![false, true, false, false, false]));
        let column: ArrayRef = Arc::new(BooleanArray::from(vec![true, false]));
        assert_eq!(by_column("v", &column).unwrap().val, column.as_boolean().clone());
        let day: ArrayRef = Arc::new(Date32Array::from(vec![1]));
        assert!(by_column("v", &day).unwrap_err().to_string().contains("column v"));
    }

    #[test]
    fn a_column_of_words_says_the_side_and_other_words_are_refused() {
        let words = vec![Some("train"), Some("VAL "), Some("test"), None, Some("true"), Some("0")];
        let column: ArrayRef = Arc::new(StringArray::from(words));
        let sides = by_column("v", &column).unwrap();
        assert_eq!(sides.val, BooleanArray::from(vec![false, true, false, false, true, false]));
        assert_eq!(sides.train, BooleanArray::from(vec![true, false, false, false, false, true]));
        let column: ArrayRef = Arc::new(StringArray::from(vec!["train", "holdout"]));
        let error = by_column("v", &column).unwrap_err().to_string();
        assert!(
            error.starts_with("validation column v ") && error.ends_with(": holdout"),
            "{error}"
        );
    }
}
