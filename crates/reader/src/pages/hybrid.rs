// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Parquet's hybrid of run lengths and bit packing, for levels and dictionary indices.

/// Numbers of a hybrid encoding: a run or packed bits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HybridSegment<'a> {
    /// One number, repeated `count` times.
    Run { value: u32, count: usize },
    /// Numbers of a fixed number of bits each, in groups of eight.
    Packed { bytes: &'a [u8], count: usize },
}

/// Iterates over the segments of a hybrid encoding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HybridDecoder<'a> {
    bytes: &'a [u8],
    width: u32,
}

impl<'a> HybridDecoder<'a> {
    /// Reads numbers of `width` bits; `None` if `width` is more than 32.
    pub(crate) fn new(bytes: &'a [u8], width: u32) -> Option<Self> {
        (width <= 32).then_some(Self { bytes, width })
    }

    fn read_varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        // Nine bytes at most: a damaged number must not be shifted out of 64 bits.
        for shift in (0..63).step_by(7) {
            let (byte, rest) = self.bytes.split_first()?;
            self.bytes = rest;
            value |= u64::from(byte & 0x7F) << shift;
            if *byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    /// Returns the next segment, which has at least one number; `None` at the end, or if the bytes
    /// are invalid.
    pub(crate) fn next_segment(&mut self) -> Option<HybridSegment<'a>> {
        loop {
            let header = self.read_varint()?;
            let many = usize::try_from(header >> 1).ok()?;
            // Callers count on at least one number in a segment.
            if many == 0 {
                continue;
            }
            if header & 1 == 1 {
                let count = many.checked_mul(8)?;
                let wanted = many.checked_mul(self.width as usize)?;
                // The last group of a page may be truncated.
                let (bytes, rest) = self.bytes.split_at(wanted.min(self.bytes.len()));
                self.bytes = rest;
                let whole =
                    if self.width == 0 { count } else { bytes.len() * 8 / self.width as usize };
                return (whole > 0)
                    .then_some(HybridSegment::Packed { bytes, count: count.min(whole) });
            }
            let width = self.width.div_ceil(8) as usize;
            let (bytes, rest) = self.bytes.split_at_checked(width)?;
            self.bytes = rest;
            let value =
                bytes.iter().rev().fold(0_u32, |value, byte| (value << 8) | u32::from(*byte));
            return Some(HybridSegment::Run { value, count: many });
        }
    }

    /// Returns the bits of a number.
    pub(crate) fn bit_width(&self) -> u32 {
        self.width
    }
}

/// Unpacks numbers of `width` bits, from number `first` on, until `out` is full. Missing numbers
/// are 0.
pub(crate) fn unpack_bits(bytes: &[u8], width: u32, first: usize, out: &mut [u32]) {
    let mask = if width >= 32 { u64::from(u32::MAX) } else { (1_u64 << width) - 1 };
    let done = if first.is_multiple_of(8) {
        unpack_groups(bytes.get(first / 8 * width as usize..).unwrap_or_default(), width, out)
    } else {
        0
    };
    let mut bit = (first + done) * width as usize;
    for slot in out.iter_mut().skip(done) {
        let (at, shift) = (bit / 8, bit % 8);
        let word = match bytes.get(at..at + 8) {
            Some(eight) => eight.try_into().map_or(0, u64::from_le_bytes),
            None => {
                let left = bytes.get(at..).unwrap_or_default();
                left.iter().rev().fold(0_u64, |word, byte| (word << 8) | u64::from(*byte))
            }
        };
        *slot = low_32_bits(word >> shift & mask);
        bit += width as usize;
    }
}

/// Bytes that are read for a group of eight numbers: up to 32 bytes, and the rest of the last
/// 8-byte load.
const PACKED_GROUP_BYTES: usize = 40;

/// Unpacks groups of eight numbers that start at a byte. Returns the number of unpacked values,
/// fewer than wanted if too few bytes follow.
fn unpack_groups(bytes: &[u8], width: u32, out: &mut [u32]) -> usize {
    macro_rules! by_width {
        ($($width:literal)+) => {
            match width {
                $($width => unpack_fixed_width::<$width>(bytes, out),)+
                _ => 0,
            }
        };
    }
    by_width!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32)
}

/// Like [`unpack_groups`], with a constant width, so that all loads and shifts are constants, too.
fn unpack_fixed_width<const WIDTH: usize>(bytes: &[u8], out: &mut [u32]) -> usize {
    let mask = u64::MAX >> (64 - WIDTH);
    let mut done = 0;
    for slots in out.as_chunks_mut::<8>().0 {
        let Some(group) =
            bytes.get(done / 8 * WIDTH..).and_then(<[u8]>::first_chunk::<PACKED_GROUP_BYTES>)
        else {
            break;
        };
        for (number, slot) in slots.iter_mut().enumerate() {
            let (at, shift) = (number * WIDTH / 8, number * WIDTH % 8);
            let word = group[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            *slot = low_32_bits(word >> shift & mask);
        }
        done += 8;
    }
    done
}

#[expect(clippy::cast_possible_truncation, reason = "masked to 32 bits")]
fn low_32_bits(word: u64) -> u32 {
    word as u32
}

/// Returns the value of the first `count` numbers, if they are a single run.
pub(crate) fn single_run_value(bytes: &[u8], width: u32, count: usize) -> Option<u32> {
    match HybridDecoder::new(bytes, width)?.next_segment()? {
        HybridSegment::Run { value, count: many } if many >= count => Some(value),
        _ => None,
    }
}

/// Decodes `count` numbers into `out`, which is cleared first; returns whether there were enough.
pub(crate) fn decode_levels(bytes: &[u8], width: u32, count: usize, out: &mut Vec<u32>) -> bool {
    out.clear();
    let Some(mut hybrid) = HybridDecoder::new(bytes, width) else { return false };
    while out.len() < count {
        let left = count - out.len();
        match hybrid.next_segment() {
            Some(HybridSegment::Run { value, count }) => {
                out.resize(out.len() + count.min(left), value)
            }
            Some(HybridSegment::Packed { bytes, count }) => {
                let start = out.len();
                out.resize(start + count.min(left), 0);
                unpack_bits(bytes, width, 0, out.get_mut(start..).unwrap_or_default());
            }
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_packed_groups_alternate() {
        // Eight numbers 0..8 of three bits, then a run of ten sevens.
        let bytes = [0x03, 0x88, 0xC6, 0xFA, 0x14, 0x07];
        let mut out = Vec::new();
        assert!(decode_levels(&bytes, 3, 18, &mut out));
        assert_eq!(out[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(out[8..], [7; 10]);
        assert!(!decode_levels(&bytes, 3, 19, &mut out));
        assert_eq!(single_run_value(&bytes[4..], 3, 10), Some(7));
        assert_eq!(single_run_value(&bytes[4..], 3, 11), None);
    }

    #[test]
    fn numbers_of_every_width_are_unpacked_from_anywhere() {
        for width in 1..=32_u32 {
            let mask = if width == 32 { u64::from(u32::MAX) } else { (1_u64 << width) - 1 };
            let numbers: Vec<u64> =
                (0..64_u64).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 7) & mask).collect();
            let mut packed = vec![0_u8; 64 * width as usize / 8];
            for (index, number) in numbers.iter().enumerate() {
                for bit in 0..width as usize {
                    let place = index * width as usize + bit;
                    packed[place / 8] |= u8::from(number >> bit & 1 == 1) << (place % 8);
                }
            }
            for first in [0, 1, 7, 33] {
                let mut out = vec![0; 64 - first];
                unpack_bits(&packed, width, first, &mut out);
                assert!(
                    out.iter().zip(&numbers[first..]).all(|(a, b)| u64::from(*a) == *b),
                    "{width} {first}"
                );
            }
        }
    }

    #[test]
    fn garbage_ends_and_allocates_nothing() {
        let mut out = Vec::new();
        assert!(!decode_levels(&[0xFF; 4], 5, 1000, &mut out));
        assert!(!decode_levels(&[], 5, 1, &mut out));
        assert!(HybridDecoder::new(&[], 33).is_none());
        assert_eq!(single_run_value(&[0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 1], 1, 1000), Some(1));
    }
}
