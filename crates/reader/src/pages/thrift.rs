// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parser of page headers and offset indexes in Thrift's compact protocol. The library parses them
//! only together with whole pages, but skipping pages needs only the headers.

/// Most nested structures of a page header.
const MAX_STRUCT_DEPTH: u32 = 16;

/// The kind of a page, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// Values to which indices in data pages refer.
    Dictionary,
    /// Levels and values, compressed together.
    Data,
    /// Uncompressed levels, then values.
    DataV2 { definition: usize, repetition: usize, compressed: bool },
    /// A page to skip.
    Other,
}

/// The header of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageHeader {
    pub(crate) kind: PageKind,
    pub(crate) uncompressed: usize,
    pub(crate) compressed: usize,
    pub(crate) crc: Option<u32>,
    /// Entries of the page, including nulls.
    pub(crate) entries: usize,
    pub(crate) encoding: i64,
    pub(crate) definition_encoding: i64,
    pub(crate) repetition_encoding: i64,
}

/// Position of a page, from an offset index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OffsetIndexEntry {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) first_row: u64,
}

/// Reason why bytes are no valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThriftError {
    /// The bytes end too early.
    Truncated,
    /// The bytes are invalid.
    Malformed,
}

type ThriftResult<T> = Result<T, ThriftError>;

/// Reads bytes from start to end.
pub(super) struct ThriftReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// Header of a field: its number, and its type, which is 0 at the end of the structure.
struct ThriftFieldHeader {
    id: i16,
    kind: u8,
}

impl<'a> ThriftReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn read_byte(&mut self) -> ThriftResult<u8> {
        let byte = *self.bytes.get(self.at).ok_or(ThriftError::Truncated)?;
        self.at += 1;
        Ok(byte)
    }

    pub(super) fn read_varint(&mut self) -> ThriftResult<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.read_byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(ThriftError::Malformed)
    }

    pub(super) fn read_zigzag(&mut self) -> ThriftResult<i64> {
        let value = self.read_varint()?;
        Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    /// Reads a 32-bit number. Longer ones are an error here, because the library truncates them and
    /// would read another number.
    fn read_i32(&mut self) -> ThriftResult<i64> {
        self.read_zigzag().and_then(|number| {
            i32::try_from(number).map(i64::from).map_err(|_| ThriftError::Malformed)
        })
    }

    fn read_size(&mut self) -> ThriftResult<usize> {
        usize::try_from(self.read_i32()?).map_err(|_| ThriftError::Malformed)
    }

    fn read_field_header(&mut self, last: i16) -> ThriftResult<ThriftFieldHeader> {
        let byte = self.read_byte()?;
        let (delta, kind) = (i16::from(byte >> 4), byte & 0x0F);
        let id = match (kind, delta) {
            (0, _) => last,
            (_, 0) => i16::try_from(self.read_zigzag()?).map_err(|_| ThriftError::Malformed)?,
            _ => last.checked_add(delta).ok_or(ThriftError::Malformed)?,
        };
        Ok(ThriftFieldHeader { id, kind })
    }

    pub(super) fn skip_bytes(&mut self, count: u64) -> ThriftResult<()> {
        let count = usize::try_from(count).map_err(|_| ThriftError::Malformed)?;
        self.at = self.at.checked_add(count).ok_or(ThriftError::Malformed)?;
        if self.at <= self.bytes.len() { Ok(()) } else { Err(ThriftError::Truncated) }
    }

    fn skip_value(&mut self, kind: u8, depth: u32) -> ThriftResult<()> {
        if depth > MAX_STRUCT_DEPTH {
            return Err(ThriftError::Malformed);
        }
        match kind {
            1 | 2 => Ok(()),
            3 => self.skip_bytes(1),
            4..=6 => self.read_varint().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let count = self.read_varint()?;
                self.skip_bytes(count)
            }
            9 | 10 => {
                let (count, kind) = self.read_list_header()?;
                // In a list, a boolean takes one byte.
                (0..count)
                    .try_for_each(|_| self.skip_value(if kind <= 2 { 3 } else { kind }, depth + 1))
            }
            12 => self.for_each_field(|bytes, field| bytes.skip_value(field.kind, depth + 1)),
            _ => Err(ThriftError::Malformed),
        }
    }

    fn read_list_header(&mut self) -> ThriftResult<(u64, u8)> {
        let byte = self.read_byte()?;
        let count = if byte >> 4 == 15 { self.read_varint()? } else { u64::from(byte >> 4) };
        Ok((count, byte & 0x0F))
    }

    /// Reads the fields of a structure; `read` consumes the value of each.
    fn for_each_field(
        &mut self,
        mut read: impl FnMut(&mut Self, &ThriftFieldHeader) -> ThriftResult<()>,
    ) -> ThriftResult<()> {
        let mut last = 0;
        loop {
            let field = self.read_field_header(last)?;
            if field.kind == 0 {
                return Ok(());
            }
            last = field.id;
            read(self, &field)?;
        }
    }

    /// Reads the integer fields of a structure into `numbers`, indexed by field number. Booleans
    /// become 0 and 1.
    fn read_integer_fields<const N: usize>(
        &mut self,
        numbers: &mut [Option<i64>; N],
    ) -> ThriftResult<()> {
        self.for_each_field(|bytes, field| {
            let slot = usize::try_from(field.id).ok().and_then(|id| numbers.get_mut(id));
            match (field.kind, slot) {
                (4..=6, Some(slot)) => *slot = Some(bytes.read_zigzag()?),
                (1 | 2, Some(slot)) => *slot = Some(i64::from(field.kind == 1)),
                (kind, _) => bytes.skip_value(kind, 0)?,
            }
            Ok(())
        })
    }
}

fn to_count(number: Option<i64>) -> ThriftResult<usize> {
    number.and_then(|number| usize::try_from(number).ok()).ok_or(ThriftError::Malformed)
}

/// Reads the header of a page; returns the header and its length.
pub(crate) fn read_page_header(bytes: &[u8]) -> ThriftResult<(PageHeader, usize)> {
    let mut bytes = ThriftReader::new(bytes);
    let (mut kind, mut uncompressed, mut compressed, mut crc) = (None, None, None, None);
    let (mut v1, mut dictionary, mut v2) = ([None; 5], [None; 3], [None; 8]);
    bytes.for_each_field(|bytes, field| {
        match (field.id, field.kind) {
            (1, 5) => kind = Some(bytes.read_i32()?),
            (2, 5) => uncompressed = Some(bytes.read_size()?),
            (3, 5) => compressed = Some(bytes.read_size()?),
            (4, 5) => crc = Some(bytes.read_zigzag()?),
            (5, 12) => bytes.read_integer_fields(&mut v1)?,
            (7, 12) => bytes.read_integer_fields(&mut dictionary)?,
            (8, 12) => bytes.read_integer_fields(&mut v2)?,
            (_, kind) => bytes.skip_value(kind, 0)?,
        }
        Ok(())
    })?;
    // All fields have 32 bits; see `read_i32`.
    if v1
        .iter()
        .chain(&dictionary)
        .chain(&v2)
        .flatten()
        .any(|number| i32::try_from(*number).is_err())
    {
        return Err(ThriftError::Malformed);
    }
    let [_, v1_values, v1_encoding, v1_definition, v1_repetition] = v1;
    let [_, dictionary_values, dictionary_encoding] = dictionary;
    let [_, v2_values, _, _, v2_encoding, v2_definition, v2_repetition, v2_compressed] = v2;
    let mut header = PageHeader {
        kind: PageKind::Other,
        uncompressed: uncompressed.ok_or(ThriftError::Malformed)?,
        compressed: compressed.ok_or(ThriftError::Malformed)?,
        crc: crc.map(|crc| u32::try_from(crc & 0xFFFF_FFFF).unwrap_or_default()),
        entries: 0,
        encoding: 0,
        definition_encoding: 3,
        repetition_encoding: 3,
    };
    match kind.ok_or(ThriftError::Malformed)? {
        0 => {
            header.kind = PageKind::Data;
            header.entries = to_count(v1_values)?;
            header.encoding = v1_encoding.ok_or(ThriftError::Malformed)?;
            header.definition_encoding = v1_definition.ok_or(ThriftError::Malformed)?;
            header.repetition_encoding = v1_repetition.ok_or(ThriftError::Malformed)?;
        }
        2 => {
            header.kind = PageKind::Dictionary;
            header.entries = to_count(dictionary_values)?;
            header.encoding = dictionary_encoding.ok_or(ThriftError::Malformed)?;
        }
        3 => {
            let (definition, repetition) = (to_count(v2_definition)?, to_count(v2_repetition)?);
            let compressed = v2_compressed.is_none_or(|flag| flag == 1);
            header.kind = PageKind::DataV2 { definition, repetition, compressed };
            header.entries = to_count(v2_values)?;
            header.encoding = v2_encoding.ok_or(ThriftError::Malformed)?;
        }
        _ => {}
    }
    Ok((header, bytes.at))
}

/// Reads an offset index.
pub(crate) fn read_offset_index(bytes: &[u8]) -> ThriftResult<Vec<OffsetIndexEntry>> {
    let mut bytes = ThriftReader::new(bytes);
    let mut found = Vec::new();
    bytes.for_each_field(|bytes, field| {
        if (field.id, field.kind) != (1, 9) {
            return bytes.skip_value(field.kind, 0);
        }
        let (count, _) = bytes.read_list_header()?;
        for _ in 0..count {
            let mut numbers = [None; 4];
            bytes.read_integer_fields(&mut numbers)?;
            let number = |index: usize| {
                numbers[index]
                    .and_then(|number| u64::try_from(number).ok())
                    .ok_or(ThriftError::Malformed)
            };
            found.push(OffsetIndexEntry {
                offset: number(1)?,
                length: number(2)?,
                first_row: number(3)?,
            });
        }
        Ok(())
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// type 0, uncompressed 100, compressed 50, crc -2, data page header with 10 values,
    /// RLE_DICTIONARY, RLE, RLE.
    const V1: [u8; 22] = [
        0x15, 0x00, 0x15, 0xC8, 0x01, 0x15, 0x64, 0x15, 0x03, 0x1C, 0x15, 0x14, 0x15, 0x10, 0x15,
        0x06, 0x15, 0x06, 0x00, 0x00, 0xAA, 0xBB,
    ];

    #[test]
    fn a_header_is_read_and_its_length_told() {
        let (header, length) = read_page_header(&V1).unwrap();
        assert_eq!(length, 20);
        assert_eq!((header.kind, header.entries), (PageKind::Data, 10));
        assert_eq!(
            (header.uncompressed, header.compressed, header.crc),
            (100, 50, Some(0xFFFF_FFFE))
        );
        assert_eq!(
            (header.encoding, header.definition_encoding, header.repetition_encoding),
            (8, 3, 3)
        );
    }

    #[test]
    fn a_header_that_ends_early_asks_for_more() {
        for end in 0..20 {
            assert_eq!(read_page_header(&V1[..end]), Err(ThriftError::Truncated), "{end}");
        }
    }

    #[test]
    fn garbage_is_no_header() {
        assert_eq!(read_page_header(&[0xFF; 64]), Err(ThriftError::Malformed));
        assert_eq!(read_page_header(&[0x00]), Err(ThriftError::Malformed));
        let negative = [0x15, 0x00, 0x15, 0x01, 0x15, 0x64, 0x00];
        assert_eq!(read_page_header(&negative), Err(ThriftError::Malformed));
    }

    #[test]
    fn numbers_that_the_library_would_cut_off_are_no_header() {
        let encoding = 13;
        assert_eq!(V1[encoding], 0x10);
        // RLE_DICTIONARY (8) and 2^32 more.
        let long = [&V1[..encoding], &[0x90, 0x80, 0x80, 0x80, 0x20], &V1[encoding + 1..]].concat();
        assert_eq!(read_page_header(&long), Err(ThriftError::Malformed));
        // The type of the page, whose field is 1 and 65536 more.
        let field = [&[0x05, 0x82, 0x80, 0x08], &V1[1..]].concat();
        assert_eq!(read_page_header(&field), Err(ThriftError::Malformed));
    }

    #[test]
    fn an_offset_index_is_read() {
        let index = [
            0x19, 0x2C, 0x16, 0x08, 0x15, 0x14, 0x16, 0x00, 0x00, 0x16, 0x1C, 0x15, 0x14, 0x16,
            0x0A, 0x00, 0x00,
        ];
        let found = read_offset_index(&index).unwrap();
        assert_eq!(found[0], OffsetIndexEntry { offset: 4, length: 10, first_row: 0 });
        assert_eq!(found[1], OffsetIndexEntry { offset: 14, length: 10, first_row: 5 });
        assert_eq!(read_offset_index(&index[..8]), Err(ThriftError::Truncated));
    }
}
