// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Turns images upright.

use crate::pixels::PixelBuffer;

/// Turns an image by an EXIF orientation of 1 to 8; other numbers change nothing. `spare` gets the
/// previous memory of the image.
pub(crate) fn apply_orientation(image: &mut PixelBuffer, orientation: u16, spare: &mut Vec<u8>) {
    let (width, height, channels, row) =
        (image.width as usize, image.height as usize, image.channels, image.row_bytes());
    // Pillow ignores other numbers, too.
    if !(2..=8).contains(&orientation) || image.bytes.is_empty() {
        return;
    }
    let sideways = orientation >= 5;
    let (columns, rows) = if sideways { (height, width) } else { (width, height) };
    spare.resize(image.bytes.len(), 0);
    for (y, line) in spare.chunks_exact_mut(columns * channels).enumerate() {
        for (x, pixel) in line.chunks_exact_mut(channels).enumerate() {
            let (left, right) = (x, columns - 1 - x);
            let (top, bottom) = (y, rows - 1 - y);
            // Column and row in the stored image.
            let (column, line) = match orientation {
                2 => (right, top),
                3 => (right, bottom),
                4 => (left, bottom),
                5 => (top, left),
                6 => (top, right),
                7 => (bottom, right),
                _ => (bottom, left),
            };
            let at = line * row + column * channels;
            if let Some(from) = image.bytes.get(at..at + channels) {
                pixel.copy_from_slice(from);
            }
        }
    }
    std::mem::swap(&mut image.bytes, spare);
    if sideways {
        std::mem::swap(&mut image.width, &mut image.height);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_orientation_becomes_upright() {
        // Three columns, two rows.
        let stored =
            PixelBuffer { width: 3, height: 2, channels: 1, bytes: vec![1, 2, 3, 4, 5, 6] };
        for (orientation, size, wanted) in [
            (0, (3, 2), [1, 2, 3, 4, 5, 6]),
            (1, (3, 2), [1, 2, 3, 4, 5, 6]),
            (2, (3, 2), [3, 2, 1, 6, 5, 4]),
            (3, (3, 2), [6, 5, 4, 3, 2, 1]),
            (4, (3, 2), [4, 5, 6, 1, 2, 3]),
            (5, (2, 3), [1, 4, 2, 5, 3, 6]),
            (6, (2, 3), [4, 1, 5, 2, 6, 3]),
            (7, (2, 3), [6, 3, 5, 2, 4, 1]),
            (8, (2, 3), [3, 6, 2, 5, 1, 4]),
            (9, (3, 2), [1, 2, 3, 4, 5, 6]),
        ] {
            let mut image = stored.clone();
            apply_orientation(&mut image, orientation, &mut Vec::new());
            assert_eq!(
                ((image.width, image.height), &image.bytes[..]),
                (size, &wanted[..]),
                "{orientation}"
            );
        }
        let mut pair =
            PixelBuffer { width: 2, height: 1, channels: 3, bytes: vec![1, 2, 3, 4, 5, 6] };
        apply_orientation(&mut pair, 6, &mut Vec::new());
        assert_eq!((pair.width, pair.height, pair.bytes), (1, 2, vec![1, 2, 3, 4, 5, 6]));
    }
}
