// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The steps from an image of any size to one of a batch, and the last of them.

use crate::error::{Error, Result};
use crate::pixels::Pixels;

/// Channels of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Red, green, blue.
    Rgb,
    /// Gray.
    Gray,
}

impl Mode {
    /// Number of channels.
    pub fn channels(self) -> usize {
        match self {
            Self::Rgb => 3,
            Self::Gray => 1,
        }
    }
}

/// Rule by which an image gets the size of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Resized without regard to proportions.
    Stretch,
    /// Resized until it covers the result, and the middle is kept.
    Crop,
    /// Resized until it fits into the result, with black around it.
    Pad,
}

/// Conversion of the values of a channel, 0 to 255: `value * factor - shift`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Factor of each value.
    pub factor: f32,
    /// Number that is then subtracted.
    pub shift: f32,
}

/// Size, mode, order and scale of every image of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Steps {
    /// Rows of the result.
    pub height: u32,
    /// Pixels of a row of the result.
    pub width: u32,
    /// Channels of the result.
    pub mode: Mode,
    /// Rule for the size.
    pub fit: Fit,
    /// Whether the channels of a pixel lie together; otherwise each channel is a plane.
    pub channels_last: bool,
    /// Conversion of each channel, for results of floats.
    pub scales: Vec<Scale>,
}

/// Memory for one image.
#[derive(Debug)]
pub enum Slot<'a> {
    /// Values 0 to 255.
    Bytes(&'a mut [u8]),
    /// Values after the scales.
    Floats(&'a mut [f32]),
}

impl Steps {
    /// Values of one image.
    pub fn values(&self) -> usize {
        let pixels = (self.height as usize).saturating_mul(self.width as usize);
        pixels.saturating_mul(self.mode.channels())
    }

    /// Writes an image of the right size and mode where it goes.
    pub(crate) fn place(&self, image: &Pixels, out: Slot<'_>) -> Result<()> {
        let expected = self.values();
        let found = match &out {
            Slot::Bytes(out) => out.len(),
            Slot::Floats(out) => out.len(),
        };
        if found != expected || image.bytes.len() != expected {
            return Err(Error::Room { expected, found });
        }
        match out {
            Slot::Bytes(out) if self.channels_last || self.mode == Mode::Gray => {
                out.copy_from_slice(&image.bytes);
            }
            Slot::Bytes(out) => self.write(&image.bytes, out, |_, value| value),
            Slot::Floats(out) => {
                let one = Scale { factor: 1.0, shift: 0.0 };
                let scale = |channel| {
                    self.scales.get(channel).or(self.scales.first()).copied().unwrap_or(one)
                };
                let scales = [scale(0), scale(1), scale(2)];
                self.write(&image.bytes, out, |channel, value| {
                    let Scale { factor, shift } = scales.get(channel).copied().unwrap_or(one);
                    f32::from(value) * factor - shift
                });
            }
        }
        Ok(())
    }

    /// Writes every value, converted by its channel, in one pass.
    fn write<T>(&self, bytes: &[u8], out: &mut [T], convert: impl Fn(usize, u8) -> T) {
        let (pixels, _) = bytes.as_chunks::<3>();
        match (self.mode, self.channels_last) {
            (Mode::Gray, _) => {
                out.iter_mut().zip(bytes).for_each(|(to, value)| *to = convert(0, *value))
            }
            (Mode::Rgb, true) => {
                for (to, [red, green, blue]) in out.as_chunks_mut::<3>().0.iter_mut().zip(pixels) {
                    *to = [convert(0, *red), convert(1, *green), convert(2, *blue)];
                }
            }
            (Mode::Rgb, false) => {
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

    fn steps(channels_last: bool) -> Steps {
        let scale = |factor, shift| Scale { factor, shift };
        let scales = vec![scale(1.0, 0.0), scale(2.0, 1.0), scale(0.5, 0.0)];
        Steps { height: 1, width: 2, mode: Mode::Rgb, fit: Fit::Stretch, channels_last, scales }
    }

    #[test]
    fn values_lie_in_the_order_that_is_asked_for() {
        let image = Pixels { width: 2, height: 1, channels: 3, bytes: vec![1, 2, 3, 4, 5, 6] };
        let mut bytes = [0; 6];
        steps(false).place(&image, Slot::Bytes(&mut bytes)).unwrap();
        assert_eq!(bytes, [1, 4, 2, 5, 3, 6]);
        steps(true).place(&image, Slot::Bytes(&mut bytes)).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6]);
        let mut floats = [0.0; 6];
        steps(false).place(&image, Slot::Floats(&mut floats)).unwrap();
        assert_eq!(floats, [1.0, 4.0, 3.0, 9.0, 1.5, 3.0]);
        steps(true).place(&image, Slot::Floats(&mut floats)).unwrap();
        assert_eq!(floats, [1.0, 3.0, 1.5, 4.0, 9.0, 3.0]);
        let room = steps(true).place(&image, Slot::Floats(&mut floats[..5]));
        assert!(matches!(room, Err(Error::Room { expected: 6, found: 5 })));
    }
}
