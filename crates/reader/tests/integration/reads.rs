// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prepared and foreign data, read back.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, StringArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use farandole_dataset::{MANIFEST_FILE_NAME, TailPolicy};
use farandole_prepare::{PartitionSummary, PartitionWriter, commit_partitions};
use farandole_reader::{
    Batch, EpochReader, Error, NextBatch, ParquetDataset, Reader, ReaderOptions,
};
use farandole_store::Store;
use farandole_world::Rank;
use parquet::arrow::ArrowWriter;

const WAIT: Duration = Duration::from_secs(30);

/// Rows `from..to`: an id, and a vector of three made of it.
fn rows(from: i64, to: i64) -> RecordBatch {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(from..to));
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let values: ArrayRef = Arc::new(Float32Array::from_iter_values(
        (from..to).flat_map(|id| [id as f32, id as f32 + 0.5, -(id as f32)]),
    ));
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let lengths = std::iter::repeat_n(3, usize::try_from(to - from).unwrap());
    let vectors: ArrayRef =
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(lengths), values, None));
    RecordBatch::try_from_iter([("id", ids), ("vector", vectors)]).unwrap()
}

fn prepare(url: &str, partitions: i64, each: i64) {
    let spec = r#"{"train": "train", "row_group_rows": 100}"#;
    let mut summaries = Vec::new();
    for partition in 0..partitions {
        let mut writer =
            PartitionWriter::new(url, spec, u64::try_from(partition).unwrap(), "a").unwrap();
        for start in (partition * each..(partition + 1) * each).step_by(70) {
            writer.write_batch(&rows(start, (start + 70).min((partition + 1) * each))).unwrap();
        }
        summaries.push(
            PartitionSummary::from_bytes(&writer.finish_partition().unwrap().to_bytes().unwrap())
                .unwrap(),
        );
    }
    commit_partitions(url, spec, summaries).unwrap();
}

fn foreign(url: &str, files: i64, each: i64) -> Store {
    let store = Store::open(url).unwrap();
    for file in 0..files {
        let batch = rows(file * each, (file + 1) * each);
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch.slice(0, batch.num_rows() / 3)).unwrap();
        writer.flush().unwrap();
        writer
            .write(&batch.slice(batch.num_rows() / 3, batch.num_rows() - batch.num_rows() / 3))
            .unwrap();
        store.write(&format!("f{file}.parquet"), writer.into_inner().unwrap().into()).unwrap();
    }
    store.write("_SUCCESS", Vec::new().into()).unwrap();
    store
}

fn open(url: &str, options: ReaderOptions) -> Reader {
    Reader::new(Arc::new(ParquetDataset::open_directory(url).unwrap()), options).unwrap()
}

fn next(epoch: &EpochReader) -> Option<Batch> {
    match epoch.next_batch(WAIT).unwrap() {
        NextBatch::Batch(batch) => Some(batch),
        NextBatch::End => None,
        NextBatch::Pending => unreachable!("nothing came within {WAIT:?}"),
    }
}

fn ids(batch: &Batch) -> Vec<i64> {
    batch
        .column_bytes(0)
        .unwrap()
        .chunks_exact(8)
        .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

fn floats(batch: &Batch, column: usize) -> Vec<f32> {
    batch
        .column_bytes(column)
        .unwrap()
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// Checks that vectors go with their ids; returns all ids in order.
fn collect(reader: &Reader, number: u64) -> Vec<i64> {
    let epoch = reader.start_epoch(number, 0, None).unwrap();
    let mut all = Vec::new();
    while let Some(batch) = next(&epoch) {
        let ids = ids(&batch);
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let expected: Vec<f32> =
            ids.iter().flat_map(|id| [*id as f32, *id as f32 + 0.5, -(*id as f32)]).collect();
        assert_eq!(floats(&batch, 1), expected);
        assert_eq!(batch.column_extent(1).unwrap().start % 64, 0);
        all.extend(&ids[..batch.valid_rows()]);
    }
    all
}

#[test]
fn prepared_rows_come_back_whole_once_and_in_an_order_of_their_epoch() {
    prepare("memory://prepared", 3, 1000);
    let reader = open(
        "memory://prepared/train",
        ReaderOptions { batch_size: 64, ..ReaderOptions::default() },
    );
    let first = collect(&reader, 0);
    assert_eq!(first.len(), 3000);
    assert_ne!(first, collect(&reader, 1));
    let single = open(
        "memory://prepared/train",
        ReaderOptions { batch_size: 64, threads: 1, ..ReaderOptions::default() },
    );
    assert_eq!(first, collect(&single, 0), "RE-1: no matter how many threads");
    let mut sorted = first;
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..3000));
}

#[test]
fn foreign_files_are_read_by_their_footers() {
    foreign("memory://foreign", 4, 500);
    let dataset = ParquetDataset::open_directory("memory://foreign").unwrap();
    assert_eq!(dataset.manifest().rows, 2000);
    assert_eq!(dataset.fields()[1].shape, [3]);
    let reader =
        open("memory://foreign", ReaderOptions { batch_size: 33, ..ReaderOptions::default() });
    let mut all = collect(&reader, 3);
    all.sort_unstable();
    assert!(all.into_iter().eq(0..2000));
    let plain = open(
        "memory://foreign",
        ReaderOptions { batch_size: 33, shuffle: false, ..ReaderOptions::default() },
    );
    assert!(collect(&plain, 0).into_iter().eq(0..2000), "RD-6");
}

#[test]
fn ranks_share_the_rows_and_padding_weighs_nothing() {
    prepare("memory://ranks", 2, 501);
    let mut all: Vec<i64> = Vec::new();
    for rank in 0..4 {
        let options = ReaderOptions {
            batch_size: 16,
            rank: Rank(rank),
            size: 4,
            tail: TailPolicy::Pad,
            ..ReaderOptions::default()
        };
        let reader = open("memory://ranks/train", options);
        let epoch = reader.start_epoch(0, 0, None).unwrap();
        assert_eq!(epoch.step_count(), 16);
        while let Some(batch) = next(&epoch) {
            assert_eq!(batch.row_count(), 16);
            let expected: Vec<f32> =
                (0..16).map(|row| f32::from(u8::from(row < batch.valid_rows()))).collect();
            assert_eq!(floats(&batch, 2), expected);
            let ids = ids(&batch);
            all.extend(&ids[..batch.valid_rows()]);
        }
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(0..1002));
}

#[test]
fn casts_happen_on_the_way() {
    prepare("memory://cast", 1, 300);
    let cast = HashMap::from([("id".to_owned(), "float32".to_owned())]);
    let reader = open(
        "memory://cast/train",
        ReaderOptions { batch_size: 300, cast, ..ReaderOptions::default() },
    );
    let epoch = reader.start_epoch(0, 0, None).unwrap();
    let batch = next(&epoch).unwrap();
    let firsts: Vec<f32> = floats(&batch, 1).chunks(3).map(|row| row[0]).collect();
    assert_eq!(floats(&batch, 0), firsts);
    let cast = HashMap::from([("id".to_owned(), "int8".to_owned())]);
    let dataset = Arc::new(ParquetDataset::open_directory("memory://cast/train").unwrap());
    let error =
        Reader::new(dataset, ReaderOptions { batch_size: 1, cast, ..ReaderOptions::default() })
            .unwrap_err();
    assert_eq!(error.to_string(), "cannot cast column id from int64 to int8");
}

#[test]
fn an_epoch_can_be_left_in_the_middle() {
    prepare("memory://left", 2, 1000);
    let reader =
        open("memory://left/train", ReaderOptions { batch_size: 10, ..ReaderOptions::default() });
    let epoch = reader.start_epoch(0, 0, None).unwrap();
    next(&epoch).unwrap();
    drop(epoch);
    let whole = collect(&reader, 0);
    let epoch = reader.start_epoch(0, 500, None).unwrap();
    let mut rest = Vec::new();
    while let Some(batch) = next(&epoch) {
        rest.extend(ids(&batch));
    }
    assert_eq!(rest.len(), 1500);
    assert!(rest.iter().all(|id| !whole[..500].contains(id)), "RD-5");
}

#[test]
fn a_budget_that_is_too_small_is_refused_with_the_least_that_works() {
    prepare("memory://budget", 1, 2000);
    let options =
        |byte_budget| ReaderOptions { batch_size: 10, byte_budget, ..ReaderOptions::default() };
    let Err(Error::Budget { needed, .. }) =
        open("memory://budget/train", options(100)).start_epoch(0, 0, None)
    else {
        unreachable!("100 bytes are not enough");
    };
    let frugal = open("memory://budget/train", options(needed));
    assert_eq!(collect(&frugal, 0), collect(&open("memory://budget/train", options(1 << 30)), 0));
}

#[test]
fn a_row_group_of_which_the_manifest_says_too_much_is_named() {
    let url = "memory://overstated";
    let store = Store::open(url).unwrap();
    let texts: ArrayRef =
        Arc::new(StringArray::from_iter_values((0..100).map(|row| format!("text {row}"))));
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    for name in ["f0.parquet", "f1.parquet"] {
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        store.write(name, writer.into_inner().unwrap().into()).unwrap();
    }
    let mut manifest = ParquetDataset::open_directory(url).unwrap().manifest().clone();
    let mut refused = |claimed: u64, byte_budget: u64| {
        manifest.files[1].groups[0].bytes = claimed;
        store.write(MANIFEST_FILE_NAME, manifest.to_json().unwrap().into()).unwrap();
        let columns = Some(vec!["text".to_owned()]);
        let options =
            ReaderOptions { batch_size: 10, columns, byte_budget, ..ReaderOptions::default() };
        open(url, options).start_epoch(0, 0, None).err()
    };
    let error = refused(1 << 60, 64 << 20).unwrap().to_string();
    let start = "the manifest says that row group 0 of memory://overstated/f1.parquet takes \
                 1152921504606846976 bytes";
    assert!(error.starts_with(start), "{error}");
    assert!(refused(1 << 20, 64 << 20).is_none(), "what fits does no harm");
    let small = refused(2000, 100);
    assert!(
        matches!(small, Some(Error::Budget { .. })),
        "the budget is too small for the file itself: {small:?}"
    );
}

#[test]
fn the_least_budget_is_enough_if_all_lanes_continue_at_once() {
    // 80 blocks of 100 rows in 8 lanes, and batches that end many of them; then blocks smaller than
    // a batch.
    for (partitions, each, batch_size) in
        [(8, 1000, 96), (8, 1000, 1000), (1, 300, 250), (8, 1000, 7999)]
    {
        let url = format!("memory://tight-{partitions}-{batch_size}");
        prepare(&url, partitions, each);
        let url = format!("{url}/train");
        let options = |byte_budget, threads| ReaderOptions {
            batch_size,
            byte_budget,
            threads,
            ..ReaderOptions::default()
        };
        let Err(Error::Budget { needed, blocks, .. }) =
            open(&url, options(100, 1)).start_epoch(0, 0, None)
        else {
            unreachable!("100 bytes are not enough");
        };
        // A row takes 24 bytes; at most 64 blocks are open, and one is loaded.
        assert!(blocks <= 66 * 100 * 24, "{blocks} bytes of blocks");
        let plenty = collect(&open(&url, options(1 << 30, 2)), 0);
        for threads in [1, 2, 4] {
            assert_eq!(
                collect(&open(&url, options(needed, threads)), 0),
                plenty,
                "{batch_size} {threads}"
            );
        }
    }
}

#[test]
fn broken_files_are_errors_that_name_the_file() {
    let store = foreign("memory://broken", 2, 1000);
    let whole = store.read("f1.parquet").unwrap();
    store.write("f1.parquet", whole.slice(..whole.len() / 2)).unwrap();
    let error = ParquetDataset::open_directory("memory://broken").unwrap_err().to_string();
    assert!(
        error.starts_with("not a Parquet file, or truncated: memory://broken/f1.parquet"),
        "{error}"
    );
    store.write("f1.parquet", whole.clone()).unwrap();
    let reader =
        open("memory://broken", ReaderOptions { batch_size: 10, ..ReaderOptions::default() });
    store.delete("f1.parquet").unwrap();
    let failed = |reader: &Reader| {
        let epoch = reader.start_epoch(0, 0, None).unwrap();
        loop {
            match epoch.next_batch(WAIT) {
                Ok(NextBatch::Batch(_)) => {}
                Ok(other) => unreachable!("{other:?}"),
                Err(error) => {
                    assert!(matches!(epoch.next_batch(WAIT), Err(Error::Ended)));
                    return error.to_string();
                }
            }
        }
    };
    assert_eq!(failed(&reader), "no such file: memory://broken/f1.parquet");
    let mut flipped = whole.to_vec();
    flipped[4..400].fill(0xFF);
    store.write("f1.parquet", flipped.into()).unwrap();
    let error = failed(&reader);
    assert!(
        error.contains("memory://broken/f1.parquet") && error.contains("row group 0"),
        "{error}"
    );
}

#[test]
fn what_is_missing_is_named() {
    foreign("memory://missing", 1, 10);
    let dataset = Arc::new(ParquetDataset::open_directory("memory://missing").unwrap());
    let columns = Some(vec!["id".to_owned(), "x".to_owned()]);
    let error =
        Reader::new(dataset, ReaderOptions { columns, batch_size: 1, ..ReaderOptions::default() })
            .unwrap_err();
    assert_eq!(error.to_string(), "no column x, there are: id, vector");
    assert!(matches!(
        ParquetDataset::open_directory("memory://nothing"),
        Err(Error::NotADataset { .. })
    ));
}
