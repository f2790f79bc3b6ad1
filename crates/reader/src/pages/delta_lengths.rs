// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Checks the lengths at the start of pages in `DELTA_LENGTH_BYTE_ARRAY` and `DELTA_BYTE_ARRAY`.
//! The library allocates memory for the claimed number of lengths before it reads one. A block of
//! equal lengths takes only a few bytes, so the size of a page does not limit their number.

use bytes::Bytes as Shared;
use parquet::basic::Encoding;
use parquet::column::page::{Page, PageReader};
use parquet::errors::{ParquetError, Result};

use super::thrift::{ThriftError, ThriftReader};

/// Bits of a byte, and bytes of the length before RLE levels.
const BITS_PER_BYTE: usize = 8;
const LEVEL_LENGTH_BYTES: usize = 4;

/// Checks the pages of a chunk. Its levels are at most `levels` (definition, repetition), and the
/// lengths of a page may take `most` bytes.
///
/// # Errors
/// A page that cannot be decompressed, or that claims more lengths than its entries or the byte
/// limit allow.
pub(crate) fn check_claimed_lengths(
    pages: &mut dyn PageReader,
    levels: (i16, i16),
    most: usize,
) -> Result<()> {
    let wrong = |what: String| Err(ParquetError::General(what));
    while let Some(page) = pages.get_next_page()? {
        let lists = match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
            Encoding::DELTA_BYTE_ARRAY => 2,
            _ => continue,
        };
        let entries = page.num_values() as usize;
        if entries.saturating_mul(lists * size_of::<i32>()) > most {
            return wrong(format!("a page claims {entries} lengths, the byte budget is {most}"));
        }
        let Some(values) = page_bytes_after_levels(&page, levels) else {
            return wrong("the levels of a page are longer than the page".to_owned());
        };
        let mut bytes = ThriftReader::new(&values);
        for _ in 0..lists {
            match skip_delta_lengths(&mut bytes, entries as u64) {
                Ok(claimed) if claimed > entries as u64 => {
                    return wrong(format!("a page of {entries} values claims {claimed} lengths"));
                }
                Ok(_) => {}
                Err(_) => return wrong("the lengths of a page are torn".to_owned()),
            }
        }
    }
    Ok(())
}

/// Returns the bytes of a page after its levels.
fn page_bytes_after_levels(page: &Page, (definition, repetition): (i16, i16)) -> Option<Shared> {
    let from = match page {
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            (*def_levels_byte_len as usize).checked_add(*rep_levels_byte_len as usize)?
        }
        Page::DataPage { buf, num_values, def_level_encoding, rep_level_encoding, .. } => {
            let mut at = 0_usize;
            for (most, encoding) in
                [(repetition, rep_level_encoding), (definition, def_level_encoding)]
            {
                let taken = match (most, encoding) {
                    (..=0, _) => 0,
                    (_, Encoding::RLE) => {
                        let length = buf.get(at..)?.first_chunk::<LEVEL_LENGTH_BYTES>()?;
                        LEVEL_LENGTH_BYTES.checked_add(u32::from_le_bytes(*length) as usize)?
                    }
                    _ => {
                        let width = (i16::BITS - most.leading_zeros()) as usize;
                        (*num_values as usize).checked_mul(width)?.div_ceil(BITS_PER_BYTE)
                    }
                };
                at = at.checked_add(taken)?;
            }
            at
        }
        Page::DictionaryPage { .. } => 0,
    };
    let whole = page.buffer();
    (from <= whole.len()).then(|| whole.slice(from..))
}

/// Skips a list of lengths in `DELTA_BINARY_PACKED` and returns the claimed number. If it is more
/// than `most`, stops at the header. Source: section "Delta Encoding" of the Parquet format.
fn skip_delta_lengths(
    bytes: &mut ThriftReader<'_>,
    most: u64,
) -> std::result::Result<u64, ThriftError> {
    let (block, parts, claimed) =
        (bytes.read_varint()?, bytes.read_varint()?, bytes.read_varint()?);
    bytes.read_zigzag()?;
    if claimed > most {
        return Ok(claimed);
    }
    let each = block.checked_div(parts).filter(|each| *each > 0).ok_or(ThriftError::Malformed)?;
    let mut left = claimed.saturating_sub(1);
    while left > 0 {
        bytes.read_zigzag()?;
        let mut size = 0_u64;
        for _ in 0..parts {
            let width = u64::from(bytes.read_byte()?);
            // Parts after the last value are not stored, even if their width is not 0.
            if left > 0 {
                size = width
                    .checked_mul(each)
                    .and_then(|bits| size.checked_add(bits / BITS_PER_BYTE as u64))
                    .ok_or(ThriftError::Malformed)?;
            }
            left = left.saturating_sub(each);
        }
        bytes.skip_bytes(size)?;
    }
    Ok(claimed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;
    use parquet::basic::Compression;
    use parquet::file::properties::{WriterProperties, WriterVersion};
    use parquet::file::reader::FileReader;
    use parquet::file::serialized_reader::SerializedFileReader;

    use super::*;

    const ROWS: usize = 1000;
    const MOST: usize = 1 << 20;

    fn written(
        encoding: Encoding,
        version: WriterVersion,
        compression: Compression,
        nulls: bool,
    ) -> Vec<u8> {
        let text = |row: usize| {
            (!nulls || !row.is_multiple_of(3)).then(|| "y".repeat(row % 211) + &row.to_string())
        };
        let column: ArrayRef = Arc::new(StringArray::from_iter((0..ROWS).map(text)));
        let batch = RecordBatch::try_from_iter_with_nullable([("a", column, nulls)]).unwrap();
        let properties = WriterProperties::builder()
            .set_writer_version(version)
            .set_compression(compression)
            .set_dictionary_enabled(false)
            .set_encoding(encoding)
            .set_data_page_row_count_limit(700)
            .set_write_batch_size(10);
        let mut writer =
            ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build())).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    }

    fn checked(file: Vec<u8>, most: usize) -> std::result::Result<(), String> {
        let file = SerializedFileReader::new(Shared::from(file)).unwrap();
        let column = file.metadata().file_metadata().schema_descr().column(0);
        let levels = (column.max_def_level(), column.max_rep_level());
        let group = file.get_row_group(0).unwrap();
        let mut pages = group.get_column_page_reader(0).unwrap();
        check_claimed_lengths(pages.as_mut(), levels, most).map_err(|error| error.to_string())
    }

    const ENCODINGS: [Encoding; 2] =
        [Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY];

    #[test]
    fn sound_pages_pass() {
        let zstd = Compression::ZSTD(Default::default());
        for encoding in ENCODINGS {
            for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
                for compression in [Compression::UNCOMPRESSED, zstd] {
                    for nulls in [false, true] {
                        let file = written(encoding, version, compression, nulls);
                        assert_eq!(
                            checked(file, MOST),
                            Ok(()),
                            "{encoding} {version:?} {compression} {nulls}"
                        );
                    }
                }
            }
        }
    }

    /// Positions of lists of `count` lengths, by their headers: blocks of 128 in four parts.
    fn lists(file: &[u8], count: [u8; 2]) -> Vec<usize> {
        let header = [0x80, 0x01, 0x04, count[0], count[1]];
        file.windows(header.len())
            .enumerate()
            .filter(|(_, found)| *found == header)
            .map(|(at, _)| at + 3)
            .collect()
    }

    #[test]
    fn lengths_without_entries_are_refused() {
        for (encoding, expected) in ENCODINGS.into_iter().zip([1, 2]) {
            let file =
                written(encoding, WriterVersion::PARQUET_1_0, Compression::UNCOMPRESSED, true);
            // 700 entries; every third one, from the first on, is null: 466 values.
            let found = lists(&file, [0xD2, 0x03]);
            assert_eq!(found.len(), expected, "{encoding}");
            for at in found {
                let mut file = file.clone();
                file[at..at + 5].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xFF, 0x07]);
                assert_eq!(
                    checked(file, MOST).unwrap_err(),
                    "Parquet error: a page of 700 values claims 2147483647 lengths"
                );
            }
        }
    }

    #[test]
    fn lengths_beyond_the_budget_are_refused() {
        for (encoding, lists) in ENCODINGS.into_iter().zip([1, 2]) {
            let file =
                written(encoding, WriterVersion::PARQUET_2_0, Compression::UNCOMPRESSED, false);
            assert_eq!(checked(file.clone(), 700 * 4 * lists), Ok(()));
            let error = checked(file, 700 * 4 * lists - 1).unwrap_err();
            assert!(error.contains("a page claims 700 lengths, the byte budget is"), "{error}");
        }
    }

    #[test]
    fn torn_lengths_are_refused() {
        let blocks = |bytes: &[u8]| skip_delta_lengths(&mut ThriftReader::new(bytes), 300);
        // 300 lengths of 7: three blocks, all parts of width 0.
        let block = [0x00, 0x00, 0x00, 0x00, 0x00];
        let header = [0x80, 0x01, 0x04, 0xAC, 0x02, 0x0E];
        let sound = [&header[..], &block, &block, &block].concat();
        assert_eq!(blocks(&sound), Ok(300));
        for end in 0..sound.len() {
            assert_eq!(blocks(&sound[..end]), Err(ThriftError::Truncated), "{end}");
        }
        // Blocks of no values would never end.
        assert_eq!(blocks(&[0x00, 0x04, 0xAC, 0x02, 0x0E, 0x00]), Err(ThriftError::Malformed));
        assert_eq!(blocks(&[0x80, 0x01, 0x00, 0xAC, 0x02, 0x0E]), Err(ThriftError::Malformed));
        // One length is in the header, however wide its parts would be.
        assert_eq!(blocks(&[0x80, 0x01, 0x04, 0x01, 0x0E]), Ok(1));
    }
}
