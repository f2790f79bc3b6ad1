// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All steps, one image after the other, in memory that is used again.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::{U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use crate::error::{Error, Result};
use crate::pixels::Pixels;
use crate::steps::{Fit, Slot, Steps};
use crate::turn::turn;
use crate::{jpeg, png};

/// Largest number of pixels of a file. The libraries take up to sixteen bytes for each pixel of the
/// header.
pub const MOST_PIXELS: u64 = 32 << 20;

/// Most bytes that are kept for the next image: the memory of a large image is freed.
const KEPT: usize = 64 << 20;

/// Decodes images by the same steps.
pub struct Decoder {
    steps: Steps,
    resizer: Resizer,
    image: Pixels,
    fitted: Pixels,
    spare: Vec<u8>,
}

impl Decoder {
    /// A decoder of one thread.
    pub fn new(steps: Steps) -> Self {
        Self {
            steps,
            resizer: Resizer::new(),
            image: Pixels::default(),
            fitted: Pixels::default(),
            spare: Vec::new(),
        }
    }

    /// Decodes a file into `out`, which has [`Steps::values`] values.
    ///
    /// # Errors
    /// A file of another format or a rare kind, which another decoder may open; a file that is
    /// damaged or too large. The content of `out` is then undefined.
    pub fn decode(&mut self, file: &[u8], out: Slot<'_>) -> Result<()> {
        let done = catch_unwind(AssertUnwindSafe(|| self.steps(file, out)));
        if self.image.bytes.capacity() > KEPT || done.is_err() {
            *self = Self::new(self.steps.clone());
        }
        done.unwrap_or_else(|_| Err(Error::damaged("the decoder gave up")))
    }

    fn steps(&mut self, file: &[u8], out: Slot<'_>) -> Result<()> {
        let Self { steps, resizer, image, fitted, spare } = self;
        let orientation = if file.starts_with(png::SIGNATURE) {
            png::decode(file, image)?
        } else if file.starts_with(jpeg::SIGNATURE) {
            // As Pillow does: by the longer side of the result, at least twice as much of each side
            // is needed.
            let small = steps.height.max(steps.width).saturating_mul(4);
            jpeg::decode(file, steps.mode, small, image)?
        } else {
            return Err(Error::Format);
        };
        turn(image, orientation, spare);
        image.convert(steps.mode, spare);
        if (image.width, image.height) == (steps.width, steps.height) {
            return steps.place(image, out);
        }
        resize(steps, resizer, image, fitted, spare)?;
        steps.place(fitted, out)
    }
}

/// Compares a size with [`MOST_PIXELS`].
///
/// # Errors
/// [`Error::Large`].
pub(crate) fn affordable(width: u32, height: u32) -> Result<()> {
    if u64::from(width) * u64::from(height) > MOST_PIXELS {
        return Err(Error::Large { width, height, most: MOST_PIXELS });
    }
    Ok(())
}

/// The part of an image, and the size that it gets.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    /// Left, top, width, height.
    part: (f64, f64, f64, f64),
    size: (u32, u32),
}

impl Plan {
    /// Computes both as Pillow's `resize`, `ImageOps.fit` and `ImageOps.pad` do.
    fn new(fit: Fit, (width, height): (u32, u32), (to_width, to_height): (u32, u32)) -> Self {
        let (wide, high) = (f64::from(width), f64::from(height));
        let (ratio, wanted) = (wide / high, f64::from(to_width) / f64::from(to_height));
        let whole = (0.0, 0.0, wide, high);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no larger than a side of the result"
        )]
        let rounded = |length: f64| length.round_ties_even() as u32;
        match fit {
            Fit::Crop if ratio > wanted => {
                let kept = wanted * high;
                Self { part: ((wide - kept) * 0.5, 0.0, kept, high), size: (to_width, to_height) }
            }
            Fit::Crop if ratio < wanted => {
                let kept = wide / wanted;
                Self { part: (0.0, (high - kept) * 0.5, wide, kept), size: (to_width, to_height) }
            }
            Fit::Pad if ratio > wanted => Self {
                part: whole,
                size: (to_width, rounded(high / wide * f64::from(to_width)).min(to_height)),
            },
            Fit::Pad if ratio < wanted => Self {
                part: whole,
                size: (rounded(ratio * f64::from(to_height)).min(to_width), to_height),
            },
            _ => Self { part: whole, size: (to_width, to_height) },
        }
    }
}

/// Resizes an image of one kind of pixels. Only the code of this kind is compiled.
fn convolve<P: PixelTrait>(
    resizer: &mut Resizer,
    image: &Pixels,
    ((width, height), target): ((u32, u32), &mut [u8]),
    options: &ResizeOptions,
) -> Result<()> {
    let source = TypedImageRef::<P>::from_buffer(image.width, image.height, &image.bytes);
    let mut target = TypedImage::<P>::from_buffer(width, height, target).map_err(Error::damaged)?;
    resizer
        .resize_typed(&source.map_err(Error::damaged)?, &mut target, options)
        .map_err(Error::damaged)
}

/// Gives an image the size of the result.
fn resize(
    steps: &Steps,
    resizer: &mut Resizer,
    image: &Pixels,
    fitted: &mut Pixels,
    spare: &mut Vec<u8>,
) -> Result<()> {
    let channels = image.channels;
    let Plan { part: (left, top, width, height), size } =
        Plan::new(steps.fit, (image.width, image.height), (steps.width, steps.height));
    if size.0 == 0 || size.1 == 0 {
        return Err(Error::Kind { kind: "so narrow that nothing of it would be left" });
    }
    let whole = size == (steps.width, steps.height);
    fitted.resize(steps.width, steps.height, channels);
    spare.resize(size.0 as usize * size.1 as usize * channels, 0);
    let target = if whole { fitted.bytes.as_mut_slice() } else { spare.as_mut_slice() };
    // Sums of fractions may be a little past the edge.
    let (width, height) =
        (width.min(f64::from(image.width) - left), height.min(f64::from(image.height) - top));
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .crop(left, top, width, height)
        .use_alpha(false);
    match channels {
        1 => convolve::<U8>(resizer, image, (size, target), &options)?,
        _ => convolve::<U8x3>(resizer, image, (size, target), &options)?,
    }
    if !whole {
        let middle = |room: u32| (f64::from(room) * 0.5).round_ties_even();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no larger than a side of the result"
        )]
        let at = |room: u32| middle(room) as usize;
        let (x, y) = (at(steps.width - size.0), at(steps.height - size.1));
        fitted.bytes.fill(0);
        let (row, length) = (fitted.row(), size.0 as usize * channels);
        let lines = fitted.bytes.chunks_exact_mut(row).skip(y).zip(spare.chunks_exact(length));
        for (to, from) in lines {
            if let Some(to) = to.get_mut(x * channels..x * channels + length) {
                to.copy_from_slice(from);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{Mode, Scale};

    fn steps(height: u32, width: u32, fit: Fit) -> Steps {
        Steps {
            height,
            width,
            mode: Mode::Gray,
            fit,
            channels_last: true,
            scales: vec![Scale { factor: 1.0, shift: 0.0 }],
        }
    }

    /// A gray PNG whose pixels count up.
    fn counting(width: u32, height: u32) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = ::png::Encoder::new(&mut file, width, height);
        encoder.set_color(::png::ColorType::Grayscale);
        let pixels: Vec<u8> = (0..width * height).map(|value| value.to_le_bytes()[0]).collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        file
    }

    fn decoded(file: &[u8], steps: Steps) -> Result<Vec<u8>> {
        let mut out = vec![9; steps.values()];
        Decoder::new(steps).decode(file, Slot::Bytes(&mut out)).map(|()| out)
    }

    #[test]
    fn images_are_cut_and_padded_around_their_middle() {
        let file = counting(4, 2);
        assert_eq!(decoded(&file, steps(2, 4, Fit::Stretch)).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(decoded(&file, steps(2, 2, Fit::Crop)).unwrap(), [1, 2, 5, 6]);
        assert_eq!(
            decoded(&file, steps(4, 4, Fit::Pad)).unwrap(),
            [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]
        );
        assert_eq!(
            decoded(&file, steps(2, 6, Fit::Pad)).unwrap(),
            [0, 0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0]
        );
        assert_eq!(decoded(&counting(2, 4), steps(2, 2, Fit::Crop)).unwrap(), [2, 3, 4, 5]);
    }

    #[test]
    fn parts_and_sizes_are_those_of_pillow() {
        let plan = |fit, from, to| Plan::new(fit, from, to);
        assert_eq!(plan(Fit::Crop, (500, 375), (224, 224)).part, (62.5, 0.0, 375.0, 375.0));
        assert_eq!(plan(Fit::Pad, (500, 375), (224, 224)).size, (224, 168));
        assert_eq!(plan(Fit::Pad, (3, 1000), (10, 10)).size, (0, 10));
        assert_eq!(
            plan(Fit::Pad, (20, 5), (10, 10)).size,
            (10, 2),
            "a half goes to the even number"
        );
        assert_eq!(
            plan(Fit::Stretch, (5, 7), (3, 2)),
            Plan { part: (0.0, 0.0, 5.0, 7.0), size: (3, 2) }
        );
    }

    #[test]
    fn what_is_no_image_or_too_large_is_refused_before_memory_is_taken() {
        assert!(matches!(decoded(b"GIF89a", steps(2, 2, Fit::Crop)), Err(Error::Format)));
        assert!(matches!(decoded(b"", steps(2, 2, Fit::Crop)), Err(Error::Format)));
        let mut large = counting(4, 2);
        // The size in the header, and the checksum of the header.
        large[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        large[29..33].copy_from_slice(&[0x49, 0xEF, 0x6F, 0x3F]);
        let error = decoded(&large, steps(2, 2, Fit::Crop)).unwrap_err().to_string();
        assert!(error.contains("65536 x 65536 pixels"), "{error}");
        let narrow = decoded(&counting(1, 200), steps(3, 3, Fit::Pad));
        assert!(matches!(narrow, Err(Error::Kind { .. })));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_an_error() {
        let file = counting(16, 16);
        for length in 0..file.len() {
            assert!(
                decoded(&file[..length], steps(4, 4, Fit::Stretch)).is_err(),
                "{length} of {}",
                file.len()
            );
        }
    }
}
