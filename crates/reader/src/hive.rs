// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns whose values are in the names of directories: `date=2024-01-01/part-0.parquet`.

use std::collections::BTreeMap;

use arrow::buffer::Buffer;
use farandole_dataset::{ColumnRole, DataFile, ElementType, ManifestColumn};

/// Directory value that stands for null.
const NULL_PARTITION_NAME: &str = "__HIVE_DEFAULT_PARTITION__";

/// Source of such columns in messages.
const PARTITION_COLUMN_SOURCE: &str = "the names of directories";

/// Returns whether the names of directories contain a column's values. Files outside such a
/// directory have nulls in this column.
pub(crate) fn is_partition_column(column: &ManifestColumn) -> bool {
    column.source == PARTITION_COLUMN_SOURCE
}

/// Returns names and values from the directories of a path, without nulls.
pub(crate) fn partition_values(path: &str) -> BTreeMap<String, String> {
    let directories = path.rsplit_once('/').map_or("", |(directories, _)| directories);
    let pairs = directories.split('/').filter_map(|part| part.split_once('='));
    pairs
        .filter(|(_, value)| *value != NULL_PARTITION_NAME)
        .map(|(name, value)| (unescape_percent(name), unescape_percent(value)))
        .collect()
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
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Returns the columns that the files' directory values form, sorted by name: integers if all
/// values are, else floats, else strings.
pub(crate) fn partition_columns(files: &[DataFile]) -> Vec<ManifestColumn> {
    let mut values: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, value) in files.iter().flat_map(|file| &file.values) {
        values.entry(name).or_default().push(value);
    }
    let column = |(name, values): (&str, Vec<&str>)| {
        let element = if values.iter().all(|value| value.parse::<i64>().is_ok()) {
            ElementType::Int64
        } else if values.iter().all(|value| value.parse::<f64>().is_ok()) {
            ElementType::Float64
        } else {
            ElementType::Utf8
        };
        let without =
            files.iter().filter(|file| !file.values.contains_key(name)).map(|file| file.rows);
        ManifestColumn {
            name: name.to_owned(),
            role: ColumnRole::Feature,
            element,
            shape: Vec::new(),
            source: PARTITION_COLUMN_SOURCE.to_owned(),
            nulls: Some(without.sum()),
            min: None,
            max: None,
            unreadable: None,
        }
    };
    values.into_iter().map(column).collect()
}

/// Returns one value repeated `rows` times; `None` if the element cannot represent it.
pub(crate) fn repeat_value(value: &str, element: ElementType, rows: usize) -> Option<Buffer> {
    match element {
        ElementType::Int64 => Some(Buffer::from_vec(vec![value.parse::<i64>().ok()?; rows])),
        ElementType::Float64 => Some(Buffer::from_vec(vec![value.parse::<f64>().ok()?; rows])),
        _ => None,
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
            BTreeMap::from([("year".into(), "2024".into()), ("at".into(), "10:30 x".into())])
        );
        assert_eq!(unescape_percent("50%"), "50%");
        let file = |path: &str| DataFile {
            rows: 3,
            values: partition_values(path),
            ..DataFile::new(path.into(), 0, vec![])
        };
        let files = [
            file("n=07/f=1/t=a/p"),
            file("n=-8/f=0.5/t=1/p"),
            file("n=__HIVE_DEFAULT_PARTITION__/f=1/t=1/p"),
        ];
        let told: Vec<_> =
            partition_columns(&files).into_iter().map(|c| (c.name, c.element, c.nulls)).collect();
        assert_eq!(
            told,
            [
                ("f".into(), ElementType::Float64, Some(0)),
                ("n".into(), ElementType::Int64, Some(3)),
                ("t".into(), ElementType::Utf8, Some(0)),
            ]
        );
        assert_eq!(repeat_value("07", ElementType::Int64, 2).unwrap().typed_data::<i64>(), [7, 7]);
        assert!(repeat_value("x", ElementType::Float64, 2).is_none());
    }
}
