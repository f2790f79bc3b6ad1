// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decodes the values of one page into a buffer.

use arrow::buffer::MutableBuffer;

use crate::pages::hybrid::{HybridDecoder, HybridSegment, unpack_bits};
use crate::pool::{PlainValue, as_values, as_values_mut, grow_buffer};

/// Number of indices that are unpacked at a time, few enough for the L1 cache.
const INDICES_PER_UNPACK: usize = 512;

/// Stored form of a value, and its conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueStorage {
    /// One bit, decoded to a byte.
    Bits,
    /// Values of this number of bytes, copied unchanged.
    Verbatim(usize),
    /// Four bytes; only this number of low bytes is kept.
    Narrow(usize),
    /// A signed 32-bit number, decoded to 64 bits.
    Widen,
}

impl ValueStorage {
    /// Returns the bytes of a decoded value.
    pub(crate) fn value_width(self) -> usize {
        match self {
            Self::Bits => 1,
            Self::Verbatim(width) | Self::Narrow(width) => width,
            Self::Widen => 8,
        }
    }

    /// Returns the bytes of `count` values in PLAIN encoding.
    pub(crate) fn plain_encoded_size(self, count: usize) -> usize {
        match self {
            Self::Bits => count.div_ceil(8),
            Self::Verbatim(width) => count.saturating_mul(width),
            Self::Narrow(_) | Self::Widen => count.saturating_mul(4),
        }
    }
}

/// Copies PLAIN values, from number `skip` on, until `out` is full; returns whether there were
/// enough.
pub(crate) fn decode_plain(stored: ValueStorage, data: &[u8], skip: usize, out: &mut [u8]) -> bool {
    let count = out.len() / stored.value_width().max(1);
    if let ValueStorage::Bits = stored {
        let Some(last) = (skip + count).checked_sub(1) else { return true };
        if count > 0 && data.len() <= last / 8 {
            return false;
        }
        for (slot, bit) in out.iter_mut().zip(skip..) {
            *slot = data.get(bit / 8).map_or(0, |byte| byte >> (bit % 8) & 1);
        }
        return true;
    }
    let from = stored.plain_encoded_size(skip);
    let Some(data) = data.get(from..from.saturating_add(stored.plain_encoded_size(count))) else {
        return false;
    };
    match stored {
        ValueStorage::Verbatim(_) | ValueStorage::Bits => out.copy_from_slice(data),
        ValueStorage::Narrow(1) => {
            for (slot, value) in out.iter_mut().zip(data.chunks_exact(4)) {
                *slot = value.first().copied().unwrap_or_default();
            }
        }
        ValueStorage::Narrow(width) => {
            for (slot, value) in out.chunks_exact_mut(width).zip(data.chunks_exact(4)) {
                slot.copy_from_slice(value.get(..width).unwrap_or(value));
            }
        }
        ValueStorage::Widen => {
            for (slot, value) in out.chunks_exact_mut(8).zip(data.chunks_exact(4)) {
                let value = i64::from(value.try_into().map_or(0, i32::from_le_bytes));
                slot.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
    true
}

/// Decodes BYTE_STREAM_SPLIT, which stores the first bytes of all values, then the second bytes,
/// and so on. Returns whether there were enough values.
pub(crate) fn decode_byte_stream_split(
    width: usize,
    data: &[u8],
    skip: usize,
    out: &mut [u8],
) -> bool {
    let width = width.max(1);
    let (many, count) = (data.len() / width, out.len() / width);
    if skip + count > many {
        return false;
    }
    for (place, bytes) in data.chunks_exact(many.max(1)).take(width).enumerate() {
        let bytes = bytes.get(skip..).unwrap_or_default();
        for (slot, byte) in out.iter_mut().skip(place).step_by(width).zip(bytes) {
            *slot = *byte;
        }
    }
    true
}

/// Decoded values of a dictionary.
#[derive(Debug, Default)]
pub(crate) struct PageDictionary {
    values: MutableBuffer,
    count: usize,
    width: usize,
}

impl PageDictionary {
    /// Removes all values.
    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// Loads `count` PLAIN values; returns whether there were enough.
    pub(crate) fn load_plain_dictionary(
        &mut self,
        stored: ValueStorage,
        data: &[u8],
        count: usize,
    ) -> bool {
        let bytes = count.saturating_mul(stored.value_width());
        if stored.plain_encoded_size(count) > data.len() {
            return false;
        }
        grow_buffer(&mut self.values, bytes);
        (self.count, self.width) = (count, stored.value_width());
        decode_plain(
            stored,
            data,
            0,
            self.values.as_slice_mut().get_mut(..bytes).unwrap_or_default(),
        )
    }

    /// Returns memory for `count` values that are stored verbatim, for the caller to fill; `None`
    /// for other storage.
    pub(crate) fn reserve_verbatim(
        &mut self,
        stored: ValueStorage,
        count: usize,
        bytes: usize,
    ) -> Option<&mut [u8]> {
        let ValueStorage::Verbatim(width) = stored else { return None };
        if bytes != count.saturating_mul(width) {
            return None;
        }
        grow_buffer(&mut self.values, bytes);
        (self.count, self.width) = (count, width);
        self.values.as_slice_mut().get_mut(..bytes)
    }

    /// Looks up the values of a page, from number `skip` on, until `out` is full; returns whether
    /// there were enough.
    pub(crate) fn look_up_values(&self, page: &[u8], skip: usize, out: &mut [u8]) -> bool {
        let count = out.len() / self.width.max(1);
        let (Some((width, bytes)), from) = (page.split_first(), self.values.as_slice()) else {
            return count == 0;
        };
        let Some(indices) = HybridDecoder::new(bytes, u32::from(*width)) else { return false };
        let (known, some) = (self.count, (skip, count));
        // Values of the widths of numbers are copied faster than slices.
        match self.width {
            1 => {
                copy_indexed_values(indices, some, known, &mut TypedLookupTarget { from, to: out })
            }
            2 => copy_indexed_values(
                indices,
                some,
                known,
                &mut TypedLookupTarget::<u16> { from: as_values(from), to: as_values_mut(out) },
            ),
            4 => copy_indexed_values(
                indices,
                some,
                known,
                &mut TypedLookupTarget::<u32> { from: as_values(from), to: as_values_mut(out) },
            ),
            8 => copy_indexed_values(
                indices,
                some,
                known,
                &mut TypedLookupTarget::<u64> { from: as_values(from), to: as_values_mut(out) },
            ),
            width => copy_indexed_values(
                indices,
                some,
                known,
                &mut WideLookupTarget { from, to: out, width },
            ),
        }
    }
}

/// Target to which looked-up values are written.
trait LookupTarget {
    fn write_repeated(&mut self, at: usize, count: usize, index: usize);
    fn write_indexed(&mut self, at: usize, indices: &[u32]);
}

struct TypedLookupTarget<'a, T> {
    from: &'a [T],
    to: &'a mut [T],
}

impl<T: PlainValue> LookupTarget for TypedLookupTarget<'_, T> {
    fn write_repeated(&mut self, at: usize, count: usize, index: usize) {
        if let (Some(value), Some(to)) = (self.from.get(index), self.to.get_mut(at..at + count)) {
            to.fill(*value);
        }
    }

    #[inline]
    fn write_indexed(&mut self, at: usize, indices: &[u32]) {
        let Some(to) = self.to.get_mut(at..at + indices.len()) else { return };
        for (slot, index) in to.iter_mut().zip(indices) {
            if let Some(value) = self.from.get(*index as usize) {
                *slot = *value;
            }
        }
    }
}

struct WideLookupTarget<'a> {
    from: &'a [u8],
    to: &'a mut [u8],
    width: usize,
}

impl LookupTarget for WideLookupTarget<'_> {
    fn write_repeated(&mut self, at: usize, count: usize, index: usize) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        (at..at + count).for_each(|at| self.write_indexed(at, &[index]));
    }

    fn write_indexed(&mut self, at: usize, indices: &[u32]) {
        let width = self.width;
        let Some(to) = self.to.get_mut(at * width..(at + indices.len()) * width) else { return };
        for (slot, index) in to.chunks_exact_mut(width.max(1)).zip(indices) {
            let from = *index as usize * width;
            if let Some(value) = self.from.get(from..from + width) {
                slot.copy_from_slice(value);
            }
        }
    }
}

/// Reads `count` indices after `skip` others. Returns whether there were enough, and all were below
/// `known`.
fn copy_indexed_values(
    mut indices: HybridDecoder<'_>,
    (mut skip, count): (usize, usize),
    known: usize,
    target: &mut impl LookupTarget,
) -> bool {
    let (width, mut at) = (indices.bit_width(), 0);
    let mut block = [0_u32; INDICES_PER_UNPACK];
    while at < count {
        let Some(piece) = indices.next_segment() else { return false };
        let many = match piece {
            HybridSegment::Run { count, .. } | HybridSegment::Packed { count, .. } => count,
        };
        let first = skip.min(many);
        skip -= first;
        let taken = (many - first).min(count - at);
        match piece {
            HybridSegment::Run { .. } if taken == 0 => {}
            HybridSegment::Run { value, .. } => {
                if value as usize >= known {
                    return false;
                }
                target.write_repeated(at, taken, value as usize);
            }
            HybridSegment::Packed { bytes, .. } => {
                for start in (0..taken).step_by(INDICES_PER_UNPACK) {
                    let Some(some) = block.get_mut(..INDICES_PER_UNPACK.min(taken - start)) else {
                        return false;
                    };
                    unpack_bits(bytes, width, first + start, some);
                    if some.iter().fold(0, |most, index| most.max(*index)) as usize >= known {
                        return false;
                    }
                    target.write_indexed(at + start, some);
                }
            }
        }
        at += taken;
    }
    true
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn plain_values_become_what_is_wanted() {
        let data: Vec<u8> = [1_i32, -2, 300].iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut out = [0; 16];
        assert!(decode_plain(ValueStorage::Widen, &data, 1, &mut out));
        assert_eq!(out[..8], (-2_i64).to_le_bytes());
        assert_eq!(out[8..], 300_i64.to_le_bytes());
        assert!(!decode_plain(ValueStorage::Widen, &data, 2, &mut out));
        let mut out = [0; 4];
        assert!(decode_plain(ValueStorage::Narrow(2), &data, 1, &mut out));
        assert_eq!(out, [0xFE, 0xFF, 0x2C, 0x01]);
        let mut out = [0; 3];
        assert!(decode_plain(ValueStorage::Bits, &[0b1010_0000, 1], 6, &mut out));
        assert_eq!(out, [0, 1, 1]);
        assert!(!decode_plain(ValueStorage::Bits, &[0b1010_0000, 1], 14, &mut out));
    }

    #[test]
    fn bytes_that_are_stored_apart_come_together() {
        let mut out = [0; 4];
        assert!(decode_byte_stream_split(2, &[1, 3, 5, 2, 4, 6], 1, &mut out));
        assert_eq!(out, [3, 4, 5, 6]);
        assert!(!decode_byte_stream_split(2, &[1, 3, 5, 2, 4, 6], 2, &mut out));
    }

    #[test]
    fn indices_past_the_dictionary_are_refused() {
        let mut dictionary = PageDictionary::default();
        let values: Vec<u8> =
            [10_u32, 20, 30].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(!dictionary.load_plain_dictionary(ValueStorage::Verbatim(4), &values, 4));
        assert!(dictionary.load_plain_dictionary(ValueStorage::Verbatim(4), &values, 3));
        let mut out = [0_u32; 6];
        // Two bits each: a run of two 2s, then 0, 1, 2, 0, 1, 2, 0, 0 packed.
        let page = [2, 0x04, 2, 0x03, 0b0010_0100, 0b0000_1001];
        assert!(dictionary.look_up_values(&page, 1, out.as_mut_bytes()));
        assert_eq!(out, [30, 10, 20, 30, 10, 20]);
        assert!(!dictionary.look_up_values(&page, 5, out.as_mut_bytes()));
        assert!(!dictionary.look_up_values(&[2, 0x04, 3], 0, out[..2].as_mut_bytes()));
        let wide: Vec<u8> = (0..9).collect();
        assert!(dictionary.load_plain_dictionary(ValueStorage::Verbatim(3), &wide, 3));
        let mut out = [0; 12];
        assert!(dictionary.look_up_values(&page, 0, &mut out));
        assert_eq!(out, [6, 7, 8, 6, 7, 8, 0, 1, 2, 3, 4, 5]);
    }
}
