// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! 16-bit floats.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Compressor, require_length};
use crate::Result;

/// Numbers converted at a time: small enough for the stack and the first cache.
const BLOCK: usize = 512;

/// Halves of IEEE: 11 bits of precision, up to 65504. 2 bytes a number.
#[derive(Clone, Copy, Debug)]
pub struct Fp16;

/// Upper halves of `f32`: 8 bits of precision, the range of `f32`. 2 bytes a number.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

macro_rules! cast {
    ($compressor:ty, $half:ty) => {
        impl Compressor for $compressor {
            fn payload_bytes(&self, values: usize) -> usize {
                values * 2
            }

            fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()> {
                require_length(self, payload.len(), values.len())?;
                let mut halves = [<$half>::ZERO; BLOCK];
                for (values, bytes) in values.chunks(BLOCK).zip(payload.chunks_mut(BLOCK * 2)) {
                    let halves = &mut halves[..values.len()];
                    halves.convert_from_f32_slice(values);
                    for (half, bytes) in halves.iter().zip(bytes.as_chunks_mut().0) {
                        *bytes = half.to_ne_bytes();
                    }
                }
                Ok(())
            }

            fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()> {
                require_length(self, payload.len(), into.len())?;
                decode::<$half>(
                    payload,
                    into,
                    |into, value| *into += value,
                    <$half>::from_ne_bytes,
                );
                Ok(())
            }

            fn deduct(&self, payload: &[u8], from: &mut [f32]) -> Result<()> {
                require_length(self, payload.len(), from.len())?;
                decode::<$half>(
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

cast!(Fp16, f16);
cast!(Bf16, bf16);

/// Combines every number of `payload` with its place in `with`.
fn decode<H: Copy + Default>(
    payload: &[u8],
    with: &mut [f32],
    combine: impl Fn(&mut f32, f32),
    read: impl Fn([u8; 2]) -> H,
) where
    [H]: HalfFloatSliceExt,
{
    let mut halves = [H::default(); BLOCK];
    let mut wide = [0.0; BLOCK];
    for (with, bytes) in with.chunks_mut(BLOCK).zip(payload.chunks(BLOCK * 2)) {
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
