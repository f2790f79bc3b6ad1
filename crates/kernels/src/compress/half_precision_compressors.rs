// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compression to 16-bit floats.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Compressor, require_payload_length};
use crate::Result;

/// Numbers converted at a time: a block fits on the stack and in the first-level cache.
const CAST_BLOCK_NUMBERS: usize = 512;

/// Compressor to IEEE half precision: 11 bits of precision, up to 65504. 2 bytes a number.
#[derive(Clone, Copy, Debug)]
pub struct Fp16Compressor;

/// Compressor to bfloat16, the upper half of an `f32`: 8 bits of precision, the range of `f32`. 2
/// bytes a number.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Compressor;

macro_rules! cast {
    ($compressor:ty, $half:ty) => {
        impl Compressor for $compressor {
            fn payload_bytes(&self, values: usize) -> usize {
                values * 2
            }

            fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()> {
                require_payload_length(self, payload.len(), values.len())?;
                let mut halves = [<$half>::ZERO; CAST_BLOCK_NUMBERS];
                for (values, bytes) in values
                    .chunks(CAST_BLOCK_NUMBERS)
                    .zip(payload.chunks_mut(CAST_BLOCK_NUMBERS * 2))
                {
                    let halves = &mut halves[..values.len()];
                    halves.convert_from_f32_slice(values);
                    for (half, bytes) in halves.iter().zip(bytes.as_chunks_mut().0) {
                        *bytes = half.to_ne_bytes();
                    }
                }
                Ok(())
            }

            fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()> {
                require_payload_length(self, payload.len(), into.len())?;
                combine_decoded_halves::<$half>(
                    payload,
                    into,
                    |into, value| *into += value,
                    <$half>::from_ne_bytes,
                );
                Ok(())
            }

            fn subtract_decoded(&self, payload: &[u8], from: &mut [f32]) -> Result<()> {
                require_payload_length(self, payload.len(), from.len())?;
                combine_decoded_halves::<$half>(
                    payload,
                    from,
                    |from, value| *from -= value,
                    <$half>::from_ne_bytes,
                );
                Ok(())
            }
        }
    };
}

cast!(Fp16Compressor, f16);
cast!(Bf16Compressor, bf16);

/// Combines every number of `payload` with the number at the same index in `with`.
fn combine_decoded_halves<H: Copy + Default>(
    payload: &[u8],
    with: &mut [f32],
    combine: impl Fn(&mut f32, f32),
    read: impl Fn([u8; 2]) -> H,
) where
    [H]: HalfFloatSliceExt,
{
    let mut halves = [H::default(); CAST_BLOCK_NUMBERS];
    let mut wide = [0.0; CAST_BLOCK_NUMBERS];
    for (with, bytes) in
        with.chunks_mut(CAST_BLOCK_NUMBERS).zip(payload.chunks(CAST_BLOCK_NUMBERS * 2))
    {
        let (halves, wide) = (&mut halves[..with.len()], &mut wide[..with.len()]);
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = read(*bytes);
        }
        halves.convert_to_f32_slice(wide);
        for (with, value) in with.iter_mut().zip(wide) {
            combine(with, *value);
        }
    }
}
