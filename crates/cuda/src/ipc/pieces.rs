// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Divides the segments of an operation into pieces that fit a window.

/// Parts begin at multiples of this, as kernels have it.
const ALIGNMENT: usize = 16;

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Number of the segment.
    pub(crate) segment: usize,
    /// Offset in it.
    pub(crate) at: usize,
    /// Offset in the piece.
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Span {
    pub(crate) fn end(&self) -> usize {
        self.start + self.bytes
    }
}

/// Returns the pieces for segments of so many bytes: each has parts that fill at most `room` bytes,
/// a multiple of 16 and not 0. They follow from the lengths alone, which are the same on all
/// members. No element is cut.
pub(crate) fn pieces(lengths: &[usize], room: usize) -> Vec<Vec<Span>> {
    let (mut pieces, mut piece, mut start) = (Vec::new(), Vec::new(), 0);
    for (segment, length) in lengths.iter().enumerate() {
        let mut at = 0;
        while at < *length {
            if start >= room {
                pieces.push(std::mem::take(&mut piece));
                start = 0;
            }
            let bytes = (length - at).min(room - start);
            piece.push(Span { segment, at, start, bytes });
            at += bytes;
            start = (start + bytes).next_multiple_of(ALIGNMENT);
        }
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(segment: usize, at: usize, start: usize, bytes: usize) -> Span {
        Span { segment, at, start, bytes }
    }

    #[test]
    fn a_long_segment_is_cut_and_short_ones_share_a_piece() {
        assert_eq!(
            pieces(&[70], 32),
            [[span(0, 0, 0, 32)], [span(0, 32, 0, 32)], [span(0, 64, 0, 6)]]
        );
        assert_eq!(pieces(&[4, 0, 8], 32), [[span(0, 0, 0, 4), span(2, 0, 16, 8)]]);
        assert_eq!(pieces(&[], 32), Vec::<Vec<Span>>::new());
        assert_eq!(pieces(&[0, 0], 32), Vec::<Vec<Span>>::new());
    }

    #[test]
    fn everything_is_there_once_and_parts_are_aligned() {
        let lengths = [100, 2, 48, 0, 1000, 16, 6];
        for room in [16, 64, 4096] {
            let all = pieces(&lengths, room);
            let mut seen = [0; 7];
            for span in all.iter().flatten() {
                assert_eq!((span.start % 16, span.at, span.at % 16), (0, seen[span.segment], 0));
                assert!(span.bytes > 0 && span.end() <= room);
                seen[span.segment] += span.bytes;
            }
            assert_eq!(seen, lengths);
            let apart = all.iter().flat_map(|piece| piece.windows(2));
            assert!(apart.into_iter().all(|pair| pair[0].end() <= pair[1].start));
        }
    }
}
