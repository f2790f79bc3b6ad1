// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A gather list: many buffers as one range of bytes, so that fused tensors need no packing.

use super::{Buffer, copy_past_caches};

/// Host buffers of one operation, end to end. The methods are safe because an operation's buffers
/// are, by the promise made at `Buffer::from_raw`, nobody else's until it completes, and every
/// slice made here ends with its call.
#[derive(Debug, Default)]
pub(crate) struct Flat {
    buffers: Vec<Buffer>,
    /// End of each buffer.
    ends: Vec<usize>,
}

impl Flat {
    pub(crate) fn new(buffers: impl IntoIterator<Item = Buffer>) -> Self {
        let buffers: Vec<Buffer> = buffers.into_iter().collect();
        let ends = buffers
            .iter()
            .scan(0, |end, buffer| {
                *end += buffer.len();
                Some(*end)
            })
            .collect();
        Self { buffers, ends }
    }

    /// Returns the bytes of all buffers.
    pub(crate) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Copies `into.len()` bytes from position `at` on.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        self.visit(at, into.len(), |offset, bytes| {
            into[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Gives `len` bytes from position `at` on for writing, piece by piece, each with its offset
    /// from `at`.
    pub(crate) fn fill(&self, at: usize, len: usize, mut fill: impl FnMut(usize, &mut [u8])) {
        self.pieces(at, len, |offset, buffer| {
            // SAFETY: the operation's buffers are ours alone (see the type), and this slice ends
            // here.
            fill(offset, unsafe { buffer.bytes_mut() });
        });
    }

    /// Writes `from` from position `at` on.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        self.fill(at, from.len(), |offset, bytes| {
            bytes.copy_from_slice(&from[offset..offset + bytes.len()]);
        });
    }

    /// Like [`Flat::write`], past the caches.
    pub(crate) fn write_past_caches(&self, at: usize, from: &[u8]) {
        self.fill(at, from.len(), |offset, bytes| {
            copy_past_caches(&from[offset..offset + bytes.len()], bytes);
        });
    }

    /// Returns whether no buffer is that of the other list at the same position.
    pub(crate) fn is_apart_from(&self, other: &Self) -> bool {
        let pairs = self.buffers.iter().zip(&other.buffers);
        pairs.into_iter().all(|(own, other)| own.address() != other.address())
    }

    /// Shows `len` bytes from position `at` on, piece by piece, each with its offset from `at`.
    pub(crate) fn visit(&self, at: usize, len: usize, mut see: impl FnMut(usize, &[u8])) {
        self.pieces(at, len, |offset, buffer| {
            // SAFETY: the operation's buffers are ours alone (see the type); `see` has no way to
            // write them.
            see(offset, unsafe { buffer.bytes() });
        });
    }

    /// Copies everything to another list of the same length; buffers that are the same are left
    /// alone.
    pub(crate) fn copy_to(&self, to: &Self) {
        let mut at = 0;
        for buffer in &self.buffers {
            to.pieces(at, buffer.len(), |offset, target| {
                let source = buffer.view(offset, target.len());
                if source.address() != target.address() {
                    // SAFETY: both ranges are valid for their length, which is the same, and may
                    // overlap.
                    unsafe { std::ptr::copy(source.address(), target.address(), target.len()) }
                }
            });
            at += buffer.len();
        }
    }

    /// Gives `len` bytes from position `at` on of several lists that are cut alike, for reading and
    /// writing: one piece of each at a time. No two lists have bytes in common.
    pub(crate) fn change_all(
        lists: &[Self],
        at: usize,
        len: usize,
        mut change: impl FnMut(&mut [&mut [u8]]),
    ) {
        let Some(first) = lists.first() else { return };
        let mut all = Vec::with_capacity(lists.len());
        first.pieces(at, len, |offset, piece| {
            for list in lists {
                list.pieces(at + offset, piece.len(), |_, buffer| {
                    // SAFETY: as in `write`, and the lists have nothing in common; the memory
                    // outlives this call, which `list` keeps alive.
                    all.push(unsafe {
                        std::slice::from_raw_parts_mut(buffer.address(), buffer.len())
                    });
                });
            }
            change(&mut all);
            all.clear();
        });
    }

    /// Buffers in the list.
    pub(crate) fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    fn pieces(&self, at: usize, len: usize, mut each: impl FnMut(usize, Buffer)) {
        let mut index = self.ends.partition_point(|end| *end <= at);
        let mut done = 0;
        while done < len {
            let (Some(buffer), Some(end)) = (self.buffers.get(index), self.ends.get(index)) else {
                return;
            };
            let start = end - buffer.len();
            let piece = buffer.view(at + done - start, len - done);
            let bytes = piece.len();
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
    use crate::Memory;

    fn flat(lengths: &[usize]) -> (Vec<Memory>, Flat) {
        let memories: Vec<Memory> = lengths.iter().map(|bytes| Memory::new(*bytes)).collect();
        let flat = Flat::new(memories.iter().map(Memory::buffer));
        (memories, flat)
    }

    #[test]
    fn ranges_cross_buffers_and_skip_empty_ones() {
        let (_memories, list) = flat(&[3, 0, 1, 4]);
        assert_eq!(list.len(), 8);
        list.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        list.write(2, &[30, 40, 50]);
        let mut all = [0; 8];
        list.read(0, &mut all);
        assert_eq!(all, [1, 2, 30, 40, 50, 6, 7, 8]);
        let mut pieces = Vec::new();
        list.visit(1, 6, |offset, bytes| pieces.push((offset, bytes.to_vec())));
        assert_eq!(pieces, [(0, vec![2, 30]), (2, vec![40]), (3, vec![50, 6, 7])]);
    }

    #[test]
    fn lists_that_are_cut_alike_are_changed_side_by_side() {
        for count in [1, 3, 17] {
            let lists: Vec<_> = (0..count).map(|_| flat(&[3, 0, 4])).collect();
            let (_memories, lists): (Vec<_>, Vec<Flat>) = lists.into_iter().unzip();
            for (list, first) in lists.iter().zip(0_u8..) {
                list.write(0, &[first; 7]);
            }
            let mut pieces = Vec::new();
            Flat::change_all(&lists, 1, 5, |all| {
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
                list.read(0, &mut bytes);
                let changed = 100 + first;
                assert_eq!(bytes, [first, changed, changed, changed, changed, changed, first]);
            }
        }
    }

    #[test]
    fn a_list_is_copied_into_one_cut_elsewhere() {
        let (_source, from) = flat(&[5, 2]);
        let (_target, to) = flat(&[1, 6]);
        from.write(0, &[1, 2, 3, 4, 5, 6, 7]);
        from.copy_to(&to);
        let mut all = [0; 7];
        to.read(0, &mut all);
        assert_eq!(all, [1, 2, 3, 4, 5, 6, 7]);
    }
}
