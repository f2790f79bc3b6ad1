// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Executes all steps for one image after the other, in memory that is reused.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::{U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use crate::error::{Error, Result};
use crate::orientation::apply_orientation;
use crate::pixels::PixelBuffer;
use crate::transform::{ImageOutput, ImageTransform, ResizeMode};
use crate::{jpeg, png};

/// Most bytes that are kept for the next image; the memory of larger images is freed.
const MAX_KEPT_BYTES: usize = 64 << 20;

/// Decoder that applies the same steps to every image.
pub struct ImageDecoder {
    steps: ImageTransform,
    resizer: Resizer,
    image: PixelBuffer,
    fitted: PixelBuffer,
    spare: Vec<u8>,
}

impl ImageDecoder {
    /// Creates a decoder for one thread.
    pub fn new(steps: ImageTransform) -> Self {
        Self {
            steps,
            resizer: Resizer::new(),
            image: PixelBuffer::default(),
            fitted: PixelBuffer::default(),
            spare: Vec::new(),
        }
    }

    /// Decodes a file into `out`, which must have [`ImageTransform::value_count`] values.
    ///
    /// # Errors
    /// A file of another format or a rare kind, which another decoder may read; a file that is
    /// damaged or too large. The content of `out` is then undefined.
    pub fn decode_file(&mut self, file: &[u8], out: ImageOutput<'_>) -> Result<()> {
        // A panic for a damaged file must become the error of one row (`IM-3`).
        let done = catch_unwind(AssertUnwindSafe(|| self.decode_without_panic_guard(file, out)));
        // After a panic, the buffers may have sizes that contradict each other.
        if self.image.bytes.capacity() > MAX_KEPT_BYTES || done.is_err() {
            *self = Self::new(self.steps.clone());
        }
        done.unwrap_or_else(|_| Err(Error::damaged_error("the decoder gave up")))
    }

    fn decode_without_panic_guard(&mut self, file: &[u8], out: ImageOutput<'_>) -> Result<()> {
        let Self { steps, resizer, image, fitted, spare } = self;
        let orientation = if file.starts_with(png::FILE_SIGNATURE) {
            png::decode_image(file, image)?
        } else if file.starts_with(jpeg::FILE_SIGNATURE) {
            // Like Pillow, a decode at a reduced size must keep at least twice the longer side of
            // the result in both directions. Half the size is enough from four times on.
            let small = steps.height.max(steps.width).saturating_mul(4);
            jpeg::decode_image(file, steps.mode, small, image)?
        } else {
            return Err(Error::Format);
        };
        apply_orientation(image, orientation, spare);
        image.convert_mode(steps.mode, spare);
        // A resize to the same size costs time and changes nothing.
        if (image.width, image.height) == (steps.width, steps.height) {
            return steps.write_image_to_batch(image, out);
        }
        resize_image(steps, resizer, image, fitted, spare)?;
        steps.write_image_to_batch(fitted, out)
    }
}

/// Part of an image to resize, and the resulting size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ResizePlan {
    /// Left, top, width, height.
    part: (f64, f64, f64, f64),
    size: (u32, u32),
}

impl ResizePlan {
    /// Computes part and size like Pillow's `resize`, `ImageOps.fit` and `ImageOps.pad`.
    fn new(
        fit: ResizeMode,
        (width, height): (u32, u32),
        (to_width, to_height): (u32, u32),
    ) -> Self {
        let (wide, high) = (f64::from(width), f64::from(height));
        let (ratio, wanted) = (wide / high, f64::from(to_width) / f64::from(to_height));
        let whole = (0.0, 0.0, wide, high);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no larger than a side of the result"
        )]
        // Python's `round`, which Pillow uses, takes halves to the even number.
        let rounded = |length: f64| length.round_ties_even() as u32;
        match fit {
            ResizeMode::Crop if ratio > wanted => {
                let kept = wanted * high;
                Self { part: ((wide - kept) * 0.5, 0.0, kept, high), size: (to_width, to_height) }
            }
            ResizeMode::Crop if ratio < wanted => {
                let kept = wide / wanted;
                Self { part: (0.0, (high - kept) * 0.5, wide, kept), size: (to_width, to_height) }
            }
            ResizeMode::Pad if ratio > wanted => Self {
                part: whole,
                size: (to_width, rounded(high / wide * f64::from(to_width)).min(to_height)),
            },
            ResizeMode::Pad if ratio < wanted => Self {
                part: whole,
                size: (rounded(ratio * f64::from(to_height)).min(to_width), to_height),
            },
            _ => Self { part: whole, size: (to_width, to_height) },
        }
    }
}

/// Resizes an image of one pixel type. Only the code for this type is compiled.
fn resize_pixels<P: PixelTrait>(
    resizer: &mut Resizer,
    image: &PixelBuffer,
    ((width, height), target): ((u32, u32), &mut [u8]),
    options: &ResizeOptions,
) -> Result<()> {
    let source = TypedImageRef::<P>::from_buffer(image.width, image.height, &image.bytes);
    let mut target =
        TypedImage::<P>::from_buffer(width, height, target).map_err(Error::damaged_error)?;
    resizer
        .resize_typed(&source.map_err(Error::damaged_error)?, &mut target, options)
        .map_err(Error::damaged_error)
}

/// Resizes an image to the size of the result.
fn resize_image(
    steps: &ImageTransform,
    resizer: &mut Resizer,
    image: &PixelBuffer,
    fitted: &mut PixelBuffer,
    spare: &mut Vec<u8>,
) -> Result<()> {
    let channels = image.channels;
    let ResizePlan { part: (left, top, width, height), size } =
        ResizePlan::new(steps.fit, (image.width, image.height), (steps.width, steps.height));
    // Pillow decides about a side of 0 pixels, so that the error is Pillow's.
    if size.0 == 0 || size.1 == 0 {
        return Err(Error::RareKind { kind: "so narrow that nothing of it would be left" });
    }
    let whole = size == (steps.width, steps.height);
    fitted.resize_buffer(steps.width, steps.height, channels);
    spare.resize(size.0 as usize * size.1 as usize * channels, 0);
    let target = if whole { fitted.bytes.as_mut_slice() } else { spare.as_mut_slice() };
    // Rounding may place the edge slightly outside of the image.
    let (width, height) =
        (width.min(f64::from(image.width) - left), height.min(f64::from(image.height) - top));
    let options = ResizeOptions::new()
        // A convolution whose filter grows with the scale, like Pillow's. It avoids aliasing.
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .crop(left, top, width, height)
        // `convert_mode` has removed the alpha channel already.
        .use_alpha(false);
    match channels {
        1 => resize_pixels::<U8>(resizer, image, (size, target), &options)?,
        _ => resize_pixels::<U8x3>(resizer, image, (size, target), &options)?,
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
        // The buffer still has pixels of the previous image.
        fitted.bytes.fill(0);
        let (row, length) = (fitted.row_bytes(), size.0 as usize * channels);
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
    use crate::pixels::ColorMode;
    use crate::transform::ChannelScale;

    fn steps(height: u32, width: u32, fit: ResizeMode) -> ImageTransform {
        ImageTransform {
            height,
            width,
            mode: ColorMode::Gray,
            fit,
            channels_last: true,
            scales: vec![ChannelScale { factor: 1.0, shift: 0.0 }],
        }
    }

    /// Returns a gray PNG whose pixels count up.
    fn counting(width: u32, height: u32) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = ::png::Encoder::new(&mut file, width, height);
        encoder.set_color(::png::ColorType::Grayscale);
        let pixels: Vec<u8> = (0..width * height).map(|value| value.to_le_bytes()[0]).collect();
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        file
    }

    fn decoded(file: &[u8], steps: ImageTransform) -> Result<Vec<u8>> {
        let mut out = vec![9; steps.value_count()];
        ImageDecoder::new(steps).decode_file(file, ImageOutput::Bytes(&mut out)).map(|()| out)
    }

    #[test]
    fn images_are_cut_and_padded_around_their_middle() {
        let file = counting(4, 2);
        assert_eq!(
            decoded(&file, steps(2, 4, ResizeMode::Stretch)).unwrap(),
            [0, 1, 2, 3, 4, 5, 6, 7]
        );
        assert_eq!(decoded(&file, steps(2, 2, ResizeMode::Crop)).unwrap(), [1, 2, 5, 6]);
        assert_eq!(
            decoded(&file, steps(4, 4, ResizeMode::Pad)).unwrap(),
            [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]
        );
        assert_eq!(
            decoded(&file, steps(2, 6, ResizeMode::Pad)).unwrap(),
            [0, 0, 1, 2, 3, 0, 0, 4, 5, 6, 7, 0]
        );
        assert_eq!(decoded(&counting(2, 4), steps(2, 2, ResizeMode::Crop)).unwrap(), [2, 3, 4, 5]);
    }

    #[test]
    fn parts_and_sizes_are_those_of_pillow() {
        let plan = |fit, from, to| ResizePlan::new(fit, from, to);
        assert_eq!(plan(ResizeMode::Crop, (500, 375), (224, 224)).part, (62.5, 0.0, 375.0, 375.0));
        assert_eq!(plan(ResizeMode::Pad, (500, 375), (224, 224)).size, (224, 168));
        assert_eq!(plan(ResizeMode::Pad, (3, 1000), (10, 10)).size, (0, 10));
        assert_eq!(
            plan(ResizeMode::Pad, (20, 5), (10, 10)).size,
            (10, 2),
            "a half goes to the even number"
        );
        assert_eq!(
            plan(ResizeMode::Stretch, (5, 7), (3, 2)),
            ResizePlan { part: (0.0, 0.0, 5.0, 7.0), size: (3, 2) }
        );
    }

    #[test]
    fn what_is_no_image_or_too_large_is_refused_before_memory_is_taken() {
        assert!(matches!(decoded(b"GIF89a", steps(2, 2, ResizeMode::Crop)), Err(Error::Format)));
        assert!(matches!(decoded(b"", steps(2, 2, ResizeMode::Crop)), Err(Error::Format)));
        let mut large = counting(4, 2);
        // The size in the header, and the checksum of the header.
        large[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        large[29..33].copy_from_slice(&[0x49, 0xEF, 0x6F, 0x3F]);
        let error = decoded(&large, steps(2, 2, ResizeMode::Crop)).unwrap_err().to_string();
        assert!(error.contains("65536 x 65536 pixels"), "{error}");
        let narrow = decoded(&counting(1, 200), steps(3, 3, ResizeMode::Pad));
        assert!(matches!(narrow, Err(Error::RareKind { .. })));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_an_error() {
        let file = counting(16, 16);
        for length in 0..file.len() {
            assert!(
                decoded(&file[..length], steps(4, 4, ResizeMode::Stretch)).is_err(),
                "{length} of {}",
                file.len()
            );
        }
    }
}
