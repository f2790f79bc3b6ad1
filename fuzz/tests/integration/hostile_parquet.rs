// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parquet whose numbers contradict each other and its bytes (values, rows, sizes, offsets, pages,
//! dictionaries), read where memory is short: rows or an error that names the file, and never the
//! end of the process.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use crate::reading::{BUDGET, hush, read};
use arrow::array::{
    ArrayRef, DictionaryArray, Float32Array, Int32Array, Int64Array, RecordBatch, StringArray,
};
use bytes::Bytes;
use farandole_fuzz::{Random, apart, cases, confine};
use farandole_reader::Error;
use farandole_store::Store;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding};
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader,
    ParquetMetaDataWriter, RowGroupMetaData,
};
use parquet::file::properties::{WriterProperties, WriterVersion};

/// Addresses that the reader may take beyond what the process has when it begins.
const ROOM: u64 = 768 << 20;
const COLUMNS: [&str; 4] = ["id", "few", "x", "text"];

/// Files of the ways in which we and the library decode; one has indexes of its pages.
fn files() -> Vec<Vec<u8>> {
    let count = 600;
    let columns: [(&str, ArrayRef); 4] = [
        ("id", Arc::new(Int64Array::from_iter_values((0..count).map(i64::from)))),
        ("few", Arc::new(Int32Array::from_iter_values((0..count).map(|n| n % 3)))),
        ("x", Arc::new(Float32Array::from_iter_values((0..count).map(|_| 0.5)))),
        (
            "text",
            Arc::new(StringArray::from_iter_values((0..count).map(|n| format!("text {}", n % 7)))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let plain = || {
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(250));
        properties
            .set_data_page_row_count_limit(60)
            .set_write_batch_size(10)
            .set_offset_index_disabled(true)
    };
    let kinds = [
        plain(),
        plain().set_dictionary_enabled(false),
        plain().set_compression(Compression::SNAPPY),
        plain()
            .set_compression(Compression::ZSTD(Default::default()))
            .set_writer_version(WriterVersion::PARQUET_2_0),
        plain().set_compression(Compression::GZIP(Default::default())),
        plain()
            .set_compression(Compression::BROTLI(Default::default()))
            .set_dictionary_enabled(false),
        plain()
            .set_column_encoding("text".into(), Encoding::DELTA_BYTE_ARRAY)
            .set_dictionary_enabled(false),
        plain().set_offset_index_disabled(false).set_dictionary_enabled(false),
    ];
    let write = |kind: parquet::file::properties::WriterPropertiesBuilder| {
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(kind.build())).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    };
    kinds.map(write).to_vec()
}

/// A number of which the library's writer can add eight without an overflow.
fn number(was: i64, random: &mut Random) -> i64 {
    random.number(was).clamp(i64::MIN / 8, i64::MAX / 8)
}

fn column(chunk: ColumnChunkMetaData, random: &mut Random) -> ColumnChunkMetaData {
    let told = [
        chunk.num_values(),
        chunk.compressed_size(),
        chunk.uncompressed_size(),
        chunk.data_page_offset(),
        chunk.dictionary_page_offset().unwrap_or(4),
    ];
    let which = random.below(told.len());
    let value = number(told[which], random);
    let builder = chunk.into_builder();
    let changed = match which {
        0 => builder.set_num_values(value),
        1 => builder.set_total_compressed_size(value),
        2 => builder.set_total_uncompressed_size(value),
        3 => builder.set_data_page_offset(value),
        _ => builder.set_dictionary_page_offset(Some(value)),
    };
    changed.build().unwrap()
}

/// Contradicts one of its numbers, or those of one column; where `rows`, of all columns alike, so
/// that they agree.
fn group(group: RowGroupMetaData, random: &mut Random) -> RowGroupMetaData {
    let columns = group.columns().to_vec();
    let rows = number(group.num_rows(), random);
    let mut builder = group.into_builder();
    let mode = random.below(3);
    if mode > 0 {
        builder = builder.set_num_rows(rows);
    }
    let at = random.below(columns.len());
    let changed = columns.into_iter().enumerate().map(|(index, chunk)| match mode {
        2 => chunk.into_builder().set_num_values(rows).build().unwrap(),
        0 if index == at => column(chunk, random),
        _ => chunk,
    });
    let changed: Vec<ColumnChunkMetaData> = changed.collect();
    builder.set_column_metadata(changed).build().unwrap()
}

/// The end of a number of the compact protocol.
fn past(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = bytes.get(at..)?;
    rest.iter().position(|byte| byte & 0x80 == 0).map(|last| at + last + 1)
}

fn zigzag(value: i64) -> Vec<u8> {
    let mut left = ((value << 1) ^ (value >> 63)).cast_unsigned();
    let mut bytes = Vec::new();
    loop {
        let low = left.to_le_bytes()[0] & 0x7f;
        left >>= 7;
        bytes.push(if left > 0 { low | 0x80 } else { low });
        if left == 0 {
            return bytes;
        }
    }
}

/// Puts another number into the header of a column's first page: its sizes, or how many values it
/// or its dictionary has. What lies behind moves, and the footer says so.
fn page(bytes: &mut Vec<u8>, metadata: ParquetMetaData, random: &mut Random) -> ParquetMetaData {
    let groups = metadata.row_groups().to_vec();
    let chosen = groups[random.below(groups.len())].columns();
    let (start, _) = chosen[random.below(chosen.len())].byte_range();
    // The type, two sizes, and the number of values, which begins the structure of this type of
    // page.
    let mut at = usize::try_from(start).unwrap() + 1;
    for _ in 0..random.below(3) + 1 {
        let Some(end) = past(bytes, at) else { return metadata };
        at = end + 1;
    }
    // A header of a structure lies between the sizes and the values.
    at += usize::from(bytes.get(at - 1).is_some_and(|field| field & 0x0f == 0x0c));
    let Some(end) = past(bytes, at) else { return metadata };
    let new = zigzag(random.number(600));
    let moved = i64::try_from(new.len()).unwrap() - i64::try_from(end - at).unwrap();
    bytes.splice(at..end, new);
    let edge = i64::try_from(at).unwrap();
    let shift = |offset: i64| if offset > edge { offset + moved } else { offset };
    let place = |chunk: &ColumnChunkMetaData| {
        let (first, length) = chunk.byte_range();
        let own = (first..first + length).contains(&(at as u64));
        let size = chunk.compressed_size() + if own { moved } else { 0 };
        let builder =
            chunk.clone().into_builder().set_data_page_offset(shift(chunk.data_page_offset()));
        let builder = builder.set_dictionary_page_offset(chunk.dictionary_page_offset().map(shift));
        builder.set_total_compressed_size(size).build().unwrap()
    };
    let groups = groups.into_iter().map(|group| {
        let columns = group.columns().iter().map(place).collect();
        group.into_builder().set_column_metadata(columns).build().unwrap()
    });
    let groups = groups.collect();
    metadata.into_builder().set_row_groups(groups).build()
}

/// Puts garbage into the index of a column's pages, or says that it is elsewhere.
fn index(bytes: &mut [u8], metadata: ParquetMetaData, random: &mut Random) -> ParquetMetaData {
    let mut groups = metadata.row_groups().to_vec();
    let chosen = groups.remove(random.below(groups.len()));
    let mut columns = chosen.columns().to_vec();
    let which = random.below(columns.len());
    let (at, length) = (
        columns[which].offset_index_offset().unwrap(),
        columns[which].offset_index_length().unwrap(),
    );
    let builder = columns[which].clone().into_builder();
    let builder = match random.below(4) {
        0 => builder.set_offset_index_offset(Some(random.number(at))),
        1 => {
            let told = random.number(length.into()).clamp(i32::MIN.into(), i32::MAX.into());
            builder.set_offset_index_length(Some(i32::try_from(told).unwrap()))
        }
        _ => {
            let place =
                usize::try_from(at).unwrap()..usize::try_from(at + i64::from(length)).unwrap();
            let garbage = random.mutated(&bytes[place.clone()]);
            bytes[place].iter_mut().zip(garbage).for_each(|(byte, new)| *byte = new);
            builder
        }
    };
    columns[which] = builder.build().unwrap();
    groups.insert(0, chosen.into_builder().set_column_metadata(columns).build().unwrap());
    metadata.into_builder().set_row_groups(groups).build()
}

/// A file whose numbers contradict each other.
fn hostile(sound: &[u8], random: &mut Random) -> Vec<u8> {
    let mut parser = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Skip);
    parser.try_parse(&Bytes::copy_from_slice(sound)).unwrap();
    let mut metadata = parser.finish().unwrap();
    let end = sound.len() - 8;
    let footer = u32::from_le_bytes(sound[end..end + 4].try_into().unwrap()) as usize;
    let mut bytes = sound[..end - footer].to_vec();
    let indexed = metadata.row_group(0).column(0).offset_index_offset().is_some();
    if indexed && random.below(4) > 0 {
        metadata = index(&mut bytes, metadata, random);
        ParquetMetaDataWriter::new(&mut bytes, &metadata).finish().unwrap();
        return bytes;
    }
    let pages = if indexed { 0 } else { random.below(3) };
    for _ in 0..pages {
        metadata = page(&mut bytes, metadata, random);
    }
    if pages == 0 || random.below(3) == 0 {
        let mut groups = metadata.row_groups().to_vec();
        let at = random.below(groups.len());
        let chosen = groups.remove(at);
        groups.insert(at, group(chosen, random));
        metadata = metadata.into_builder().set_row_groups(groups).build();
    }
    ParquetMetaDataWriter::new(&mut bytes, &metadata).finish().unwrap();
    bytes
}

/// In a process of its own: its memory is limited, and it is the one that would be aborted.
#[test]
#[ignore = "started by the next test"]
fn child() {
    hush();
    let files = files();
    let store = Store::open("memory://hostile").unwrap();
    store.write("sound.parquet", files[0].clone().into()).unwrap();
    assert_eq!(read("memory://hostile", &COLUMNS, &mut Random::new(0)).unwrap(), 600);
    confine(ROOM).unwrap();
    cases(|random| {
        println!("\ncase {random:?}");
        let sound = &files[random.below(files.len())];
        store.write("broken.parquet", hostile(sound, random).into()).unwrap();
        if let Err(error) = read("memory://hostile", &COLUMNS, random) {
            let text = error.to_string();
            let told = text.contains("memory://hostile/") || text.contains("column");
            assert!(
                told || matches!(error, Error::Budget { .. }),
                "the error names no file: {text}"
            );
        }
    });
}

#[test]
fn numbers_that_ask_for_terabytes_are_errors_and_never_end_the_process() {
    let begun = apart("hostile_parquet::child").unwrap();
    assert!(begun > 20, "few cases: {begun}");
}

/// A dictionary of one long text, which all rows point at.
#[test]
#[ignore = "started by the next test"]
fn bomb() {
    let text = "x".repeat(1 << 20);
    let rows = usize::try_from(16 * BUDGET).unwrap() / text.len();
    let keys = Int32Array::from_iter_values(std::iter::repeat_n(0, rows));
    let texts = DictionaryArray::new(keys, Arc::new(StringArray::from_iter_values([text])));
    let ids = Int64Array::from_iter_values((0..).take(rows));
    let columns: [(&str, ArrayRef); 2] = [("id", Arc::new(ids)), ("text", Arc::new(texts))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    let bytes = writer.into_inner().unwrap();
    assert!(bytes.len() < 4 << 20, "{}", bytes.len());
    Store::open("memory://bomb").unwrap().write("bomb.parquet", bytes.into()).unwrap();
    confine(12 * BUDGET).unwrap();
    println!("case bomb");
    cases(|random| {
        match read("memory://bomb", &["id", "text"], random) {
            Err(error) => assert!(error.to_string().contains("the byte budget is"), "{error}"),
            // Only numbers, because texts were not requested.
            Ok(found) => assert_eq!(found, rows),
        }
    });
}

#[test]
fn texts_that_a_dictionary_makes_larger_than_the_budget_are_an_error() {
    assert_eq!(apart("hostile_parquet::bomb"), Ok(1));
}

/// A file whose page has `count` texts in `encoding`, and the positions of what it says of their
/// number.
fn delta(encoding: Encoding, count: usize) -> (Vec<u8>, Vec<usize>) {
    let columns: [(&str, ArrayRef); 2] = [
        ("id", Arc::new(Int64Array::from_iter_values((0..).take(count)))),
        ("text", Arc::new(StringArray::from_iter_values((0..count).map(|n| format!("text {n}"))))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder().set_dictionary_enabled(false);
    let properties = properties.set_column_encoding("text".into(), encoding).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    let file = writer.into_inner().unwrap();
    // Blocks of 128 in four parts, and the number of lengths in two bytes.
    let low = u8::try_from(count % 128).unwrap() | 0x80;
    let header = [0x80, 0x01, 0x04, low, u8::try_from(count / 128).unwrap()];
    let found = file.windows(header.len()).enumerate().filter(|(_, bytes)| *bytes == header);
    let found = found.map(|(at, _)| at + 3).collect();
    (file, found)
}

/// A page with two thousand million lengths, of which its header says nothing.
#[test]
#[ignore = "started by the next test"]
fn lengths() {
    let store = Store::open("memory://lengths").unwrap();
    let columns = ["id", "text"];
    let kinds = [(Encoding::DELTA_LENGTH_BYTE_ARRAY, 1), (Encoding::DELTA_BYTE_ARRAY, 2)];
    let mut refused = 0;
    confine(ROOM).unwrap();
    println!("case lengths");
    for (encoding, lists) in kinds {
        let (sound, places) = delta(encoding, 600);
        assert_eq!(places.len(), lists, "{encoding}");
        for at in places {
            let mut broken = sound.clone();
            broken[at..at + 5].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xFF, 0x07]);
            for (file, wrong) in [(&sound, false), (&broken, true)] {
                store.write("0.parquet", file.clone().into()).unwrap();
                for seed in 0..8 {
                    match read("memory://lengths", &columns, &mut Random::new(seed)) {
                        // Only numbers, if texts were not requested.
                        Ok(found) => assert_eq!(found, 600),
                        Err(error) => {
                            assert!(wrong, "{error}");
                            let text = error.to_string();
                            assert!(
                                text.contains("of 600 values claims 2147483647 lengths"),
                                "{text}"
                            );
                            refused += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(refused > 3, "{refused}");
}

#[test]
fn lengths_that_a_page_does_not_have_are_an_error_before_they_take_memory() {
    assert_eq!(apart("hostile_parquet::lengths"), Ok(1));
}
