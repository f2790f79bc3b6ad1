// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A gather list: many buffers seen as one range of bytes, so that fusing tensors costs no packing.

use super::Buffer;

/// Lists that are visited together without an allocation.
const FEW: usize = 16;

/// Host buffers of one operation, end to end. The methods are safe because an operation's buffers are, by the promise
/// made at `Buffer::from_raw`, nobody else's until it completes, and every slice made here ends with its call.
#[derive(Debug, Default)]
pub(crate) struct Flat {
    buffers: Vec<Buffer>,
    /// Where each buffer ends.
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

    /// Bytes of all buffers.
    pub(crate) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Copies `into.len()` bytes from position `at` on.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        self.visit(at, into.len(), |offset, bytes| {
            into[offset..offset + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Writes `from` from position `at` on.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        self.pieces(at, from.len(), |offset, buffer| {
            // SAFETY: the operation's buffers are ours alone (see the type), and this slice ends here.
            let bytes = unsafe { buffer.bytes_mut() };
            bytes.copy_from_slice(&from[offset..offset + bytes.len()]);
        });
    }

    /// Shows `len` bytes from position `at` on, piece by piece, each with its offset from `at`.
    pub(crate) fn visit(&self, at: usize, len: usize, mut see: impl FnMut(usize, &[u8])) {
        self.pieces(at, len, |offset, buffer| {
            // SAFETY: the operation's buffers are ours alone (see the type); `see` has no way to write them.
            see(offset, unsafe { buffer.bytes() });
        });
    }

    /// Copies everything to another list of the same length; buffers that are the same are left alone.
    pub(crate) fn copy_to(&self, to: &Self) {
        let mut at = 0;
        for buffer in &self.buffers {
            to.pieces(at, buffer.len(), |offset, target| {
                let source = buffer.view(offset, target.len());
                if source.address() != target.address() {
                    // SAFETY: both ranges are valid for their length, which is the same, and may overlap.
                    unsafe { std::ptr::copy(source.address(), target.address(), target.len()) }
                }
            });
            at += buffer.len();
        }
    }

    /// As [`visit`](Self::visit), the same places of several lists that are cut alike: one piece of each at a time.
    pub(crate) fn visit_all(lists: &[Self], at: usize, len: usize, mut see: impl FnMut(usize, &[&[u8]])) {
        let Some(first) = lists.first() else { return };
        first.pieces(at, len, |offset, piece| {
            let mut few: [&[u8]; FEW] = [&[]; FEW];
            let mut many = Vec::new();
            let inputs = match few.get_mut(..lists.len()) {
                Some(few) => few,
                None => {
                    many.resize(lists.len(), &[][..]);
                    &mut many[..]
                }
            };
            for (list, input) in lists.iter().zip(&mut *inputs) {
                list.pieces(at + offset, piece.len(), |_, buffer| {
                    // SAFETY: as in `visit`; the memory outlives this call, which `list` keeps alive.
                    *input = unsafe { std::slice::from_raw_parts(buffer.address(), buffer.len()) };
                });
            }
            see(offset, inputs);
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
            let (Some(buffer), Some(end)) = (self.buffers.get(index), self.ends.get(index)) else { return };
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
    fn lists_that_are_cut_alike_are_seen_side_by_side() {
        for count in [1, 3, FEW + 1] {
            let lists: Vec<_> = (0..count).map(|_| flat(&[3, 0, 4])).collect();
            let (_memories, lists): (Vec<_>, Vec<Flat>) = lists.into_iter().unzip();
            for (list, first) in lists.iter().zip(0_u8..) {
                list.write(0, &[first; 7]);
            }
            let mut pieces = Vec::new();
            Flat::visit_all(&lists, 1, 5, |offset, inputs| {
                assert_eq!(inputs.len(), count);
                let alike = |(input, first): (&&[u8], u8)| input.iter().all(|byte| *byte == first);
                assert!(inputs.iter().zip(0..).all(alike));
                pieces.push((offset, inputs[0].len()));
            });
            assert_eq!(pieces, [(0, 2), (2, 3)]);
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
