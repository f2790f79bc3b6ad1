// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies that bypass the caches: the processor writes lines of the target without reading them
//! first.
//!
//! This saves a third of the memory traffic of a large copy and leaves the content of the caches as
//! it was. It is slower if the target is read so soon that it would still have been in a cache.

/// Copies `from` to `to`. If their lengths differ, the shorter one counts.
#[cfg(target_arch = "x86_64")]
pub fn copy_nontemporal(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const CACHE_LINE_BYTES: usize = 64;
    const VECTOR_BYTES: usize = size_of::<__m128i>();
    let bytes = from.len().min(to.len());
    // The stores need aligned addresses, and only complete lines are written without being read
    // first.
    let head = to.as_ptr().align_offset(CACHE_LINE_BYTES).min(bytes);
    let (first, rest) = from[..bytes].split_at(head);
    let (to_first, to_rest) = to[..bytes].split_at_mut(head);
    let ((lines, last), (to_lines, to_last)) =
        (rest.as_chunks::<CACHE_LINE_BYTES>(), to_rest.as_chunks_mut::<CACHE_LINE_BYTES>());
    to_first.copy_from_slice(first);
    for (line, target) in lines.iter().zip(to_lines) {
        for at in (0..CACHE_LINE_BYTES).step_by(VECTOR_BYTES) {
            // SAFETY: both lines have 64 bytes, the target line is aligned to 64 bytes, and every
            // x86-64 processor has these instructions.
            unsafe {
                let piece = _mm_loadu_si128(line.as_ptr().add(at).cast());
                _mm_stream_si128(target.as_mut_ptr().add(at).cast(), piece);
            }
        }
    }
    to_last.copy_from_slice(last);
    // Orders the writes that bypassed the caches before all later writes of this thread. SAFETY:
    // every x86-64 processor has this instruction.
    unsafe { _mm_sfence() }
}

/// Copies `from` to `to` through the caches, because this architecture has no implementation that
/// bypasses them. If the lengths differ, the shorter one counts.
#[cfg(not(target_arch = "x86_64"))]
pub fn copy_nontemporal(from: &[u8], to: &mut [u8]) {
    let bytes = from.len().min(to.len());
    to[..bytes].copy_from_slice(&from[..bytes]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_at_any_offset_write_exactly_their_bytes() {
        let from: Vec<u8> = (0..=255).cycle().take(1000).collect();
        for offset in [0, 1, 15, 16, 63, 64, 65] {
            for length in [0, 1, 63, 64, 65, 128, 129, 511, 512, 700] {
                for begin in [0, 3, 16] {
                    let mut to = vec![7_u8; 1000];
                    let source = &from[begin..begin + length];
                    copy_nontemporal(source, &mut to[offset..offset + length]);
                    assert_eq!(&to[offset..offset + length], source, "{offset} {length} {begin}");
                    let mut around = to[..offset].iter().chain(&to[offset + length..]);
                    assert!(around.all(|byte| *byte == 7), "{offset} {length} {begin}");
                }
            }
        }
    }

    #[test]
    fn of_different_lengths_the_shorter_counts() {
        let mut to = [0; 3];
        copy_nontemporal(&[1, 2], &mut to);
        copy_nontemporal(&[], &mut to);
        assert_eq!(to, [1, 2, 0]);
        copy_nontemporal(&[3; 9], &mut to);
        assert_eq!(to, [3; 3]);
    }
}
