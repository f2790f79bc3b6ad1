// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns whose values are in the names of directories: `date=2024-01-01/part-0.parquet`.

use std::collections::{BTreeMap, BTreeSet};

use crate::element::ElementType;
use crate::manifest::{ColumnRole, DataFile, ManifestColumn};

/// Directory value that stands for null.
const NULL_PARTITION_NAME: &str = "__HIVE_DEFAULT_PARTITION__";

/// Source of such columns in messages.
const PARTITION_COLUMN_SOURCE: &str = "the names of directories";

/// Returns whether the names of directories contain a column's values. Files outside such a
/// directory have nulls in this column.
pub fn is_partition_column(column: &ManifestColumn) -> bool {
    column.source == PARTITION_COLUMN_SOURCE
}

/// Values of columns that are the same in all rows of a file; `None` is null.
pub type FileValues = BTreeMap<String, Option<String>>;

/// Returns names and values from the directories of a path.
pub fn partition_values(path: &str) -> FileValues {
    // The name of the file may contain `=`, too, but only directories are columns.
    let directories = path.rsplit_once('/').map_or("", |(directories, _)| directories);
    let pairs = directories.split('/').filter_map(|part| part.split_once('='));
    let value = |text: &str| (text != NULL_PARTITION_NAME).then(|| unescape_percent(text));
    pairs.map(|(name, text)| (unescape_percent(name), value(text))).collect()
}

/// Returns the values that are not null.
pub fn non_null_values(values: &FileValues) -> BTreeMap<String, String> {
    let known = values.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
    known.collect()
}

/// Decodes `%3A` and the like, with which Hive and Spark escape characters that names of
/// directories cannot contain.
fn unescape_percent(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after
            .get(..2)
            .filter(|_| *first == b'%')
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    // Other writers do not escape names, so `%` may be a plain character before any bytes.
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Returns the type of a column of directory values, by one rule for all readers:
///
/// - int64, if each value is an optional `-` and digits, and fits;
/// - float64, if each value is such a number with or without a fraction, and none has more than 15
///   digits, so that different numbers stay different;
/// - otherwise text.
pub fn infer_partition_type<'a>(mut values: impl Iterator<Item = &'a str> + Clone) -> ElementType {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // `parse` alone accepts `+5`, which is more often a code than a number.
    let is_integer = |value: &str| {
        digits(value.strip_prefix('-').unwrap_or(value)) && value.parse::<i64>().is_ok()
    };
    // `parse` alone accepts `nan`, `inf` and `1e3`, which may be names.
    let is_number = |value: &str| {
        let value = value.strip_prefix('-').unwrap_or(value);
        let (whole, fraction) = value.split_once('.').unwrap_or((value, "0"));
        digits(whole) && digits(fraction) && whole.len() + fraction.len() <= MAX_FLOAT_DIGITS
    };
    if values.clone().all(is_integer) {
        ElementType::Int64
    } else if values.all(is_number) {
        ElementType::Float64
    } else {
        ElementType::Utf8
    }
}

/// Decimal digits that a float64 always represents.
const MAX_FLOAT_DIGITS: usize = 15;

/// A value that is not of its column's type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongDirectoryValue {
    /// The column.
    pub column: String,
    /// The value in the name of a directory, and the place of all such values, for messages.
    pub found: String,
    /// Path of the file, relative to the data set.
    pub file: String,
    /// Type of the column.
    pub expected: ElementType,
}

/// Returns the columns `names`, whose values the files have. `types` has the types of some columns;
/// [`infer_partition_type`] gives the others.
///
/// # Errors
/// A value that is not of its column's type.
pub fn partition_columns(
    files: &[DataFile],
    names: &BTreeSet<&str>,
    types: &BTreeMap<String, ElementType>,
) -> Result<Vec<ManifestColumn>, WrongDirectoryValue> {
    let column = |name: &&str| {
        let name = *name;
        let values = files.iter().filter_map(|file| file.values.get(name)).map(String::as_str);
        let given = types.get(name).copied();
        let element = given.unwrap_or_else(|| infer_partition_type(values));
        let wrong = files.iter().find_map(|file| {
            let value = file.values.get(name)?;
            (!is_value_of_type(value, element)).then_some((value, &file.path))
        });
        if let Some((value, path)) = wrong {
            return Err(WrongDirectoryValue {
                column: name.to_owned(),
                found: format!("{value:?} in {PARTITION_COLUMN_SOURCE}"),
                file: path.clone(),
                expected: element,
            });
        }
        // All rows of a file have the same value, so a file without one has only nulls.
        let without =
            files.iter().filter(|file| !file.values.contains_key(name)).map(|file| file.rows);
        Ok(ManifestColumn {
            name: name.to_owned(),
            role: ColumnRole::Feature,
            element,
            shape: Vec::new(),
            source: PARTITION_COLUMN_SOURCE.to_owned(),
            unit: None,
            nulls: Some(without.sum()),
            min: None,
            max: None,
            unreadable: None,
        })
    };
    names.iter().map(column).collect()
}

/// Returns whether a text is a value of a type.
fn is_value_of_type(value: &str, element: ElementType) -> bool {
    match element {
        ElementType::Bool => value.parse::<bool>().is_ok(),
        ElementType::Int8 => value.parse::<i8>().is_ok(),
        ElementType::Int16 => value.parse::<i16>().is_ok(),
        ElementType::Int32 => value.parse::<i32>().is_ok(),
        ElementType::Int64 => value.parse::<i64>().is_ok(),
        ElementType::UInt8 => value.parse::<u8>().is_ok(),
        ElementType::UInt16 => value.parse::<u16>().is_ok(),
        ElementType::UInt32 => value.parse::<u32>().is_ok(),
        ElementType::UInt64 => value.parse::<u64>().is_ok(),
        ElementType::Float32 => value.parse::<f32>().is_ok(),
        ElementType::Float64 => value.parse::<f64>().is_ok(),
        ElementType::Utf8 | ElementType::Binary => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_columns() {
        let all =
            partition_values("year=2024/at=10%3A30 x/empty=__HIVE_DEFAULT_PARTITION__/a=b.parquet");
        assert_eq!(
            all,
            BTreeMap::from([
                ("year".into(), Some("2024".into())),
                ("at".into(), Some("10:30 x".into())),
                ("empty".into(), None),
            ])
        );
        assert_eq!(unescape_percent("50%"), "50%");
        let file = |path: &str| DataFile {
            rows: 3,
            values: non_null_values(&partition_values(path)),
            ..DataFile::new(path.into(), 0, vec![])
        };
        let files = [
            file("n=07/f=1/t=a/p"),
            file("n=-8/f=0.5/t=1/p"),
            file("n=__HIVE_DEFAULT_PARTITION__/f=1/t=1/p"),
        ];
        let found = |types: &BTreeMap<String, ElementType>| {
            let names = BTreeSet::from(["f", "n", "t"]);
            partition_columns(&files, &names, types).map(|columns| {
                let found = columns.into_iter().map(|c| (c.name, c.element, c.nulls));
                found.collect::<Vec<_>>()
            })
        };
        assert_eq!(
            found(&BTreeMap::new()).unwrap(),
            [
                ("f".into(), ElementType::Float64, Some(0)),
                ("n".into(), ElementType::Int64, Some(3)),
                ("t".into(), ElementType::Utf8, Some(0)),
            ]
        );
        let given = |element| BTreeMap::from([("n".to_owned(), element)]);
        assert_eq!(found(&given(ElementType::Utf8)).unwrap()[1].1, ElementType::Utf8);
        let wrong = WrongDirectoryValue {
            column: "n".to_owned(),
            found: "\"-8\" in the names of directories".to_owned(),
            file: "n=-8/f=0.5/t=1/p".to_owned(),
            expected: ElementType::UInt8,
        };
        assert_eq!(found(&given(ElementType::UInt8)).unwrap_err(), wrong);
    }

    #[test]
    fn directory_values_are_numbers_only_if_all_digits_count() {
        for (values, element) in [
            (&["1", "-2", "007"][..], ElementType::Int64),
            (&["9007199254740993", "1.5"], ElementType::Utf8),
            (&["12345678901234567890", "1"], ElementType::Utf8),
            (&["1.5", "2"], ElementType::Float64),
            (&["nan", "inf"], ElementType::Utf8),
            (&["0x10", "1"], ElementType::Utf8),
            (&["+5", "6"], ElementType::Utf8),
            (&["1e3", "2"], ElementType::Utf8),
            (&[".5", "2."], ElementType::Utf8),
            (&["-", "1"], ElementType::Utf8),
            (&["01001", "2A001"], ElementType::Utf8),
        ] {
            assert_eq!(infer_partition_type(values.iter().copied()), element, "{values:?}");
        }
    }
}
