// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Copies that bypass the caches: lines of the target are written without being read first.
//!
//! That saves a third of a large copy's traffic, and leaves the content of the caches. It costs
//! where the target is read so soon that it would still have been in a cache.

/// Copies `from` to `to`, of the same length; of different ones, as far as both go.
#[cfg(target_arch = "x86_64")]
pub fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE: usize = 64;
    const PIECE: usize = size_of::<__m128i>();
    let bytes = from.len().min(to.len());
    let head = to.as_ptr().align_offset(LINE).min(bytes);
    let (first, rest) = from[..bytes].split_at(head);
    let (to_first, to_rest) = to[..bytes].split_at_mut(head);
    let ((lines, last), (to_lines, to_last)) =
        (rest.as_chunks::<LINE>(), to_rest.as_chunks_mut::<LINE>());
    to_first.copy_from_slice(first);
    for (line, target) in lines.iter().zip(to_lines) {
        for at in (0..LINE).step_by(PIECE) {
            // SAFETY: both lines have 64 bytes, the target's begins where memory is aligned to a
            // line, and every x86-64 has these instructions.
            unsafe {
                let piece = _mm_loadu_si128(line.as_ptr().add(at).cast());
                _mm_stream_si128(target.as_mut_ptr().add(at).cast(), piece);
            }
        }
    }
    to_last.copy_from_slice(last);
    // Bytes that went past the caches are ordered before all later writes of this thread. SAFETY:
    // every x86-64 has this.
    unsafe { _mm_sfence() }
}

/// Copies `from` to `to`, of the same length; of different ones, as far as both go. This processor
/// decides by itself.
#[cfg(not(target_arch = "x86_64"))]
pub fn copy_past_caches(from: &[u8], to: &mut [u8]) {
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
                    copy_past_caches(source, &mut to[offset..offset + length]);
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
        copy_past_caches(&[1, 2], &mut to);
        copy_past_caches(&[], &mut to);
        assert_eq!(to, [1, 2, 0]);
        copy_past_caches(&[3; 9], &mut to);
        assert_eq!(to, [3; 3]);
    }
}
