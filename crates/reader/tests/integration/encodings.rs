// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Every way that values may lie in a file, read whole and in parts of row groups: the library
//! wrote them, and their ids say what must come out.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "tests"
)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{
    ArrayRef, BooleanArray, Date32Array, FixedSizeBinaryArray, Float32Array, Float64Array,
    Int8Array, Int16Array, Int64Array, ListArray, RecordBatch, TimestampMillisecondArray,
    UInt32Array,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use farandole_reader::{FillValue, NextBatch, ParquetDataset, Reader, ReaderOptions};
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, Encoding, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion};

const ROWS: i64 = 3000;

/// Columns of every type, of rows `from..to`; `modulo` makes values repeat, `holes` leaves some
/// out.
fn rows(from: i64, to: i64, modulo: i64, holes: bool) -> RecordBatch {
    let id = |row: i64| row % modulo;
    let all = || from..to;
    let hole = |row: i64| holes && row % 7 == 3;
    let vectors = Float32Array::from_iter_values(
        all().flat_map(|row| (0..3).map(move |k| (id(row) * 3 + k) as f32)),
    );
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let lengths = OffsetBuffer::from_lengths(std::iter::repeat_n(3, (to - from) as usize));
    let small =
        Int16Array::from_iter_values(all().flat_map(|row| [id(row) as i16, -(id(row) as i16)]));
    let pairs = OffsetBuffer::from_lengths(std::iter::repeat_n(2, (to - from) as usize));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("row", Arc::new(Int64Array::from_iter_values(all()))),
        (
            "b",
            Arc::new(
                all().map(|row| (!hole(row)).then_some(id(row) % 2 == 0)).collect::<BooleanArray>(),
            ),
        ),
        (
            "i8",
            Arc::new(
                all()
                    .map(|row| (!hole(row)).then_some((id(row) % 100) as i8))
                    .collect::<Int8Array>(),
            ),
        ),
        (
            "i16",
            Arc::new(
                all().map(|row| (!hole(row)).then_some(-(id(row) as i16))).collect::<Int16Array>(),
            ),
        ),
        (
            "u32",
            Arc::new(
                all().map(|row| (!hole(row)).then_some(id(row) as u32)).collect::<UInt32Array>(),
            ),
        ),
        (
            "f32",
            Arc::new(
                all()
                    .map(|row| (!hole(row)).then_some(id(row) as f32 / 2.0))
                    .collect::<Float32Array>(),
            ),
        ),
        (
            "f64",
            Arc::new(
                all()
                    .map(|row| (!hole(row)).then_some(id(row) as f64 / 4.0))
                    .collect::<Float64Array>(),
            ),
        ),
        (
            "day",
            Arc::new(
                all().map(|row| (!hole(row)).then_some(-(id(row) as i32))).collect::<Date32Array>(),
            ),
        ),
        (
            "at",
            Arc::new(
                all()
                    .map(|row| (!hole(row)).then_some(id(row) << 33))
                    .collect::<TimestampMillisecondArray>(),
            ),
        ),
        ("v", Arc::new(ListArray::new(item, lengths, Arc::new(vectors), None))),
        (
            "s",
            Arc::new(ListArray::new(
                Arc::new(Field::new("item", DataType::Int16, false)),
                pairs,
                Arc::new(small),
                None,
            )),
        ),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Two files with row groups of other sizes than the lanes', so that many are read in parts.
fn write(url: &str, properties: &WriterProperties, modulo: i64, holes: bool) {
    let store = Store::open(url).unwrap();
    for (file, (from, to)) in [(0, 1100), (1100, ROWS)].into_iter().enumerate() {
        let batch = rows(from, to, modulo, holes);
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.clone())).unwrap();
        writer.write(&batch).unwrap();
        store.write(&format!("{file}.parquet"), writer.into_inner().unwrap().into()).unwrap();
    }
}

fn values<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.chunks_exact(N).map(|value| value.try_into().unwrap())
}

/// Reads all, on three ranks, and compares every value with what its row says.
fn check(url: &str, modulo: i64, holes: bool, shuffle: bool) {
    let dataset = Arc::new(ParquetDataset::open_directory(url).unwrap());
    let mut seen = Vec::new();
    for rank in 0..3 {
        let one = ("*".to_owned(), FillValue::Float(1.0));
        let fill = if holes { HashMap::from([one]) } else { HashMap::new() };
        let rank = farandole_world::Rank(rank);
        let options = ReaderOptions {
            batch_size: 50,
            rank,
            size: 3,
            fill,
            shuffle,
            ..ReaderOptions::default()
        };
        let reader = Reader::new(Arc::clone(&dataset), options).unwrap();
        let epoch = reader.start_epoch(0, 0, None).unwrap();
        loop {
            let batch = match epoch.next_batch(Duration::from_secs(30)) {
                Ok(NextBatch::Batch(batch)) => batch,
                Ok(NextBatch::End) => break,
                other => unreachable!("{other:?}"),
            };
            let bytes = |name: &str| {
                let index = batch.fields().iter().position(|field| field.name == name).unwrap();
                batch.column_bytes(index).unwrap()
            };
            let rows: Vec<i64> = values(bytes("row")).map(i64::from_le_bytes).collect();
            let id = |row: &i64| row % modulo;
            let hole = |row: &i64| holes && row % 7 == 3;
            macro_rules! same {
                ($name:literal, $kind:ty, $value:expr) => {
                    let found = values(bytes($name)).map(<$kind>::from_le_bytes);
                    let expected =
                        rows.iter().map(|row| if hole(row) { 1 as $kind } else { $value(id(row)) });
                    assert!(found.eq(expected), "{} in {url}", $name);
                };
            }
            same!("b", u8, |id| u8::from(id % 2 == 0));
            same!("i8", i8, |id| (id % 100) as i8);
            same!("i16", i16, |id: i64| -(id as i16));
            same!("u32", u32, |id| id as u32);
            same!("f32", f32, |id| id as f32 / 2.0);
            same!("f64", f64, |id| id as f64 / 4.0);
            same!("day", i64, |id: i64| -id);
            same!("at", i64, |id: i64| (id << 33) * 1000);
            let vectors: Vec<f32> = values(bytes("v")).map(f32::from_le_bytes).collect();
            assert!(
                vectors
                    .into_iter()
                    .eq(rows.iter().flat_map(|row| (0..3).map(move |k| (id(row) * 3 + k) as f32)))
            );
            let pairs: Vec<i16> = values(bytes("s")).map(i16::from_le_bytes).collect();
            assert!(
                pairs
                    .into_iter()
                    .eq(rows.iter().flat_map(|row| [id(row) as i16, -(id(row) as i16)]))
            );
            seen.extend(rows);
        }
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..ROWS), "every row once in {url}");
}

fn properties() -> WriterPropertiesBuilder {
    WriterProperties::builder()
        .set_max_row_group_row_count(Some(400))
        .set_data_page_row_count_limit(64)
        .set_write_batch_size(16)
}

#[test]
fn values_are_the_same_however_they_are_stored() {
    let versions = [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0];
    let mut number = 0;
    for version in versions {
        for dictionary in [false, true] {
            for index in [false, true] {
                for holes in [false, true] {
                    for (modulo, shuffle) in [(1, true), (5, false), (97, true), (ROWS, true)] {
                        number += 1;
                        let url = format!("memory://stored{number}");
                        let properties = properties()
                            .set_writer_version(version)
                            .set_dictionary_enabled(dictionary)
                            .set_offset_index_disabled(!index)
                            .build();
                        write(&url, &properties, modulo, holes);
                        check(&url, modulo, holes, shuffle);
                    }
                }
            }
        }
    }
}

#[test]
fn values_are_the_same_in_every_codec() {
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::LZ4_RAW,
        Compression::LZ4,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
    ];
    for (number, codec) in codecs.into_iter().enumerate() {
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            let url = format!("memory://codec{number}{version:?}");
            write(
                &url,
                &properties().set_writer_version(version).set_compression(codec).build(),
                ROWS,
                true,
            );
            check(&url, ROWS, true, true);
        }
    }
}

#[test]
fn values_are_the_same_in_rare_encodings() {
    for (column, encoding) in [
        ("row", Encoding::DELTA_BINARY_PACKED),
        ("day", Encoding::DELTA_BINARY_PACKED),
        ("f32", Encoding::BYTE_STREAM_SPLIT),
        ("f64", Encoding::BYTE_STREAM_SPLIT),
        ("b", Encoding::RLE),
        ("v.list.item", Encoding::BYTE_STREAM_SPLIT),
    ] {
        let url = format!("memory://encoded-{column}");
        let properties = properties()
            .set_dictionary_enabled(false)
            .set_column_encoding(column.into(), encoding)
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .build();
        write(&url, &properties, ROWS, false);
        check(&url, ROWS, false, true);
    }
}

#[test]
fn packed_vectors_of_any_width_are_copied() {
    let store = Store::open("memory://packed").unwrap();
    let values: Vec<[u8; 5]> = (0..100_u8).map(|row| [row; 5]).collect();
    let column: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter(values.iter()).unwrap());
    let batch = RecordBatch::try_from_iter([("x", column)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    let bytes = writer.into_inner().unwrap();
    let length = bytes.len();
    store.write("0.parquet", bytes.into()).unwrap();
    let manifest = format!(
        r#"{{"format": 1, "fingerprint": "x", "rows": 100, "bytes": {length},
            "columns": [{{"name": "x", "element": "uint8", "shape": [5], "source": "x", "nulls": 0}}],
            "files": [{{"path": "0.parquet", "rows": 100, "bytes": {length}, "groups": [{{"rows": 100, "bytes": 500}}]}}]}}"#
    );
    store.write("_manifest.json", manifest.into()).unwrap();
    let dataset = Arc::new(ParquetDataset::open_directory("memory://packed").unwrap());
    let options = ReaderOptions { batch_size: 100, shuffle: false, ..ReaderOptions::default() };
    let epoch = Reader::new(dataset, options).unwrap().start_epoch(0, 0, None).unwrap();
    let Ok(NextBatch::Batch(batch)) = epoch.next_batch(Duration::from_secs(30)) else {
        unreachable!("one batch")
    };
    assert_eq!(batch.column_bytes(0).unwrap(), values.concat());
}
