// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Decoded pixels, their color modes and their largest number.

use crate::error::{Error, Result};

/// Most pixels of a file. The libraries take up to 16 bytes for each pixel in the header.
// So a hostile header costs at most 512 MiB.
pub const MAX_PIXELS: u64 = 32 << 20;

/// Channels of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColorMode {
    /// Red, green, blue.
    Rgb,
    /// Gray.
    Gray,
}

impl ColorMode {
    /// Returns the number of channels.
    pub fn channel_count(self) -> usize {
        match self {
            Self::Rgb => 3,
            Self::Gray => 1,
        }
    }
}

/// An image with 8 bits per channel, row by row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PixelBuffer {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) channels: usize,
    pub(crate) bytes: Vec<u8>,
}

impl PixelBuffer {
    /// Returns the bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.width as usize * self.channels
    }

    /// Changes the size; the values are then undefined.
    pub(crate) fn resize_buffer(&mut self, width: u32, height: u32, channels: usize) {
        (self.width, self.height, self.channels) = (width, height, channels);
        self.bytes.resize(width as usize * height as usize * channels, 0);
    }

    /// Converts to a color mode; `spare` gets the previous memory of the image.
    pub(crate) fn convert_mode(&mut self, mode: ColorMode, spare: &mut Vec<u8>) {
        let count = self.bytes.len() / self.channels.max(1);
        let wanted = mode.channel_count();
        if self.channels == wanted {
            return;
        }
        spare.resize(count * wanted, 0);
        let pixels =
            spare.chunks_exact_mut(wanted).zip(self.bytes.chunks_exact(self.channels.max(1)));
        match mode {
            // The alpha channel is ignored.
            ColorMode::Rgb if self.channels > 3 => {
                pixels.for_each(|(to, from)| to.copy_from_slice(from.get(..3).unwrap_or(&[0; 3])));
            }
            ColorMode::Rgb => {
                pixels.for_each(|(to, from)| to.fill(from.first().copied().unwrap_or_default()))
            }
            ColorMode::Gray => pixels.for_each(|(to, from)| {
                let value = match *from {
                    [red, green, blue, ..] => rgb_to_luma(red, green, blue),
                    [gray, ..] => gray,
                    [] => 0,
                };
                to.fill(value);
            }),
        }
        std::mem::swap(&mut self.bytes, spare);
        self.channels = wanted;
    }
}

/// Returns the luma of ITU-R 601-2, like Pillow.
fn rgb_to_luma(red: u8, green: u8, blue: u8) -> u8 {
    // Pillow's fixed-point factors: both decoders give the same bytes.
    let sum = u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000;
    sum.to_le_bytes()[2]
}

/// Compares a size with [`MAX_PIXELS`].
///
/// # Errors
/// [`Error::TooManyPixels`].
pub(crate) fn check_pixel_count(width: u32, height: u32) -> Result<()> {
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(Error::TooManyPixels { width, height, most: MAX_PIXELS });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(channels: usize, bytes: &[u8], mode: ColorMode) -> Vec<u8> {
        let mut image = PixelBuffer { width: 1, height: 1, channels, bytes: bytes.to_vec() };
        image.convert_mode(mode, &mut Vec::new());
        image.bytes
    }

    #[test]
    fn modes_are_converted_and_alpha_is_left_out() {
        assert_eq!(converted(1, &[7], ColorMode::Rgb), [7, 7, 7]);
        assert_eq!(converted(2, &[7, 9], ColorMode::Rgb), [7, 7, 7]);
        assert_eq!(converted(2, &[7, 9], ColorMode::Gray), [7]);
        assert_eq!(converted(4, &[1, 2, 3, 9], ColorMode::Rgb), [1, 2, 3]);
        assert_eq!(converted(3, &[255, 255, 255], ColorMode::Gray), [255]);
        assert_eq!(converted(4, &[255, 0, 0, 9], ColorMode::Gray), [76]);
        assert_eq!(converted(3, &[0, 255, 0], ColorMode::Gray), [150]);
        assert_eq!(converted(3, &[0, 0, 255], ColorMode::Gray), [29]);
    }
}
