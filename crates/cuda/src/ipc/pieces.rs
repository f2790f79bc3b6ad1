// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Divides the segments of an operation into pieces that fit a window.

/// Parts begin at multiples of this, as kernels have it.
const PART_ALIGNMENT_BYTES: usize = 16;

/// A part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceSpan {
    /// Number of the segment.
    pub(crate) segment: usize,
    /// Offset in it.
    pub(crate) segment_offset: usize,
    /// Offset in the piece.
    pub(crate) piece_offset: usize,
    pub(crate) bytes: usize,
}

impl PieceSpan {
    pub(crate) fn end_offset(&self) -> usize {
        self.piece_offset + self.bytes
    }
}

/// Returns the pieces for segments of so many bytes: each has parts that fill at most `room` bytes,
/// a multiple of 16 and not 0. They follow from the lengths alone, which are the same on all
/// members. No element is cut.
pub(crate) fn split_into_pieces(lengths: &[usize], room: usize) -> Vec<Vec<PieceSpan>> {
    let (mut pieces, mut piece, mut start) = (Vec::new(), Vec::new(), 0);
    for (segment, length) in lengths.iter().enumerate() {
        let mut at = 0;
        while at < *length {
            if start >= room {
                pieces.push(std::mem::take(&mut piece));
                start = 0;
            }
            let bytes = (length - at).min(room - start);
            piece.push(PieceSpan { segment, segment_offset: at, piece_offset: start, bytes });
            at += bytes;
            start = (start + bytes).next_multiple_of(PART_ALIGNMENT_BYTES);
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

    fn span(segment: usize, at: usize, start: usize, bytes: usize) -> PieceSpan {
        PieceSpan { segment, segment_offset: at, piece_offset: start, bytes }
    }

    #[test]
    fn a_long_segment_is_cut_and_short_ones_share_a_piece() {
        assert_eq!(
            split_into_pieces(&[70], 32),
            [[span(0, 0, 0, 32)], [span(0, 32, 0, 32)], [span(0, 64, 0, 6)]]
        );
        assert_eq!(split_into_pieces(&[4, 0, 8], 32), [[span(0, 0, 0, 4), span(2, 0, 16, 8)]]);
        assert_eq!(split_into_pieces(&[], 32), Vec::<Vec<PieceSpan>>::new());
        assert_eq!(split_into_pieces(&[0, 0], 32), Vec::<Vec<PieceSpan>>::new());
    }

    #[test]
    fn everything_is_there_once_and_parts_are_aligned() {
        let lengths = [100, 2, 48, 0, 1000, 16, 6];
        for room in [16, 64, 4096] {
            let all = split_into_pieces(&lengths, room);
            let mut seen = [0; 7];
            for span in all.iter().flatten() {
                assert_eq!(
                    (span.piece_offset % 16, span.segment_offset, span.segment_offset % 16),
                    (0, seen[span.segment], 0)
                );
                assert!(span.bytes > 0 && span.end_offset() <= room);
                seen[span.segment] += span.bytes;
            }
            assert_eq!(seen, lengths);
            let apart = all.iter().flat_map(|piece| piece.windows(2));
            assert!(apart.into_iter().all(|pair| pair[0].end_offset() <= pair[1].piece_offset));
        }
    }
}
