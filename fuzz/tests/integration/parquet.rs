// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Damaged Parquet through the reader: rows or an error, in little time.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use crate::reading::{hush, read};
use arrow::array::{ArrayRef, Float32Array, Int32Array, Int64Array, ListArray, RecordBatch};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use farandole_fuzz::{Random, cases};
use farandole_reader::Error;
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};

const COLUMNS: [&str; 4] = ["id", "few", "holes", "v"];

fn rows(count: i32) -> RecordBatch {
    let length = usize::try_from(count).unwrap();
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let values = Arc::new(Float32Array::from_iter_values(
        (0..count * 2).map(|n| f32::from(u8::try_from(n % 50).unwrap())),
    ));
    let lengths = OffsetBuffer::from_lengths(std::iter::repeat_n(2, length));
    let columns: [(&str, ArrayRef); 4] = [
        ("id", Arc::new(Int64Array::from_iter_values((0..count).map(i64::from)))),
        ("few", Arc::new(Int32Array::from_iter_values((0..count).map(|n| n % 3)))),
        ("holes", Arc::new((0..count).map(|n| (n % 5 > 0).then_some(n)).collect::<Int32Array>())),
        ("v", Arc::new(ListArray::new(item, lengths, values, None))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Files of every kind that we decode ourselves, and one that the library decodes.
fn files() -> Vec<Vec<u8>> {
    let plain = || {
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(300));
        properties.set_data_page_row_count_limit(70).set_write_batch_size(10)
    };
    let kinds = [
        plain().set_dictionary_enabled(false),
        plain().set_compression(Compression::SNAPPY),
        plain()
            .set_compression(Compression::LZ4_RAW)
            .set_writer_version(WriterVersion::PARQUET_2_0),
        plain()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_offset_index_disabled(true),
        plain().set_dictionary_enabled(false).set_encoding(Encoding::BYTE_STREAM_SPLIT),
        plain().set_compression(Compression::GZIP(parquet::basic::GzipLevel::default())),
    ];
    let batch = rows(800);
    kinds
        .map(|kind| {
            let mut writer =
                ArrowWriter::try_new(Vec::new(), batch.schema(), Some(kind.build())).unwrap();
            writer.write(&batch).unwrap();
            writer.into_inner().unwrap()
        })
        .to_vec()
}

#[test]
fn damaged_files_are_rows_or_errors_and_never_a_hang() {
    hush();
    let files = files();
    let store = Store::open("memory://damaged").unwrap();
    store.write("sound.parquet", files[0].clone().into()).unwrap();
    assert_eq!(read("memory://damaged", &COLUMNS, &mut Random::new(0)).unwrap(), 800);
    cases(|random| {
        let sound = &files[random.below(files.len())];
        let mut bytes = match random.below(3) {
            0 => random.mutated(sound),
            // The footer is the small part, and the most delicate.
            1 => {
                let at = sound.len() - 1 - random.below(sound.len() / 3);
                let (head, tail) = sound.split_at(at);
                let mut bytes = head.to_vec();
                bytes.extend(random.mutated(tail));
                bytes
            }
            _ => {
                let mut bytes = sound.clone();
                for _ in 0..=random.below(20) {
                    let at = random.below(bytes.len());
                    bytes[at] = random.byte();
                }
                bytes
            }
        };
        if random.below(8) == 0 {
            bytes = random.bytes(300);
        }
        store.write("broken.parquet", bytes.into()).unwrap();
        if let Err(error) = read("memory://damaged", &COLUMNS, random) {
            let text = error.to_string();
            let told = text.contains("memory://damaged/") || text.contains("column");
            assert!(
                told || matches!(error, Error::Budget { .. }),
                "the error names no file: {text}"
            );
        }
    });
}
