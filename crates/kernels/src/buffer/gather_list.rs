// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A gather list: several buffers that are addressed as one range of bytes, so that fused tensors
//! need no packing. A list may cast: its positions and bytes are those of another element type than
//! the buffers have, and the cast is a part of every read and write.

use std::fmt;

use super::wire_cast::WireCast;
use super::{Buffer, copy_nontemporal};
use crate::{DataType, Result};

/// Bytes of elements that a casting list casts at a time: they fit on the stack and in the
/// first-level cache.
const CAST_BLOCK_BYTES: usize = 4 << 10;
/// Bytes of memory for each byte of a casting list: `float32` for 16-bit floats.
const CAST_MEMORY_WIDTH: usize = 2;

/// Host buffers of one operation, end to end. The methods are safe for two reasons. By the promise
/// made at `Buffer::from_raw`, no other code uses the buffers of an operation until the operation
/// completes. And every slice made here ends with its call.
#[derive(Default)]
pub struct GatherList {
    buffers: Vec<Buffer>,
    /// End of each buffer.
    ends: Vec<usize>,
    cast: Option<WireCast>,
}

impl fmt::Debug for GatherList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherList")
            .field("buffers", &self.buffers)
            .field("ends", &self.ends)
            .field("casts", &self.casts())
            .finish()
    }
}

impl GatherList {
    /// Returns a list of these buffers, in this order.
    pub fn new(buffers: impl IntoIterator<Item = Buffer>) -> Self {
        let buffers: Vec<Buffer> = buffers.into_iter().collect();
        let ends = buffers
            .iter()
            .scan(0, |end, buffer| {
                *end += buffer.len();
                Some(*end)
            })
            .collect();
        Self { buffers, ends, cast: None }
    }

    /// Returns a list of buffers with `float32`, whose positions and bytes are those of `wire`, a
    /// 16-bit float. Reads round to nearest even. Writes are exact. A range must consist of whole
    /// elements.
    ///
    /// # Errors
    /// `Unsupported` when `wire` is neither `Bf16` nor `F16`.
    pub fn casting(buffers: impl IntoIterator<Item = Buffer>, wire: DataType) -> Result<Self> {
        let mut list = Self::new(buffers);
        for end in &mut list.ends {
            *end /= CAST_MEMORY_WIDTH;
        }
        Ok(Self { cast: Some(WireCast::new(wire)?), ..list })
    }

    /// Returns whether the bytes of the list are cast from and to the bytes in memory.
    pub fn casts(&self) -> bool {
        self.cast.is_some()
    }

    /// Returns the bytes of memory for each byte of the list.
    fn memory_width(&self) -> usize {
        if self.casts() { CAST_MEMORY_WIDTH } else { 1 }
    }

    /// Returns the number of bytes of all buffers.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns whether the list has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `into.len()` bytes, starting at position `at`.
    pub fn read_at(&self, at: usize, into: &mut [u8]) {
        if let Some(cast) = &self.cast {
            return self.for_each_piece(at, into.len(), |offset, buffer| {
                let end = offset + buffer.len() / CAST_MEMORY_WIDTH;
                // SAFETY: as in `visit_range`.
                cast.narrow(unsafe { buffer.as_bytes() }, &mut into[offset..end]);
            });
        }
        self.visit_range(at, into.len(), |offset, bytes| {
            into[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Calls `fill` with `len` writable bytes, starting at position `at`: one piece a call, each
    /// with its offset from `at`. `fill` must write all of them.
    pub fn fill_range(&self, at: usize, len: usize, mut fill: impl FnMut(usize, &mut [u8])) {
        if self.casts() {
            let mut block = [0; CAST_BLOCK_BYTES];
            for from in (0..len).step_by(CAST_BLOCK_BYTES) {
                let bytes = &mut block[..CAST_BLOCK_BYTES.min(len - from)];
                fill(from, bytes);
                self.write_at(at + from, bytes);
            }
            return;
        }
        self.for_each_piece(at, len, |offset, buffer| {
            // SAFETY: no other code uses the operation's buffers (see the type), and this slice
            // ends here.
            fill(offset, unsafe { buffer.as_bytes_mut() });
        });
    }

    /// Writes `from`, starting at position `at`.
    pub fn write_at(&self, at: usize, from: &[u8]) {
        if let Some(cast) = &self.cast {
            return self.for_each_piece(at, from.len(), |offset, buffer| {
                let end = offset + buffer.len() / CAST_MEMORY_WIDTH;
                // SAFETY: as in `fill_range`.
                cast.widen(&from[offset..end], unsafe { buffer.as_bytes_mut() });
            });
        }
        self.fill_range(at, from.len(), |offset, bytes| {
            bytes.copy_from_slice(&from[offset..offset + bytes.len()]);
        });
    }

    /// Like [`GatherList::write_at`], but bypasses the caches, unless the list casts.
    pub fn write_nontemporal(&self, at: usize, from: &[u8]) {
        if self.casts() {
            return self.write_at(at, from);
        }
        self.fill_range(at, from.len(), |offset, bytes| {
            copy_nontemporal(&from[offset..offset + bytes.len()], bytes);
        });
    }

    /// Returns whether each buffer differs from the buffer at the same position in the other list.
    pub fn differs_in_every_buffer(&self, other: &Self) -> bool {
        let pairs = self.buffers.iter().zip(&other.buffers);
        pairs.into_iter().all(|(own, other)| own.address() != other.address())
    }

    /// Calls `see` with `len` bytes, starting at position `at`: one piece a call, each with its
    /// offset from `at`.
    pub fn visit_range(&self, at: usize, len: usize, mut see: impl FnMut(usize, &[u8])) {
        if self.casts() {
            let mut block = [0; CAST_BLOCK_BYTES];
            for from in (0..len).step_by(CAST_BLOCK_BYTES) {
                let bytes = &mut block[..CAST_BLOCK_BYTES.min(len - from)];
                self.read_at(at + from, bytes);
                see(from, bytes);
            }
            return;
        }
        self.for_each_piece(at, len, |offset, buffer| {
            // SAFETY: no other code uses the operation's buffers (see the type), and `see` cannot
            // write them.
            see(offset, unsafe { buffer.as_bytes() });
        });
    }

    /// Copies all memory to that of another list, which casts if this one does. Buffers that are in
    /// both lists are not copied, and no list casts.
    pub fn copy_into(&self, to: &Self) {
        let mut at = 0;
        for buffer in &self.buffers {
            to.for_each_piece(at, buffer.len(), |offset, target| {
                let source = buffer.unowned_slice(offset, target.len());
                // An operation in place has the same buffers in both lists.
                if source.address() != target.address() {
                    // SAFETY: both ranges are valid for `target.len()` bytes. `copy` allows them to
                    // overlap.
                    unsafe { std::ptr::copy(source.address(), target.address(), target.len()) }
                }
            });
            at += buffer.len();
        }
    }

    /// Calls `change` with `len` bytes of several lists, starting at position `at`: one piece of
    /// each list a call, for reading and writing. The lists have buffers of equal lengths. No two
    /// lists have bytes in common.
    pub fn update_all_ranges(
        lists: &[Self],
        at: usize,
        len: usize,
        mut change: impl FnMut(&mut [&mut [u8]]),
    ) {
        let Some(first) = lists.first() else { return };
        let mut all = Vec::with_capacity(lists.len());
        first.for_each_piece(at, len, |offset, piece| {
            for list in lists {
                list.for_each_piece(at + offset, piece.len(), |_, buffer| {
                    // SAFETY: as in `fill_range`, and the lists have no bytes in common. `list`
                    // keeps the memory alive longer than this call.
                    all.push(unsafe {
                        std::slice::from_raw_parts_mut(buffer.address(), buffer.len())
                    });
                });
            }
            change(&mut all);
            all.clear();
        });
    }

    /// Returns the buffers of the list.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    fn for_each_piece(&self, at: usize, len: usize, mut each: impl FnMut(usize, Buffer)) {
        let mut index = self.ends.partition_point(|end| *end <= at);
        let (mut done, width) = (0, self.memory_width());
        while done < len {
            let (Some(buffer), Some(end)) = (self.buffers.get(index), self.ends.get(index)) else {
                return;
            };
            // A casting list has fewer bytes than its memory.
            let start = end - buffer.len() / width;
            // Without an owner: counting a reference for each piece costs atomics, and `self` keeps
            // the memory alive.
            let piece = buffer.unowned_slice((at + done - start) * width, (len - done) * width);
            let bytes = piece.len() / width;
            // Fused tensors may be empty, and kernels need not handle blocks without bytes.
            if bytes > 0 {
                each(done, piece);
            }
            done += bytes;
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostMemory;

    fn flat(lengths: &[usize]) -> (Vec<HostMemory>, GatherList) {
        let memories: Vec<HostMemory> =
            lengths.iter().map(|bytes| HostMemory::new(*bytes)).collect();
        let flat = GatherList::new(memories.iter().map(HostMemory::as_buffer));
        (memories, flat)
    }

    #[test]
    fn ranges_cross_buffers_and_skip_empty_ones() {
        let (_memories, list) = flat(&[3, 0, 1, 4]);
        assert_eq!(list.len(), 8);
        list.write_at(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        list.write_at(2, &[30, 40, 50]);
        let mut all = [0; 8];
        list.read_at(0, &mut all);
        assert_eq!(all, [1, 2, 30, 40, 50, 6, 7, 8]);
        let mut pieces = Vec::new();
        list.visit_range(1, 6, |offset, bytes| pieces.push((offset, bytes.to_vec())));
        assert_eq!(pieces, [(0, vec![2, 30]), (2, vec![40]), (3, vec![50, 6, 7])]);
    }

    #[test]
    fn lists_that_are_cut_alike_are_changed_side_by_side() {
        for count in [1, 3, 17] {
            let lists: Vec<_> = (0..count).map(|_| flat(&[3, 0, 4])).collect();
            let (_memories, lists): (Vec<_>, Vec<GatherList>) = lists.into_iter().unzip();
            for (list, first) in lists.iter().zip(0_u8..) {
                list.write_at(0, &[first; 7]);
            }
            let mut pieces = Vec::new();
            GatherList::update_all_ranges(&lists, 1, 5, |all| {
                assert_eq!(all.len(), count);
                for (one, first) in all.iter_mut().zip(0_u8..) {
                    assert!(one.iter().all(|byte| *byte == first));
                    one.fill(100 + first);
                }
                pieces.push(all[0].len());
            });
            assert_eq!(pieces, [2, 3]);
            for (list, first) in lists.iter().zip(0_u8..) {
                let mut bytes = [0; 7];
                list.read_at(0, &mut bytes);
                let changed = 100 + first;
                assert_eq!(bytes, [first, changed, changed, changed, changed, changed, first]);
            }
        }
    }

    #[test]
    fn a_list_is_copied_into_one_cut_elsewhere() {
        let (_source, from) = flat(&[5, 2]);
        let (_target, to) = flat(&[1, 6]);
        from.write_at(0, &[1, 2, 3, 4, 5, 6, 7]);
        from.copy_into(&to);
        let mut all = [0; 7];
        to.read_at(0, &mut all);
        assert_eq!(all, [1, 2, 3, 4, 5, 6, 7]);
    }

    /// Returns `float32` of fused tensors with these numbers of elements, and a list of them as
    /// bfloat16. Element `k` of all is `k`, which bfloat16 rounds above 256.
    fn casting(counts: &[usize]) -> (Vec<HostMemory>, GatherList) {
        let lengths: Vec<usize> = counts.iter().map(|count| 4 * count).collect();
        let (memories, floats) = flat(&lengths);
        let values = (0..counts.iter().sum()).map(|k: usize| u16::try_from(k).unwrap());
        let bytes: Vec<u8> = values.flat_map(|k| f32::from(k).to_ne_bytes()).collect();
        floats.write_at(0, &bytes);
        let list = GatherList::casting(memories.iter().map(HostMemory::as_buffer), DataType::Bf16);
        (memories, list.unwrap())
    }

    fn halves(bytes: &[u8]) -> Vec<f32> {
        let half = |bytes: &[u8; 2]| half::bf16::from_ne_bytes(*bytes).to_f32();
        bytes.as_chunks().0.iter().map(half).collect()
    }

    #[test]
    fn a_casting_list_reads_rounded_halves_and_writes_exact_floats_in_any_cut() {
        let counts = [3, 0, 2500, 1, 700];
        let total: usize = counts.iter().sum();
        for cut in [1, 7, 2047, 2048, 2049, total] {
            let (_memories, list) = casting(&counts);
            assert_eq!((list.len(), list.casts()), (2 * total, true));
            let (mut read, mut seen) = (vec![0; 2 * total], vec![0; 2 * total]);
            for from in (0..total).step_by(cut) {
                let range = 2 * from..2 * (from + cut).min(total);
                list.read_at(range.start, &mut read[range.clone()]);
                list.visit_range(range.start, range.len(), |offset, bytes| {
                    let at = range.start + offset;
                    seen[at..at + bytes.len()].copy_from_slice(bytes);
                });
            }
            assert_eq!(read, seen);
            let expected = |k: usize| half::bf16::from_f64(k as f64).to_f32();
            assert!(halves(&read).into_iter().eq((0..total).map(expected)), "{cut}");
            // Written backwards by element, by both ways of writing.
            let back: Vec<u8> = read.chunks(2).rev().flatten().copied().collect();
            for from in (0..total).step_by(cut) {
                let range = 2 * from..2 * (from + cut).min(total);
                if from / cut % 2 == 0 {
                    list.write_at(range.start, &back[range.clone()]);
                } else {
                    list.fill_range(range.start, range.len(), |offset, bytes| {
                        let at = range.start + offset;
                        bytes.copy_from_slice(&back[at..at + bytes.len()]);
                    });
                }
            }
            list.read_at(0, &mut read);
            assert_eq!(read, back, "{cut}");
        }
    }

    #[test]
    fn lists_cast_to_halves_only() {
        for dtype in DataType::ALL {
            let casts = matches!(dtype, DataType::Bf16 | DataType::F16);
            assert_eq!(GatherList::casting([], dtype).is_ok(), casts, "{dtype}");
        }
    }
}
