// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns that are in the names of directories: `date=2024-01-01/part-0.parquet`.

use std::collections::BTreeMap;

use arrow::buffer::Buffer;
use farandole_dataset::{Column, DataFile, Element, Role};

/// Name of null.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// Origin of such columns in messages.
const SOURCE: &str = "the names of directories";

/// Returns whether a column is in the names of directories; a file outside of them has nulls in it.
pub(crate) fn is_one(column: &Column) -> bool {
    column.source == SOURCE
}

/// Names and values in the directories of a path; nulls are left out.
pub(crate) fn values_of(path: &str) -> BTreeMap<String, String> {
    let directories = path.rsplit_once('/').map_or("", |(directories, _)| directories);
    let pairs = directories.split('/').filter_map(|part| part.split_once('='));
    pairs
        .filter(|(_, value)| *value != NULL)
        .map(|(name, value)| (unescaped(name), unescaped(value)))
        .collect()
}

/// `%3A` and the like, as Hive and Spark write what names of directories cannot hold.
fn unescaped(text: &str) -> String {
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

/// The columns that the files' values make, in the order of their names: whole numbers, numbers,
/// else text.
pub(crate) fn columns_of(files: &[DataFile]) -> Vec<Column> {
    let mut values: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, value) in files.iter().flat_map(|file| &file.values) {
        values.entry(name).or_default().push(value);
    }
    let column = |(name, values): (&str, Vec<&str>)| {
        let element = if values.iter().all(|value| value.parse::<i64>().is_ok()) {
            Element::Int64
        } else if values.iter().all(|value| value.parse::<f64>().is_ok()) {
            Element::Float64
        } else {
            Element::Utf8
        };
        let without =
            files.iter().filter(|file| !file.values.contains_key(name)).map(|file| file.rows);
        Column {
            name: name.to_owned(),
            role: Role::Feature,
            element,
            shape: Vec::new(),
            source: SOURCE.to_owned(),
            nulls: Some(without.sum()),
            min: None,
            max: None,
            unreadable: None,
        }
    };
    values.into_iter().map(column).collect()
}

/// One value, so many times; `None` when it is none of this element.
pub(crate) fn repeated(value: &str, element: Element, rows: usize) -> Option<Buffer> {
    match element {
        Element::Int64 => Some(Buffer::from_vec(vec![value.parse::<i64>().ok()?; rows])),
        Element::Float64 => Some(Buffer::from_vec(vec![value.parse::<f64>().ok()?; rows])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_directories_are_columns() {
        let all = values_of("year=2024/at=10%3A30 x/empty=__HIVE_DEFAULT_PARTITION__/a=b.parquet");
        assert_eq!(
            all,
            BTreeMap::from([("year".into(), "2024".into()), ("at".into(), "10:30 x".into())])
        );
        assert_eq!(unescaped("50%"), "50%");
        let file = |path: &str| DataFile {
            rows: 3,
            values: values_of(path),
            ..DataFile::new(path.into(), 0, vec![])
        };
        let files = [
            file("n=07/f=1/t=a/p"),
            file("n=-8/f=0.5/t=1/p"),
            file("n=__HIVE_DEFAULT_PARTITION__/f=1/t=1/p"),
        ];
        let told: Vec<_> =
            columns_of(&files).into_iter().map(|c| (c.name, c.element, c.nulls)).collect();
        assert_eq!(
            told,
            [
                ("f".into(), Element::Float64, Some(0)),
                ("n".into(), Element::Int64, Some(3)),
                ("t".into(), Element::Utf8, Some(0)),
            ]
        );
        assert_eq!(repeated("07", Element::Int64, 2).unwrap().typed_data::<i64>(), [7, 7]);
        assert!(repeated("x", Element::Float64, 2).is_none());
    }
}
