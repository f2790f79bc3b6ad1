// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Page headers and offset indexes, in Thrift's compact protocol. The library reads them only
//! together with whole pages; to skip pages, the headers alone are needed.

/// Structures deeper than this are no page header.
const DEEP: u32 = 16;

/// The kind of a page, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// Values that data pages point at.
    Dictionary,
    /// Levels and values, compressed together.
    Data,
    /// Levels, not compressed, and values.
    DataV2 { definition: usize, repetition: usize, compressed: bool },
    /// To be skipped.
    Other,
}

/// The header of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageHeader {
    pub(crate) kind: PageKind,
    pub(crate) uncompressed: usize,
    pub(crate) compressed: usize,
    pub(crate) crc: Option<u32>,
    /// Entries of the page: values, and nulls.
    pub(crate) entries: usize,
    pub(crate) encoding: i64,
    pub(crate) definition_encoding: i64,
    pub(crate) repetition_encoding: i64,
}

/// The place of a page, in an offset index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) first_row: u64,
}

/// The reason why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// They end too early.
    Short,
    /// They cannot be.
    Garbage,
}

type Read<T> = Result<T, Wrong>;

/// Bytes that are read from the start to the end.
pub(super) struct Bytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// A field's header: its number and its type, 0 at the end of the structure.
struct Field {
    id: i16,
    kind: u8,
}

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn byte(&mut self) -> Read<u8> {
        let byte = *self.bytes.get(self.at).ok_or(Wrong::Short)?;
        self.at += 1;
        Ok(byte)
    }

    pub(super) fn varint(&mut self) -> Read<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Wrong::Garbage)
    }

    pub(super) fn integer(&mut self) -> Read<i64> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    /// Reads a number of 32 bits. The library cuts longer ones off, and so would read another
    /// number.
    fn short(&mut self) -> Read<i64> {
        self.integer()
            .and_then(|number| i32::try_from(number).map(i64::from).map_err(|_| Wrong::Garbage))
    }

    fn size(&mut self) -> Read<usize> {
        usize::try_from(self.short()?).map_err(|_| Wrong::Garbage)
    }

    fn field(&mut self, last: i16) -> Read<Field> {
        let byte = self.byte()?;
        let (delta, kind) = (i16::from(byte >> 4), byte & 0x0F);
        let id = match (kind, delta) {
            (0, _) => last,
            (_, 0) => i16::try_from(self.integer()?).map_err(|_| Wrong::Garbage)?,
            _ => last.checked_add(delta).ok_or(Wrong::Garbage)?,
        };
        Ok(Field { id, kind })
    }

    pub(super) fn skip_bytes(&mut self, count: u64) -> Read<()> {
        let count = usize::try_from(count).map_err(|_| Wrong::Garbage)?;
        self.at = self.at.checked_add(count).ok_or(Wrong::Garbage)?;
        if self.at <= self.bytes.len() { Ok(()) } else { Err(Wrong::Short) }
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Read<()> {
        if depth > DEEP {
            return Err(Wrong::Garbage);
        }
        match kind {
            1 | 2 => Ok(()),
            3 => self.skip_bytes(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let count = self.varint()?;
                self.skip_bytes(count)
            }
            9 | 10 => {
                let (count, kind) = self.list()?;
                // Booleans take a byte each in a list.
                (0..count).try_for_each(|_| self.skip(if kind <= 2 { 3 } else { kind }, depth + 1))
            }
            12 => self.each(|bytes, field| bytes.skip(field.kind, depth + 1)),
            _ => Err(Wrong::Garbage),
        }
    }

    fn list(&mut self) -> Read<(u64, u8)> {
        let byte = self.byte()?;
        let count = if byte >> 4 == 15 { self.varint()? } else { u64::from(byte >> 4) };
        Ok((count, byte & 0x0F))
    }

    /// Reads the fields of a structure; `read` takes the value of each.
    fn each(&mut self, mut read: impl FnMut(&mut Self, &Field) -> Read<()>) -> Read<()> {
        let mut last = 0;
        loop {
            let field = self.field(last)?;
            if field.kind == 0 {
                return Ok(());
            }
            last = field.id;
            read(self, &field)?;
        }
    }

    /// Reads the integer fields of a structure into `numbers`, by their numbers; booleans as 0
    /// and 1.
    fn numbers<const N: usize>(&mut self, numbers: &mut [Option<i64>; N]) -> Read<()> {
        self.each(|bytes, field| {
            let slot = usize::try_from(field.id).ok().and_then(|id| numbers.get_mut(id));
            match (field.kind, slot) {
                (4..=6, Some(slot)) => *slot = Some(bytes.integer()?),
                (1 | 2, Some(slot)) => *slot = Some(i64::from(field.kind == 1)),
                (kind, _) => bytes.skip(kind, 0)?,
            }
            Ok(())
        })
    }
}

fn count(number: Option<i64>) -> Read<usize> {
    number.and_then(|number| usize::try_from(number).ok()).ok_or(Wrong::Garbage)
}

/// Reads the header of a page; returns its length, too.
pub(crate) fn page_header(bytes: &[u8]) -> Read<(PageHeader, usize)> {
    let mut bytes = Bytes::new(bytes);
    let (mut kind, mut uncompressed, mut compressed, mut crc) = (None, None, None, None);
    let (mut v1, mut dictionary, mut v2) = ([None; 5], [None; 3], [None; 8]);
    bytes.each(|bytes, field| {
        match (field.id, field.kind) {
            (1, 5) => kind = Some(bytes.short()?),
            (2, 5) => uncompressed = Some(bytes.size()?),
            (3, 5) => compressed = Some(bytes.size()?),
            (4, 5) => crc = Some(bytes.integer()?),
            (5, 12) => bytes.numbers(&mut v1)?,
            (7, 12) => bytes.numbers(&mut dictionary)?,
            (8, 12) => bytes.numbers(&mut v2)?,
            (_, kind) => bytes.skip(kind, 0)?,
        }
        Ok(())
    })?;
    // All of them have 32 bits; see `short`.
    if v1
        .iter()
        .chain(&dictionary)
        .chain(&v2)
        .flatten()
        .any(|number| i32::try_from(*number).is_err())
    {
        return Err(Wrong::Garbage);
    }
    let [_, v1_values, v1_encoding, v1_definition, v1_repetition] = v1;
    let [_, dictionary_values, dictionary_encoding] = dictionary;
    let [_, v2_values, _, _, v2_encoding, v2_definition, v2_repetition, v2_compressed] = v2;
    let mut header = PageHeader {
        kind: PageKind::Other,
        uncompressed: uncompressed.ok_or(Wrong::Garbage)?,
        compressed: compressed.ok_or(Wrong::Garbage)?,
        crc: crc.map(|crc| u32::try_from(crc & 0xFFFF_FFFF).unwrap_or_default()),
        entries: 0,
        encoding: 0,
        definition_encoding: 3,
        repetition_encoding: 3,
    };
    match kind.ok_or(Wrong::Garbage)? {
        0 => {
            header.kind = PageKind::Data;
            header.entries = count(v1_values)?;
            header.encoding = v1_encoding.ok_or(Wrong::Garbage)?;
            header.definition_encoding = v1_definition.ok_or(Wrong::Garbage)?;
            header.repetition_encoding = v1_repetition.ok_or(Wrong::Garbage)?;
        }
        2 => {
            header.kind = PageKind::Dictionary;
            header.entries = count(dictionary_values)?;
            header.encoding = dictionary_encoding.ok_or(Wrong::Garbage)?;
        }
        3 => {
            let (definition, repetition) = (count(v2_definition)?, count(v2_repetition)?);
            let compressed = v2_compressed.is_none_or(|flag| flag == 1);
            header.kind = PageKind::DataV2 { definition, repetition, compressed };
            header.entries = count(v2_values)?;
            header.encoding = v2_encoding.ok_or(Wrong::Garbage)?;
        }
        _ => {}
    }
    Ok((header, bytes.at))
}

/// Reads an offset index.
pub(crate) fn offset_index(bytes: &[u8]) -> Read<Vec<Location>> {
    let mut bytes = Bytes::new(bytes);
    let mut found = Vec::new();
    bytes.each(|bytes, field| {
        if (field.id, field.kind) != (1, 9) {
            return bytes.skip(field.kind, 0);
        }
        let (count, _) = bytes.list()?;
        for _ in 0..count {
            let mut numbers = [None; 4];
            bytes.numbers(&mut numbers)?;
            let number = |index: usize| {
                numbers[index].and_then(|number| u64::try_from(number).ok()).ok_or(Wrong::Garbage)
            };
            found.push(Location { offset: number(1)?, length: number(2)?, first_row: number(3)? });
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
        let (header, length) = page_header(&V1).unwrap();
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
            assert_eq!(page_header(&V1[..end]), Err(Wrong::Short), "{end}");
        }
    }

    #[test]
    fn garbage_is_no_header() {
        assert_eq!(page_header(&[0xFF; 64]), Err(Wrong::Garbage));
        assert_eq!(page_header(&[0x00]), Err(Wrong::Garbage));
        let negative = [0x15, 0x00, 0x15, 0x01, 0x15, 0x64, 0x00];
        assert_eq!(page_header(&negative), Err(Wrong::Garbage));
    }

    #[test]
    fn numbers_that_the_library_would_cut_off_are_no_header() {
        let encoding = 13;
        assert_eq!(V1[encoding], 0x10);
        // RLE_DICTIONARY (8) and 2^32 more.
        let long = [&V1[..encoding], &[0x90, 0x80, 0x80, 0x80, 0x20], &V1[encoding + 1..]].concat();
        assert_eq!(page_header(&long), Err(Wrong::Garbage));
        // The type of the page, whose field is 1 and 65536 more.
        let field = [&[0x05, 0x82, 0x80, 0x08], &V1[1..]].concat();
        assert_eq!(page_header(&field), Err(Wrong::Garbage));
    }

    #[test]
    fn an_offset_index_is_read() {
        let index = [
            0x19, 0x2C, 0x16, 0x08, 0x15, 0x14, 0x16, 0x00, 0x00, 0x16, 0x1C, 0x15, 0x14, 0x16,
            0x0A, 0x00, 0x00,
        ];
        let found = offset_index(&index).unwrap();
        assert_eq!(found[0], Location { offset: 4, length: 10, first_row: 0 });
        assert_eq!(found[1], Location { offset: 14, length: 10, first_row: 5 });
        assert_eq!(offset_index(&index[..8]), Err(Wrong::Short));
    }
}
