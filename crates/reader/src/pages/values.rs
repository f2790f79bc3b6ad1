// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The values of one page, written where they belong.

use arrow::buffer::MutableBuffer;

use crate::pages::hybrid::{Hybrid, Piece, unpack};
use crate::pool::{Value, room, typed, typed_mut};

/// Indices that are unpacked at a time: they stay in the first cache.
const BLOCK: usize = 512;

/// The storage of values, and their type after decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// A bit, which becomes a byte.
    Bits,
    /// So many bytes, taken as they are.
    Same(usize),
    /// Four bytes, of which the lowest are kept: this many.
    Narrow(usize),
    /// A signed number of four bytes, which becomes one of eight.
    Widen,
}

impl Stored {
    /// Bytes of a value in memory.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Bits => 1,
            Self::Same(width) | Self::Narrow(width) => width,
            Self::Widen => 8,
        }
    }

    /// Bytes that `count` values take in a page, when they are plain.
    pub(crate) fn plain_bytes(self, count: usize) -> usize {
        match self {
            Self::Bits => count.div_ceil(8),
            Self::Same(width) => count.saturating_mul(width),
            Self::Narrow(_) | Self::Widen => count.saturating_mul(4),
        }
    }
}

/// Copies plain values from number `skip` on to `out` until it is full; whether there were enough.
pub(crate) fn plain(stored: Stored, data: &[u8], skip: usize, out: &mut [u8]) -> bool {
    let count = out.len() / stored.width().max(1);
    if let Stored::Bits = stored {
        let Some(last) = (skip + count).checked_sub(1) else { return true };
        if count > 0 && data.len() <= last / 8 {
            return false;
        }
        for (slot, bit) in out.iter_mut().zip(skip..) {
            *slot = data.get(bit / 8).map_or(0, |byte| byte >> (bit % 8) & 1);
        }
        return true;
    }
    let from = stored.plain_bytes(skip);
    let Some(data) = data.get(from..from.saturating_add(stored.plain_bytes(count))) else {
        return false;
    };
    match stored {
        Stored::Same(_) | Stored::Bits => out.copy_from_slice(data),
        Stored::Narrow(1) => {
            for (slot, value) in out.iter_mut().zip(data.chunks_exact(4)) {
                *slot = value.first().copied().unwrap_or_default();
            }
        }
        Stored::Narrow(width) => {
            for (slot, value) in out.chunks_exact_mut(width).zip(data.chunks_exact(4)) {
                slot.copy_from_slice(value.get(..width).unwrap_or(value));
            }
        }
        Stored::Widen => {
            for (slot, value) in out.chunks_exact_mut(8).zip(data.chunks_exact(4)) {
                let value = i64::from(value.try_into().map_or(0, i32::from_le_bytes));
                slot.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
    true
}

/// Puts values together whose bytes are stored apart: first all lowest bytes, then all second ones,
/// and so on.
pub(crate) fn split(width: usize, data: &[u8], skip: usize, out: &mut [u8]) -> bool {
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

/// Values of a dictionary, ready to be copied.
#[derive(Debug, Default)]
pub(crate) struct Dictionary {
    values: MutableBuffer,
    count: usize,
    width: usize,
}

impl Dictionary {
    /// No values.
    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// Takes over `count` plain values; whether there were so many.
    pub(crate) fn fill(&mut self, stored: Stored, data: &[u8], count: usize) -> bool {
        let bytes = count.saturating_mul(stored.width());
        if stored.plain_bytes(count) > data.len() {
            return false;
        }
        room(&mut self.values, bytes);
        (self.count, self.width) = (count, stored.width());
        plain(stored, data, 0, self.values.as_slice_mut().get_mut(..bytes).unwrap_or_default())
    }

    /// Memory for `count` values that are stored as they are taken, to be filled by the caller:
    /// `None` for others.
    pub(crate) fn place(
        &mut self,
        stored: Stored,
        count: usize,
        bytes: usize,
    ) -> Option<&mut [u8]> {
        let Stored::Same(width) = stored else { return None };
        if bytes != count.saturating_mul(width) {
            return None;
        }
        room(&mut self.values, bytes);
        (self.count, self.width) = (count, width);
        self.values.as_slice_mut().get_mut(..bytes)
    }

    /// Looks up the values of a page from number `skip` on, until `out` is full; whether there were
    /// enough.
    pub(crate) fn look_up(&self, page: &[u8], skip: usize, out: &mut [u8]) -> bool {
        let count = out.len() / self.width.max(1);
        let (Some((width, bytes)), from) = (page.split_first(), self.values.as_slice()) else {
            return count == 0;
        };
        let Some(indices) = Hybrid::new(bytes, u32::from(*width)) else { return false };
        let (known, some) = (self.count, (skip, count));
        match self.width {
            1 => walk(indices, some, known, &mut Typed { from, to: out }),
            2 => walk(
                indices,
                some,
                known,
                &mut Typed::<u16> { from: typed(from), to: typed_mut(out) },
            ),
            4 => walk(
                indices,
                some,
                known,
                &mut Typed::<u32> { from: typed(from), to: typed_mut(out) },
            ),
            8 => walk(
                indices,
                some,
                known,
                &mut Typed::<u64> { from: typed(from), to: typed_mut(out) },
            ),
            width => walk(indices, some, known, &mut Wide { from, to: out, width }),
        }
    }
}

/// The target of looked-up values, in order.
trait Target {
    fn same(&mut self, at: usize, count: usize, index: usize);
    fn each(&mut self, at: usize, indices: &[u32]);
}

struct Typed<'a, T> {
    from: &'a [T],
    to: &'a mut [T],
}

impl<T: Value> Target for Typed<'_, T> {
    fn same(&mut self, at: usize, count: usize, index: usize) {
        if let (Some(value), Some(to)) = (self.from.get(index), self.to.get_mut(at..at + count)) {
            to.fill(*value);
        }
    }

    #[inline]
    fn each(&mut self, at: usize, indices: &[u32]) {
        let Some(to) = self.to.get_mut(at..at + indices.len()) else { return };
        for (slot, index) in to.iter_mut().zip(indices) {
            if let Some(value) = self.from.get(*index as usize) {
                *slot = *value;
            }
        }
    }
}

struct Wide<'a> {
    from: &'a [u8],
    to: &'a mut [u8],
    width: usize,
}

impl Target for Wide<'_> {
    fn same(&mut self, at: usize, count: usize, index: usize) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        (at..at + count).for_each(|at| self.each(at, &[index]));
    }

    fn each(&mut self, at: usize, indices: &[u32]) {
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

/// Walks over `count` indices after `skip` others; whether there were so many, all below `known`.
fn walk(
    mut indices: Hybrid<'_>,
    (mut skip, count): (usize, usize),
    known: usize,
    target: &mut impl Target,
) -> bool {
    let (width, mut at) = (indices.width(), 0);
    let mut block = [0_u32; BLOCK];
    while at < count {
        let Some(piece) = indices.piece() else { return false };
        let many = match piece {
            Piece::Run { count, .. } | Piece::Packed { count, .. } => count,
        };
        let first = skip.min(many);
        skip -= first;
        let taken = (many - first).min(count - at);
        match piece {
            Piece::Run { .. } if taken == 0 => {}
            Piece::Run { value, .. } => {
                if value as usize >= known {
                    return false;
                }
                target.same(at, taken, value as usize);
            }
            Piece::Packed { bytes, .. } => {
                for start in (0..taken).step_by(BLOCK) {
                    let Some(some) = block.get_mut(..BLOCK.min(taken - start)) else {
                        return false;
                    };
                    unpack(bytes, width, first + start, some);
                    if some.iter().fold(0, |most, index| most.max(*index)) as usize >= known {
                        return false;
                    }
                    target.each(at + start, some);
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
        assert!(plain(Stored::Widen, &data, 1, &mut out));
        assert_eq!(out[..8], (-2_i64).to_le_bytes());
        assert_eq!(out[8..], 300_i64.to_le_bytes());
        assert!(!plain(Stored::Widen, &data, 2, &mut out));
        let mut out = [0; 4];
        assert!(plain(Stored::Narrow(2), &data, 1, &mut out));
        assert_eq!(out, [0xFE, 0xFF, 0x2C, 0x01]);
        let mut out = [0; 3];
        assert!(plain(Stored::Bits, &[0b1010_0000, 1], 6, &mut out));
        assert_eq!(out, [0, 1, 1]);
        assert!(!plain(Stored::Bits, &[0b1010_0000, 1], 14, &mut out));
    }

    #[test]
    fn bytes_that_are_stored_apart_come_together() {
        let mut out = [0; 4];
        assert!(split(2, &[1, 3, 5, 2, 4, 6], 1, &mut out));
        assert_eq!(out, [3, 4, 5, 6]);
        assert!(!split(2, &[1, 3, 5, 2, 4, 6], 2, &mut out));
    }

    #[test]
    fn indices_past_the_dictionary_are_refused() {
        let mut dictionary = Dictionary::default();
        let values: Vec<u8> =
            [10_u32, 20, 30].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(!dictionary.fill(Stored::Same(4), &values, 4));
        assert!(dictionary.fill(Stored::Same(4), &values, 3));
        let mut out = [0_u32; 6];
        // Two bits each: a run of two 2s, then 0, 1, 2, 0, 1, 2, 0, 0 packed.
        let page = [2, 0x04, 2, 0x03, 0b0010_0100, 0b0000_1001];
        assert!(dictionary.look_up(&page, 1, out.as_mut_bytes()));
        assert_eq!(out, [30, 10, 20, 30, 10, 20]);
        assert!(!dictionary.look_up(&page, 5, out.as_mut_bytes()));
        assert!(!dictionary.look_up(&[2, 0x04, 3], 0, out[..2].as_mut_bytes()));
        let wide: Vec<u8> = (0..9).collect();
        assert!(dictionary.fill(Stored::Same(3), &wide, 3));
        let mut out = [0; 12];
        assert!(dictionary.look_up(&page, 0, &mut out));
        assert_eq!(out, [6, 7, 8, 6, 7, 8, 0, 1, 2, 3, 4, 5]);
    }
}
