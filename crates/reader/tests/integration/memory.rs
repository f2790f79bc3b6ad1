// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Memory of a process that reads values which decode to much more than their file has.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, BinaryArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use farandole_reader::{Error, NextBatch, ParquetDataset, Reader, ReaderOptions};
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use parquet::basic::Encoding;
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};

const MIB: usize = 1 << 20;
const BUDGET: usize = 32 * MIB;

/// Returns a size of this process in bytes, from `/proc/self/status`.
fn process_bytes(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Writes a value of one mebibyte to so many rows. The file has it once.
fn write(url: &str, rows: usize, properties: WriterPropertiesBuilder) {
    let schema = Arc::new(Schema::new(vec![Field::new("x", DataType::Binary, false)]));
    let properties = properties.set_dictionary_page_size_limit(4 * MIB).set_write_batch_size(1);
    let properties = properties.set_data_page_size_limit(64 * MIB).build();
    let mut writer =
        ArrowWriter::try_new(Vec::new(), Arc::clone(&schema), Some(properties)).unwrap();
    let value: ArrayRef = Arc::new(BinaryArray::from_iter_values([vec![7_u8; MIB]]));
    for _ in 0..rows {
        writer
            .write(&RecordBatch::try_new(Arc::clone(&schema), vec![Arc::clone(&value)]).unwrap())
            .unwrap();
    }
    let bytes = writer.into_inner().unwrap();
    assert!(bytes.len() < 3 * MIB, "{} bytes", bytes.len());
    Store::open(url).unwrap().write("0.parquet", bytes.into()).unwrap();
}

/// Reads all rows, one in a batch; returns their number, and the bytes that the process has at
/// most.
fn read(url: &str) -> (Result<usize, Error>, usize) {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let dataset = Arc::new(ParquetDataset::open_directory(url).unwrap());
    let columns = Some(vec!["x".to_owned()]);
    let options = ReaderOptions {
        columns,
        batch_size: 1,
        byte_budget: BUDGET as u64,
        ..ReaderOptions::default()
    };
    let epoch = Reader::new(dataset, options).unwrap().start_epoch(0, 0, None).unwrap();
    let mut rows = 0;
    let done = loop {
        match epoch.next_batch(Duration::from_secs(30)) {
            Ok(NextBatch::Batch(batch)) => {
                assert_eq!(batch.variable_length_values(0).unwrap().1.len(), MIB);
                rows += 1;
                // The threads put together what they may.
                std::thread::sleep(Duration::from_millis(if rows == 1 { 500 } else { 0 }));
            }
            Ok(NextBatch::End) => break Ok(rows),
            Ok(NextBatch::Pending) => unreachable!("no batch within 30 s"),
            Err(error) => break Err(error),
        }
    };
    drop(epoch);
    (done, process_bytes("VmHWM:"))
}

#[test]
fn values_that_are_stored_once_take_no_more_memory_than_the_budget_lets_them() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "memory::read_values_that_are_stored_once", "--nocapture"])
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"));
}

#[test]
#[ignore = "measures the memory of its process, so the test above starts it"]
fn read_values_that_are_stored_once() {
    let once = WriterProperties::builder();
    write("memory://dictionary", 120, once);
    let prefixes = WriterProperties::builder().set_dictionary_enabled(false);
    write("memory://prefixes", 400, prefixes.set_encoding(Encoding::DELTA_BYTE_ARRAY));
    let before = process_bytes("VmRSS:");

    let (rows, most) = read("memory://dictionary");
    assert_eq!(rows.unwrap(), 120);
    let more = most.saturating_sub(before);
    // Batches that wait, those that the pool keeps, and blocks in work; the rows have 120 MiB.
    assert!(more < 2 * BUDGET, "a dictionary of {MIB} bytes: {more}");

    // Four budgets at most, those of the last piece, and half as much that a vector keeps when it
    // grows.
    let (rows, most) = read("memory://prefixes");
    let error = rows.unwrap_err().to_string();
    assert!(
        error.contains("its rows take more than 134217728 bytes, the byte budget is 33554432"),
        "{error}"
    );
    let more = most.saturating_sub(before);
    assert!(more < 6 * BUDGET, "a page of {MIB} bytes: {more}");
}
