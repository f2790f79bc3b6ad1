// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Columns of any length, however they lie in a file: as they are, and as lists that are padded.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{
    ArrayRef, BinaryArray, FixedSizeBinaryArray, Int64Array, LargeBinaryArray, RecordBatch,
    StringArray,
};
use farandole_reader::{
    Batch, EpochReader, Error, NextBatch, ParquetDataset, Reader, ReaderOptions, RowPadding,
};
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion};

const ROWS: i64 = 900;

/// A function from the number of a row to its value.
type Value = fn(i64) -> Vec<u8>;

fn text(row: i64) -> String {
    format!("row {row} ").repeat(usize::try_from(row % 9).unwrap())
}

fn tokens(row: i64) -> Vec<u8> {
    (0..row % 11).flat_map(|place| i32::try_from(row + place).unwrap().to_le_bytes()).collect()
}

/// Two files, whose values repeat themselves after `modulo` rows.
fn write(url: &str, properties: WriterPropertiesBuilder, modulo: i64) {
    let store = Store::open(url).unwrap();
    let properties =
        properties.set_max_row_group_row_count(Some(300)).set_data_page_row_count_limit(64);
    let properties = properties.set_write_batch_size(16).build();
    for (file, rows) in [0..ROWS / 3, ROWS / 3..ROWS].into_iter().enumerate() {
        let id = |row: i64| row % modulo;
        let columns: [(&str, ArrayRef); 4] = [
            ("row", Arc::new(Int64Array::from_iter_values(rows.clone()))),
            (
                "text",
                Arc::new(StringArray::from_iter_values(rows.clone().map(|row| text(id(row))))),
            ),
            (
                "tokens",
                Arc::new(LargeBinaryArray::from_iter_values(
                    rows.clone().map(|row| tokens(id(row))),
                )),
            ),
            (
                "fixed",
                Arc::new(
                    FixedSizeBinaryArray::try_from_iter(rows.map(|row| id(row).to_le_bytes()))
                        .unwrap(),
                ),
            ),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.clone())).unwrap();
        writer.write(&batch).unwrap();
        store.write(&format!("{file}.parquet"), writer.into_inner().unwrap().into()).unwrap();
    }
}

fn options() -> ReaderOptions {
    let columns = ["row", "text", "tokens", "fixed"].map(str::to_owned).to_vec();
    ReaderOptions { columns: Some(columns), batch_size: 70, ..ReaderOptions::default() }
}

fn next(epoch: &EpochReader) -> Option<Batch> {
    match epoch.next_batch(Duration::from_secs(30)).unwrap() {
        NextBatch::Batch(batch) => Some(batch),
        NextBatch::End => None,
        NextBatch::Pending => unreachable!("no batch within 30 s"),
    }
}

fn rows(batch: &Batch) -> Vec<i64> {
    batch
        .column_bytes(0)
        .unwrap()
        .chunks_exact(8)
        .map(|row| i64::from_le_bytes(row.try_into().unwrap()))
        .collect()
}

fn ends(bytes: &[u8]) -> Vec<usize> {
    let end =
        |bytes: &[u8]| usize::try_from(i64::from_le_bytes(bytes.try_into().unwrap())).unwrap();
    bytes.chunks_exact(8).map(end).collect()
}

/// Reads all in batches, and compares every value with what its row says.
fn check(url: &str, modulo: i64, shuffle: bool) {
    let dataset = Arc::new(ParquetDataset::open_directory(url).unwrap());
    let epoch = Reader::new(dataset, ReaderOptions { shuffle, ..options() })
        .unwrap()
        .start_epoch(0, 0, None)
        .unwrap();
    let mut seen = Vec::new();
    while let Some(batch) = next(&epoch) {
        let rows = rows(&batch);
        let kinds: [(usize, Value); 3] =
            [(1, |id| text(id).into_bytes()), (2, tokens), (3, |id| id.to_le_bytes().to_vec())];
        for (index, of) in kinds {
            let (places, values) = batch.variable_length_values(index).unwrap();
            let places = ends(places);
            assert_eq!(places.len(), rows.len() + 1);
            for (row, place) in rows.iter().zip(places.windows(2)) {
                assert_eq!(values[place[0]..place[1]], of(row % modulo), "row {row} of {url}");
            }
        }
        seen.extend(rows);
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..ROWS), "every row once in {url}");
}

#[test]
fn values_of_any_length_are_the_same_however_they_are_stored() {
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::LZ4_RAW,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(Default::default()),
    ];
    for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
        for (number, codec) in codecs.into_iter().enumerate() {
            for (modulo, dictionary) in [(ROWS, false), (ROWS, true), (7, true), (1, true)] {
                let url = format!("memory://texts-{version:?}-{number}-{modulo}-{dictionary}");
                let properties =
                    WriterProperties::builder().set_writer_version(version).set_compression(codec);
                // The dictionary of many values is given up on the way.
                let properties = properties
                    .set_dictionary_enabled(dictionary)
                    .set_dictionary_page_size_limit(400);
                write(&url, properties, modulo);
                check(&url, modulo, modulo != 7);
            }
        }
    }
    for encoding in [Encoding::DELTA_BYTE_ARRAY, Encoding::DELTA_LENGTH_BYTE_ARRAY] {
        let url = format!("memory://texts-{encoding:?}");
        let properties = WriterProperties::builder().set_dictionary_enabled(false);
        let properties = ["text", "tokens"].iter().fold(properties, |properties, name| {
            properties.set_column_encoding((*name).into(), encoding)
        });
        write(&url, properties, ROWS);
        check(&url, ROWS, true);
    }
}

fn padding(most: usize, step: usize) -> RowPadding {
    RowPadding { fill: (-1_i32).to_le_bytes().to_vec(), max_values: most, step, fixed: false }
}

#[test]
fn lists_are_padded_to_the_shortest_length_that_fits_their_batch() {
    write("memory://padded", WriterProperties::builder(), ROWS);
    let dataset = Arc::new(ParquetDataset::open_directory("memory://padded").unwrap());
    let cases: [(usize, usize, bool, &[usize]); 3] =
        [(10, 10, false, &[10]), (10, 3, false, &[3, 6, 9, 10]), (7, 7, true, &[7])];
    for (most, step, fixed, widths) in cases {
        let pad =
            HashMap::from([("tokens".to_owned(), RowPadding { fixed, ..padding(most, step) })]);
        let reader =
            Reader::new(Arc::clone(&dataset), ReaderOptions { pad, batch_size: 3, ..options() })
                .unwrap();
        let epoch = reader.start_epoch(0, 0, None).unwrap();
        let mut found = Vec::new();
        while let Some(batch) = next(&epoch) {
            let length = batch.padded_length(2).unwrap();
            let (places, values) = batch.variable_length_values(2).unwrap();
            assert_eq!(values.len(), batch.row_count() * length * 4);
            assert_eq!(values.as_ptr().align_offset(64), 0);
            let rows = rows(&batch);
            let lengths: Vec<usize> =
                ends(places).windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert_eq!(lengths, rows.iter().map(|row| tokens(*row).len()).collect::<Vec<_>>());
            for (row, values) in rows.iter().zip(values.chunks_exact(length * 4)) {
                let mut wanted = tokens(*row);
                wanted.resize(wanted.len().max(length * 4), 0xFF);
                assert_eq!(values, &wanted[..length * 4], "row {row}");
            }
            assert_eq!(batch.padded_length(1), None);
            found.push(length);
        }
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, widths);
    }
}

#[test]
fn a_column_that_cannot_be_padded_is_named() {
    write("memory://unpadded", WriterProperties::builder(), ROWS);
    let dataset = Arc::new(ParquetDataset::open_directory("memory://unpadded").unwrap());
    let open = |column: &str, padding| {
        let pad = HashMap::from([(column.to_owned(), padding)]);
        Reader::new(Arc::clone(&dataset), ReaderOptions { pad, ..options() })
    };
    let told = |column: &str, padding| open(column, padding).unwrap_err().to_string();
    assert!(
        told("row", padding(1, 1)).contains("column row cannot be read into batches: only lists")
    );
    assert!(
        told("text", padding(1, 1)).contains("column text cannot be read into batches: only lists")
    );
    assert!(told("other", padding(1, 1)).contains("other"));
    assert!(
        told("tokens", padding(0, 1))
            .contains("column tokens cannot be read into batches: rows are padded to")
    );
    assert!(
        told("tokens", RowPadding { fill: Vec::new(), ..padding(1, 1) }).contains("has no bytes")
    );
    let torn = open("tokens", RowPadding { fill: vec![0; 8], ..padding(9, 9) })
        .unwrap()
        .start_epoch(0, 0, None)
        .unwrap();
    let error = torn.next_batch(Duration::from_secs(30)).unwrap_err();
    assert!(
        matches!(&error, Error::PartialValue { column, width: 8, .. } if column == "tokens"),
        "{error}"
    );
    let told = error.to_string();
    assert!(told.contains("in row group ") && told.contains(".parquet"), "{told}");
    assert!(matches!(torn.next_batch(Duration::from_secs(30)), Err(Error::Ended)));
    let pad =
        HashMap::from([("tokens".to_owned(), RowPadding { fixed: true, ..padding(1 << 50, 1) })]);
    let options = ReaderOptions { pad, byte_budget: u64::MAX, ..options() };
    let endless =
        Reader::new(Arc::clone(&dataset), options).unwrap().start_epoch(0, 0, None).unwrap();
    let error = endless.next_batch(Duration::from_secs(30)).unwrap_err();
    assert!(matches!(&error, Error::Memory { column, .. } if column == "tokens"), "{error}");
}

#[test]
fn a_budget_that_padded_batches_exceed_is_refused_with_the_least_that_works() {
    write("memory://wide", WriterProperties::builder(), ROWS);
    let dataset = Arc::new(ParquetDataset::open_directory("memory://wide").unwrap());
    let start = |padding, byte_budget| {
        let pad = HashMap::from([("tokens".to_owned(), padding)]);
        let options = ReaderOptions { pad, byte_budget, batch_size: 4, ..options() };
        Reader::new(Arc::clone(&dataset), options).unwrap().start_epoch(0, 0, None)
    };
    // Rows of 4 MiB, whatever they hold: 16 MiB in a batch, one at the consumer and the next one.
    let most = 1 << 20;
    let cases = [
        RowPadding { fixed: true, ..padding(most, 1) },
        padding(most, most),
        padding(2 * most, most),
    ];
    for always in cases {
        let Err(Error::Budget { needed, batches, .. }) = start(always.clone(), 32 << 20).map(drop)
        else {
            unreachable!("{always:?} fits into 32 MiB")
        };
        assert!((32 << 20..33 << 20).contains(&batches), "{batches} for {always:?}");
        let epoch = start(always, needed).unwrap();
        assert_eq!(next(&epoch).and_then(|batch| batch.padded_length(2)), Some(most));
    }
    // Most rows are short, and only a long one is padded to as much.
    assert!(start(padding(most, 1), 4 << 20).is_ok());
}

#[test]
fn one_value_in_every_row_is_read_until_it_is_too_much_for_batches() {
    let long = vec![7_u8; 1 << 20];
    let write = |url: &str, rows: usize| {
        let column: ArrayRef =
            Arc::new(BinaryArray::from_iter_values(std::iter::repeat_n(&long, rows)));
        let batch = RecordBatch::try_from_iter([("x", column)]).unwrap();
        let properties =
            WriterProperties::builder().set_dictionary_page_size_limit(4 << 20).build();
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        let bytes = writer.into_inner().unwrap();
        assert!(bytes.len() < 2 << 20, "it is in a dictionary");
        Store::open(url).unwrap().write("0.parquet", bytes.into()).unwrap();
    };
    let read = |url: &str| {
        let dataset = Arc::new(ParquetDataset::open_directory(url).unwrap());
        let columns = Some(vec!["x".to_owned()]);
        let options = ReaderOptions {
            columns,
            batch_size: 1,
            byte_budget: 32 << 20,
            ..ReaderOptions::default()
        };
        let epoch = Reader::new(dataset, options).unwrap().start_epoch(0, 0, None).unwrap();
        let mut rows = 0;
        loop {
            match epoch.next_batch(Duration::from_secs(30))? {
                NextBatch::Batch(batch) => {
                    assert_eq!(batch.variable_length_values(0).unwrap().1, long);
                    rows += 1;
                }
                other => {
                    assert!(matches!(other, NextBatch::End));
                    return Ok::<_, Error>(rows);
                }
            }
        }
    };
    write("memory://repeated", 100);
    assert_eq!(read("memory://repeated").unwrap(), 100);
    write("memory://too-often", 200);
    let error = read("memory://too-often").unwrap_err().to_string();
    assert!(
        error.contains("column x: ") && error.contains("its rows take more than 134217728 bytes"),
        "{error}"
    );
}
