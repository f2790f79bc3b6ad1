// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! 8-bit codes in blocks, each with a scale.

use super::{Compressor, require_payload_length};
use crate::Result;

/// Largest code. -128 is not used, so that codes are symmetric.
const MAX_CODE: f32 = 127.0;
/// Offset that rounds a small `f32` to the nearest whole number, ties to even, when it is added and
/// then subtracted.
const ROUNDING_OFFSET: f32 = 12_582_912.0;

/// Compressor to codes from -127 to 127 in blocks. Each block has a scale: the largest magnitude in
/// the block, divided by 127.
///
/// The payload holds all scales, then all codes: 1 byte a number and 4 bytes a block. The error of
/// a number is at most half of the scale of its block. A block with a number that is not finite
/// becomes NaN.
#[derive(Clone, Copy, Debug)]
pub struct Int8Compressor {
    block: usize,
}

impl Int8Compressor {
    /// Returns a compressor with blocks of `block` numbers, at least 1.
    pub fn new(block: usize) -> Self {
        Self { block: block.max(1) }
    }

    fn scale_bytes(&self, values: usize) -> usize {
        values.div_ceil(self.block) * size_of::<f32>()
    }

    /// Combines every number of `payload` with the number at the same index in `with`.
    fn combine_decoded(
        &self,
        payload: &[u8],
        with: &mut [f32],
        combine: impl Fn(&mut f32, f32),
    ) -> Result<()> {
        require_payload_length(self, payload.len(), with.len())?;
        let (scales, codes) = payload.split_at(self.scale_bytes(with.len()));
        let blocks = with.chunks_mut(self.block).zip(codes.chunks(self.block));
        for (scale, (with, codes)) in scales.as_chunks().0.iter().zip(blocks) {
            let scale = f32::from_ne_bytes(*scale);
            for (with, code) in with.iter_mut().zip(codes) {
                combine(with, f32::from(code.cast_signed()) * scale);
            }
        }
        Ok(())
    }
}

impl Compressor for Int8Compressor {
    fn payload_bytes(&self, values: usize) -> usize {
        self.scale_bytes(values) + values
    }

    fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()> {
        require_payload_length(self, payload.len(), values.len())?;
        let (scales, codes) = payload.split_at_mut(self.scale_bytes(values.len()));
        let blocks = values.chunks(self.block).zip(codes.chunks_mut(self.block));
        for (scale_bytes, (values, codes)) in scales.as_chunks_mut().0.iter_mut().zip(blocks) {
            let scale = block_scale(values);
            *scale_bytes = scale.to_ne_bytes();
            // A scale of 0 or NaN has no inverse. The codes do not matter then, because any code
            // times such a scale gives the scale.
            let inverse = if scale > 0.0 && scale.is_finite() { scale.recip() } else { 0.0 };
            for (value, code) in values.iter().zip(codes) {
                *code = nearest_code(value * inverse);
            }
        }
        Ok(())
    }

    fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()> {
        self.combine_decoded(payload, into, |into, value| *into += value)
    }

    fn subtract_decoded(&self, payload: &[u8], from: &mut [f32]) -> Result<()> {
        self.combine_decoded(payload, from, |from, value| *from -= value)
    }
}

/// Returns the scale of a block; NaN if a number in the block is not finite.
fn block_scale(values: &[f32]) -> f32 {
    // Eight integer maxima instead of one of floats: the compiler turns them into vector
    // instructions, and NaN needs no special case.
    let mut largest = [0_u32; 8];
    let (lanes, rest) = values.as_chunks::<8>();
    // Magnitudes have the same order as their bits, with NaN and infinity above all numbers.
    for lane in lanes {
        for (largest, value) in largest.iter_mut().zip(lane) {
            *largest = (*largest).max(value.abs().to_bits());
        }
    }
    for (largest, value) in largest.iter_mut().zip(rest) {
        *largest = (*largest).max(value.abs().to_bits());
    }
    let largest = f32::from_bits(largest.into_iter().max().unwrap_or(0));
    if !largest.is_finite() {
        return f32::NAN;
    }
    let scale = largest / MAX_CODE;
    // A scale that is not a normal number has no finite inverse: the values become zeros.
    if scale.is_normal() { scale } else { 0.0 }
}

/// Returns the whole number nearest to `value`, ties to even, as a code.
fn nearest_code(value: f32) -> u8 {
    // Rounding in the inverse may lead slightly beyond 127.
    let rounded = value.clamp(-MAX_CODE, MAX_CODE) + ROUNDING_OFFSET;
    // The whole number is in the lowest bits of the mantissa, in two's complement.
    let [code, ..] = rounded.to_bits().to_le_bytes();
    code
}
