// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Data behind a network: latency is hidden, nothing is read twice, and refusals are reported.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Bucket, Mood};
use arrow::array::{ArrayRef, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use farandole_dataset::{DataFile, Manifest};
use farandole_prepare::{PartitionSummary, PartitionWriter, commit_partitions};
use farandole_reader::{NextBatch, ParquetDataset, Reader, ReaderOptions};
use farandole_store::Store;
use farandole_world::Rank;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

const WAIT: Duration = Duration::from_secs(60);

/// Prepared rows with an id and a vector of `width` floats.
fn prepare(url: &str, partitions: u64, rows: i64, width: i32) -> Store {
    let spec = r#"{"train": "train"}"#;
    let mut summaries = Vec::new();
    for partition in 0..partitions {
        let mut writer = PartitionWriter::new(url, spec, partition, "a").unwrap();
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
        let count = usize::try_from(rows * i64::from(width)).unwrap();
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        let values = Arc::new(Float32Array::from(vec![1.0; count]));
        let vectors: ArrayRef = Arc::new(FixedSizeListArray::new(item, width, values, None));
        writer
            .write_batch(&RecordBatch::try_from_iter([("id", ids), ("vector", vectors)]).unwrap())
            .unwrap();
        summaries.push(
            PartitionSummary::from_bytes(&writer.finish_partition().unwrap().to_bytes().unwrap())
                .unwrap(),
        );
    }
    commit_partitions(url, spec, summaries).unwrap();
    Store::open(&format!("{url}/train")).unwrap()
}

fn reader(url: &str, options: ReaderOptions) -> Reader {
    Reader::new(Arc::new(ParquetDataset::open_directory(url).unwrap()), options).unwrap()
}

/// Reads an epoch: its rows, and the seconds from the first batch to the last.
fn read(reader: &Reader) -> (usize, f64) {
    let epoch = reader.start_epoch(0, 0, None).unwrap();
    let (mut rows, mut start) = (0, None);
    while let NextBatch::Batch(batch) = epoch.next_batch(WAIT).unwrap() {
        start.get_or_insert_with(Instant::now);
        rows += batch.valid_rows();
    }
    (rows, start.unwrap().elapsed().as_secs_f64())
}

fn failure(reader: &Reader) -> String {
    let epoch = reader.start_epoch(0, 0, None).unwrap();
    loop {
        match epoch.next_batch(WAIT) {
            Ok(NextBatch::Batch(_)) => {}
            Ok(other) => unreachable!("{other:?}"),
            Err(error) => {
                let cause =
                    std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                return format!("{error} {cause}");
            }
        }
    }
}

/// Gives the files of a bucket to the reader under so many names each.
fn repeat(bucket: &Bucket, store: &Store, times: usize) {
    let manifest = ParquetDataset::open_directory(&store.url()).unwrap().manifest().clone();
    let mut files = Vec::new();
    for (number, file) in
        manifest.files.iter().cycle().take(manifest.files.len() * times).enumerate()
    {
        let path = format!("{number}-{}", file.path);
        bucket.put(&path, store.read(&file.path).unwrap());
        files.push(DataFile { path, ..file.clone() });
    }
    let manifest = Manifest::new(manifest.fingerprint, manifest.columns, files);
    bucket.put("_manifest.json", manifest.to_json().unwrap().into());
}

#[test]
fn a_slow_store_leaves_four_fifths_of_its_speed() {
    let store = prepare("memory://slow", 4, 12_000, 1000);
    let bucket = Bucket::of("slow", &store);
    repeat(&bucket, &store, 8);
    let delay = Duration::from_millis(50);
    // Three attempts: other processes may take the cores away for a while.
    let mut told = Vec::new();
    for _ in 0..3 {
        let seconds = |delay: Duration| {
            bucket.set_delay(delay);
            let before = bucket.counts().0;
            let options = ReaderOptions { batch_size: 512, ..ReaderOptions::default() };
            let (rows, seconds) = read(&reader(&bucket.url, options));
            assert_eq!(rows, 8 * 48_000);
            (seconds, f64::from(u32::try_from(bucket.counts().0 - before).unwrap()))
        };
        let (quick, _) = seconds(Duration::ZERO);
        let (slow, requests) = seconds(delay);
        assert!(requests > 300.0, "one after the other they would take long");
        told.push((quick, slow, requests));
        if quick >= 0.8 * slow {
            println!("seconds without and with 50 ms a request, and requests: {told:?}");
            return;
        }
    }
    unreachable!("seconds without and with 50 ms a request, and requests: {told:?}");
}

#[test]
fn every_byte_is_fetched_by_one_rank() {
    let store = prepare("memory://once", 2, 4000, 100);
    let bucket = Bucket::of("once", &store);
    let whole: u64 = store.list("").unwrap().iter().map(|entry| entry.bytes).sum();
    for size in [1, 2, 4, 8] {
        let (_, before) = bucket.counts();
        let rows: usize = (0..size)
            .map(|rank| {
                read(&reader(
                    &bucket.url,
                    ReaderOptions {
                        batch_size: 64,
                        rank: Rank(rank),
                        size,
                        ..ReaderOptions::default()
                    },
                ))
                .0
            })
            .sum();
        assert_eq!(rows, 8000);
        // Every rank looks at the manifest and at the footers besides.
        let small = u64::from(size) * (64 << 10) * 3;
        let fetched = bucket.counts().1 - before;
        assert!(fetched <= whole * 11 / 10 + small, "{fetched} of {whole} bytes at size {size}");
    }
}

#[test]
fn row_groups_larger_than_a_block_are_fetched_by_their_pages() {
    const ROWS: i64 = 1_200_000;
    for index in [true, false] {
        let name = format!("large-{index}");
        let store = Store::open(&format!("memory://{name}")).unwrap();
        for file in 0..2 {
            let column = Float32Array::from(vec![1.0; usize::try_from(ROWS).unwrap()]);
            let columns: Vec<ArrayRef> =
                (0..10).map(|_| Arc::new(column.clone()) as ArrayRef).collect();
            let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
            let batch = RecordBatch::try_from_iter(names.into_iter().zip(columns)).unwrap();
            let properties = WriterProperties::builder()
                .set_dictionary_enabled(false)
                .set_max_row_group_row_count(None)
                .set_data_page_row_count_limit(20_000)
                .set_offset_index_disabled(!index)
                .build();
            let mut writer =
                ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
            writer.write(&batch).unwrap();
            store.write(&format!("{file}.parquet"), writer.into_inner().unwrap().into()).unwrap();
        }
        let manifest = ParquetDataset::open_directory(&format!("memory://{name}"))
            .unwrap()
            .manifest()
            .to_json()
            .unwrap();
        store.write("_manifest.json", manifest.into()).unwrap();
        let bucket = Bucket::of(&name, &store);
        let whole: u64 = store.list("").unwrap().iter().map(|entry| entry.bytes).sum();
        for size in [1, 4] {
            let (_, before) = bucket.counts();
            let mut rows = 0;
            for rank in 0..size {
                let options = ReaderOptions {
                    batch_size: 10_000,
                    rank: Rank(rank),
                    size,
                    ..ReaderOptions::default()
                };
                rows += read(&reader(&bucket.url, options)).0;
            }
            assert_eq!(rows, 2_400_000);
            let fetched = bucket.counts().1 - before;
            assert!(
                fetched <= whole * 11 / 10,
                "{fetched} of {whole} bytes at size {size}, index: {index}"
            );
        }
    }
}

#[test]
fn a_refusal_of_a_bucket_is_reported_and_names_the_file() {
    let bucket = Bucket::of("moody", &prepare("memory://moody", 2, 1000, 10));
    let reader = reader(&bucket.url, ReaderOptions { batch_size: 16, ..ReaderOptions::default() });
    bucket.set_mood(Mood::Status(403));
    let error = failure(&reader);
    assert!(error.starts_with("not allowed to read: s3://moody/"), "{error}");
    bucket.set_mood(Mood::Status(404));
    let error = failure(&reader);
    assert!(error.starts_with("no such file: s3://moody/"), "{error}");
    bucket.set_mood(Mood::Shaky(3));
    assert_eq!(read(&reader).0, 2000, "a service may be busy for a moment");
}

#[test]
fn an_epoch_ends_although_its_store_does_not_answer() {
    let bucket = Bucket::of("silent", &prepare("memory://silent", 2, 1000, 10));
    let reader = reader(&bucket.url, ReaderOptions { batch_size: 16, ..ReaderOptions::default() });
    bucket.set_delay(Duration::from_secs(15));
    let epoch = reader.start_epoch(0, 0, None).unwrap();
    assert!(matches!(epoch.next_batch(Duration::from_millis(50)), Ok(NextBatch::Pending)));
    let start = Instant::now();
    drop(epoch);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_file_that_vanishes_in_the_middle_of_an_epoch_is_named() {
    let bucket = Bucket::of("vanishing", &prepare("memory://vanishing", 8, 4000, 300));
    let options = ReaderOptions {
        batch_size: 16,
        shuffle: false,
        byte_budget: 24 << 20,
        ..ReaderOptions::default()
    };
    let dataset = Arc::new(ParquetDataset::open_directory(&bucket.url).unwrap());
    let epoch =
        Reader::new(Arc::clone(&dataset), options).unwrap().start_epoch(0, 0, None).unwrap();
    assert!(matches!(epoch.next_batch(WAIT), Ok(NextBatch::Batch(_))));
    let last = dataset.manifest().files.last().unwrap().path.clone();
    bucket.remove(&last);
    let error = loop {
        match epoch.next_batch(WAIT) {
            Ok(NextBatch::Batch(_)) => {}
            Ok(other) => unreachable!("{other:?}"),
            Err(error) => break error.to_string(),
        }
    };
    assert_eq!(error, format!("no such file: s3://vanishing/{last}"));
}
