// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Settings of the steps from a file's image to an image in a batch, and the last step.

use crate::error::{Error, Result};
use crate::pixels::{ColorMode, PixelBuffer};

/// Rule that brings an image to the size of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeMode {
    /// Resizes without keeping proportions.
    Stretch,
    /// Resizes until the image covers the result, and keeps the middle.
    Crop,
    /// Resizes until the image fits into the result, and adds black borders.
    Pad,
}

/// Conversion of the values (0 to 255) of a channel: `value * factor - shift`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelScale {
    /// Factor of each value.
    pub factor: f32,
    /// Number that is subtracted from the product.
    pub shift: f32,
}

/// Size, color mode, order and scale of every image of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageTransform {
    /// Rows of the result.
    pub height: u32,
    /// Pixels of a row of the result.
    pub width: u32,
    /// Channels of the result.
    pub mode: ColorMode,
    /// Rule for the size.
    pub fit: ResizeMode,
    /// Whether the channels of a pixel are adjacent; otherwise each channel is a plane.
    pub channels_last: bool,
    /// Conversion of each channel, for float results.
    pub scales: Vec<ChannelScale>,
}

/// Output memory for one image.
#[derive(Debug)]
pub enum ImageOutput<'a> {
    /// Values 0 to 255.
    Bytes(&'a mut [u8]),
    /// Values after scaling.
    Floats(&'a mut [f32]),
}

impl ImageTransform {
    /// Returns the number of values of one image.
    pub fn value_count(&self) -> usize {
        let pixels = (self.height as usize).saturating_mul(self.width as usize);
        pixels.saturating_mul(self.mode.channel_count())
    }

    /// Writes an image that already has the right size and mode to `out`.
    pub(crate) fn write_image_to_batch(
        &self,
        image: &PixelBuffer,
        out: ImageOutput<'_>,
    ) -> Result<()> {
        let expected = self.value_count();
        let found = match &out {
            ImageOutput::Bytes(out) => out.len(),
            ImageOutput::Floats(out) => out.len(),
        };
        if found != expected || image.bytes.len() != expected {
            return Err(Error::OutputSize { expected, found });
        }
        match out {
            // Gray has one plane, so both orders of channels are the same.
            ImageOutput::Bytes(out) if self.channels_last || self.mode == ColorMode::Gray => {
                out.copy_from_slice(&image.bytes);
            }
            ImageOutput::Bytes(out) => {
                self.write_channel_values(&image.bytes, out, |_, value| value)
            }
            ImageOutput::Floats(out) => {
                let one = ChannelScale { factor: 1.0, shift: 0.0 };
                let scale = |channel| {
                    self.scales.get(channel).or(self.scales.first()).copied().unwrap_or(one)
                };
                let scales = [scale(0), scale(1), scale(2)];
                self.write_channel_values(&image.bytes, out, |channel, value| {
                    let ChannelScale { factor, shift } =
                        scales.get(channel).copied().unwrap_or(one);
                    f32::from(value) * factor - shift
                });
            }
        }
        Ok(())
    }

    /// Writes every value, converted by channel, in one pass.
    fn write_channel_values<T>(
        &self,
        bytes: &[u8],
        out: &mut [T],
        convert: impl Fn(usize, u8) -> T,
    ) {
        // Arrays of three need no bounds checks in the loops below.
        let (pixels, _) = bytes.as_chunks::<3>();
        match (self.mode, self.channels_last) {
            (ColorMode::Gray, _) => {
                out.iter_mut().zip(bytes).for_each(|(to, value)| *to = convert(0, *value))
            }
            (ColorMode::Rgb, true) => {
                for (to, [red, green, blue]) in out.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
                    *to = [convert(0, *red), convert(1, *green), convert(2, *blue)];
                }
            }
            (ColorMode::Rgb, false) => {
                let (reds, rest) = out.split_at_mut(pixels.len().min(out.len()));
                let (greens, blues) = rest.split_at_mut(pixels.len().min(rest.len()));
                let planes = reds.iter_mut().zip(greens).zip(blues);
                for (((to_red, to_green), to_blue), [red, green, blue]) in planes.zip(pixels) {
                    (*to_red, *to_green, *to_blue) =
                        (convert(0, *red), convert(1, *green), convert(2, *blue));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(channels_last: bool) -> ImageTransform {
        let scale = |factor, shift| ChannelScale { factor, shift };
        let scales = vec![scale(1.0, 0.0), scale(2.0, 1.0), scale(0.5, 0.0)];
        ImageTransform {
            height: 1,
            width: 2,
            mode: ColorMode::Rgb,
            fit: ResizeMode::Stretch,
            channels_last,
            scales,
        }
    }

    #[test]
    fn values_lie_in_the_order_that_is_asked_for() {
        let image = PixelBuffer { width: 2, height: 1, channels: 3, bytes: vec![1, 2, 3, 4, 5, 6] };
        let mut bytes = [0; 6];
        steps(false).write_image_to_batch(&image, ImageOutput::Bytes(&mut bytes)).unwrap();
        assert_eq!(bytes, [1, 4, 2, 5, 3, 6]);
        steps(true).write_image_to_batch(&image, ImageOutput::Bytes(&mut bytes)).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6]);
        let mut floats = [0.0; 6];
        steps(false).write_image_to_batch(&image, ImageOutput::Floats(&mut floats)).unwrap();
        assert_eq!(floats, [1.0, 4.0, 3.0, 9.0, 1.5, 3.0]);
        steps(true).write_image_to_batch(&image, ImageOutput::Floats(&mut floats)).unwrap();
        assert_eq!(floats, [1.0, 3.0, 1.5, 4.0, 9.0, 3.0]);
        let room = steps(true).write_image_to_batch(&image, ImageOutput::Floats(&mut floats[..5]));
        assert!(matches!(room, Err(Error::OutputSize { expected: 6, found: 5 })));
    }
}
