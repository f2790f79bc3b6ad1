// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A gather list: several buffers that are addressed as one range of bytes, so that fused tensors
//! need no packing.

use super::{Buffer, copy_nontemporal};

/// Host buffers of one operation, end to end. The methods are safe for two reasons. By the promise
/// made at `Buffer::from_raw`, no other code uses the buffers of an operation until the operation
/// completes. And every slice made here ends with its call.
#[derive(Debug, Default)]
pub struct GatherList {
    buffers: Vec<Buffer>,
    /// End of each buffer.
    ends: Vec<usize>,
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
        Self { buffers, ends }
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
        self.visit_range(at, into.len(), |offset, bytes| {
            into[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Calls `fill` with `len` writable bytes, starting at position `at`: one piece a call, each
    /// with its offset from `at`.
    pub fn fill_range(&self, at: usize, len: usize, mut fill: impl FnMut(usize, &mut [u8])) {
        self.for_each_piece(at, len, |offset, buffer| {
            // SAFETY: no other code uses the operation's buffers (see the type), and this slice
            // ends here.
            fill(offset, unsafe { buffer.as_bytes_mut() });
        });
    }

    /// Writes `from`, starting at position `at`.
    pub fn write_at(&self, at: usize, from: &[u8]) {
        self.fill_range(at, from.len(), |offset, bytes| {
            bytes.copy_from_slice(&from[offset..offset + bytes.len()]);
        });
    }

    /// Like [`GatherList::write_at`], but bypasses the caches.
    pub fn write_nontemporal(&self, at: usize, from: &[u8]) {
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
        self.for_each_piece(at, len, |offset, buffer| {
            // SAFETY: no other code uses the operation's buffers (see the type), and `see` cannot
            // write them.
            see(offset, unsafe { buffer.as_bytes() });
        });
    }

    /// Copies all bytes to another list of the same length. Buffers that are in both lists are not
    /// copied.
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
        let mut done = 0;
        while done < len {
            let (Some(buffer), Some(end)) = (self.buffers.get(index), self.ends.get(index)) else {
                return;
            };
            let start = end - buffer.len();
            // Without an owner: counting a reference for each piece costs atomics, and `self` keeps
            // the memory alive.
            let piece = buffer.unowned_slice(at + done - start, len - done);
            let bytes = piece.len();
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
}
