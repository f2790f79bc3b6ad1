// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Manifests that are damaged, or whose numbers are not those of their files, where memory is
//! short: rows or an error, and never the end of the process.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use crate::reading::{hush, read};
use arrow::array::{ArrayRef, Float32Array, Int64Array, RecordBatch, StringArray};
use farandole_dataset::{
    ColumnRole, DataFile, ElementType, MANIFEST_FILE_NAME, Manifest, ManifestColumn, RowGroup,
};
use farandole_fuzz::{Random, apart, cases, confine};
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use serde_json::Value;

const ROWS: u16 = 300;
const URL: &str = "memory://claimed";
const COLUMNS: [&str; 3] = ["id", "x", "text"];
/// Addresses that the reader may take beyond what the process has when it begins.
const ROOM: u64 = 768 << 20;

/// Writes a file, and tells what is in it.
fn sound(store: &Store) -> Value {
    let columns: [(&str, ArrayRef); 3] = [
        ("id", Arc::new(Int64Array::from_iter_values(0..i64::from(ROWS)))),
        (
            "x",
            Arc::new(Float32Array::from_iter_values(std::iter::repeat_n(0.5, usize::from(ROWS)))),
        ),
        (
            "text",
            Arc::new(StringArray::from_iter_values(std::iter::repeat_n("text", usize::from(ROWS)))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    let bytes = writer.into_inner().unwrap();
    let column = |name: &str, element, source: &str| ManifestColumn {
        name: name.to_owned(),
        role: ColumnRole::Feature,
        element,
        shape: Vec::new(),
        source: source.to_owned(),
        unit: None,
        nulls: Some(0),
        min: None,
        max: None,
        unreadable: None,
    };
    let kinds = [ElementType::Int64, ElementType::Float32, ElementType::Utf8];
    let columns = COLUMNS
        .iter()
        .zip(kinds)
        .map(|(name, kind)| column(name, kind, kind.numpy_name()))
        .collect();
    let groups = vec![RowGroup { rows: ROWS.into(), bytes: 16 * u64::from(ROWS) }];
    let file = DataFile::new("part.parquet".to_owned(), bytes.len() as u64, groups);
    store.write("part.parquet", bytes.into()).unwrap();
    let manifest = Manifest::new("print".to_owned(), columns, vec![file]);
    serde_json::from_str(&manifest.to_json().unwrap()).unwrap()
}

/// Finds the paths of all values that hold no others, in order.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(at, one)| leaves(one, &format!("{path}/{at}"), found))
        }
        Value::Object(all) => {
            all.iter().for_each(|(name, one)| leaves(one, &format!("{path}/{name}"), found))
        }
        _ => found.push(path.to_owned()),
    }
}

/// Something else in the place of a value.
fn other(value: &Value, random: &mut Random) -> Value {
    if let (Some(number), true) = (value.as_i64(), random.below(8) > 0) {
        return random.number(number).into();
    }
    let texts = ["", "..", "a/../../b", "float64", "int8", "binary", "{}"];
    match random.below(6) {
        0 => Value::Null,
        1 => texts[random.below(texts.len())].into(),
        2 => String::from_utf8_lossy(&random.bytes(40)).into(),
        3 => Value::Array(vec![random.number(3).into(); random.below(40)]),
        4 => u64::MAX.into(),
        _ => 0.5.into(),
    }
}

/// Rows of files and row groups made to agree, so that only the files can contradict them.
fn agree(manifest: &mut Value, random: &mut Random) {
    let rows = random.number(ROWS.into()).unsigned_abs();
    manifest["rows"] = rows.into();
    manifest["files"][0]["rows"] = rows.into();
    manifest["files"][0]["groups"][0]["rows"] = rows.into();
    if random.below(2) == 0 {
        manifest["files"][0]["groups"][0]["bytes"] = random.number(4096).unsigned_abs().into();
    }
}

/// A manifest that is not the one of its files.
fn hostile(sound: &Value, random: &mut Random) -> Vec<u8> {
    let mut manifest = sound.clone();
    match random.below(4) {
        0 => return random.mutated(manifest.to_string().as_bytes()),
        1 => agree(&mut manifest, random),
        2 => {
            manifest["columns"][random.below(3)]["shape"] =
                vec![random.number(2).unsigned_abs()].into()
        }
        _ => {}
    }
    for _ in 0..random.below(3) {
        let mut found = Vec::new();
        leaves(&manifest, "", &mut found);
        if let Some(value) =
            found.get(random.below(found.len())).and_then(|path| manifest.pointer_mut(path))
        {
            *value = other(value, random);
        }
    }
    manifest.to_string().into_bytes()
}

/// In a process of its own: its memory is limited, and it is the one that would be aborted.
#[test]
#[ignore = "started by the next test"]
fn child() {
    hush();
    let store = Store::open(URL).unwrap();
    let sound = sound(&store);
    store.write(MANIFEST_FILE_NAME, sound.to_string().into()).unwrap();
    assert_eq!(read(URL, &COLUMNS, &mut Random::new(0)).unwrap(), usize::from(ROWS));
    confine(ROOM).unwrap();
    let (mut fine, mut wrong) = (0, 0);
    cases(|random| {
        println!("\ncase {random:?}");
        store.write(MANIFEST_FILE_NAME, hostile(&sound, random).into()).unwrap();
        match read(URL, &COLUMNS, random) {
            Ok(_) => fine += 1,
            Err(error) => {
                assert!(!error.to_string().contains("panic"), "{error}");
                wrong += 1;
            }
        }
    });
    assert!(fine > 0 && wrong > 0, "{fine} were fine, {wrong} were not");
}

#[test]
fn manifests_that_lie_are_errors_and_never_end_the_process() {
    let begun = apart("manifests::child").unwrap();
    assert!(begun > 20, "few cases: {begun}");
}
