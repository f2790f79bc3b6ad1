// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Conversion between 16-bit floats and `f32`, rounding to nearest even. The bits are the same with
//! and without F16C.

use super::native_elements::FloatElement;
use super::staged::{ElementFormat, f32_accumulators};

/// Bfloat16: the upper half of an `f32`.
pub(super) struct Bf16Format;

/// IEEE half precision, converted with integer arithmetic.
pub(super) struct SoftwareF16;

/// IEEE half precision, converted with F16C. Use it only with an instruction set that has F16C.
#[cfg(target_arch = "x86_64")]
pub(super) struct HardwareF16;

impl ElementFormat for Bf16Format {
    const ELEMENT_BYTES: usize = 2;
    type Acc = f32;

    #[inline(always)]
    fn widen_to_accumulators(bytes: &[u8], acc: &mut [f32]) {
        for (a, b) in acc.iter_mut().zip(bytes.as_chunks().0) {
            *a = f32::from_bits(u32::from(u16::from_ne_bytes(*b)) << 16);
        }
    }

    #[inline(always)]
    fn narrow_from_accumulators(acc: &[f32], bytes: &mut [u8]) {
        for (a, b) in acc.iter().zip(bytes.as_chunks_mut().0) {
            *b = bf16_from_f32(*a).to_ne_bytes();
        }
    }

    f32_accumulators!();
}

impl ElementFormat for SoftwareF16 {
    const ELEMENT_BYTES: usize = 2;
    type Acc = f32;

    #[inline(always)]
    fn widen_to_accumulators(bytes: &[u8], acc: &mut [f32]) {
        for (a, b) in acc.iter_mut().zip(bytes.as_chunks().0) {
            *a = f32_from_f16(u16::from_ne_bytes(*b));
        }
    }

    #[inline(always)]
    fn narrow_from_accumulators(acc: &[f32], bytes: &mut [u8]) {
        for (a, b) in acc.iter().zip(bytes.as_chunks_mut().0) {
            *b = f16_from_f32(*a).to_ne_bytes();
        }
    }

    f32_accumulators!();
}

#[cfg(target_arch = "x86_64")]
impl ElementFormat for HardwareF16 {
    const ELEMENT_BYTES: usize = 2;
    type Acc = f32;

    #[inline(always)]
    fn widen_to_accumulators(bytes: &[u8], acc: &mut [f32]) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        let (eights, _) = bytes.as_chunks::<16>();
        let (lanes, _) = acc.as_chunks_mut::<8>();
        let done = eights.len().min(lanes.len()) * 8;
        for (a, b) in lanes.iter_mut().zip(eights) {
            // SAFETY: 16 bytes are read from an array of 16 bytes, and 8 floats are written to an
            // array of 8 floats. Both instructions allow unaligned addresses. The format is chosen
            // only for processors with F16C.
            unsafe {
                _mm256_storeu_ps(
                    a.as_mut_ptr(),
                    _mm256_cvtph_ps(_mm_loadu_si128(b.as_ptr().cast())),
                )
            }
        }
        // Both conversions give the same bits, so the rest may take the other one.
        SoftwareF16::widen_to_accumulators(
            bytes.get(done * 2..).unwrap_or_default(),
            &mut acc[done..],
        );
    }

    #[inline(always)]
    fn narrow_from_accumulators(acc: &[f32], bytes: &mut [u8]) {
        use std::arch::x86_64::{
            _MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_cvtps_ph, _mm256_loadu_ps,
        };
        let (eights, _) = bytes.as_chunks_mut::<16>();
        let (lanes, _) = acc.as_chunks::<8>();
        let done = eights.len().min(lanes.len()) * 8;
        for (a, b) in lanes.iter().zip(eights) {
            // SAFETY: as in `widen_to_accumulators`, with reading and writing exchanged.
            unsafe {
                let half =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(a.as_ptr()));
                _mm_storeu_si128(b.as_mut_ptr().cast(), half);
            }
        }
        SoftwareF16::narrow_from_accumulators(
            &acc[done..],
            bytes.get_mut(done * 2..).unwrap_or_default(),
        );
    }

    f32_accumulators!();
}

/// Rounds to nearest even. The result for a NaN is a quiet NaN with the upper payload bits, as in
/// the hardware.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is what is asked for")]
pub(super) fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    // Ties go to even. A carry into the exponent is right: after the largest number comes infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // Without the quiet bit, a NaN whose payload is in the lower half would become an infinity.
    (if value.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

/// Converts exactly. Subnormals are converted from an integer, so that the result is the same in a
/// thread that flushes subnormals to zero.
#[inline(always)]
pub(super) fn f32_from_f16(half: u16) -> f32 {
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    let magnitude = half & 0x7fff;
    // 112 is the difference of the biases, 127 and 15.
    let normal = (magnitude << 13) + (112 << 23);
    // The hardware also makes a signalling NaN quiet.
    let special = (magnitude << 13) | (255 << 23) | if magnitude > 0x7c00 { 1 << 22 } else { 0 };
    let subnormal = (magnitude as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
    let bits = if magnitude >= 0x7c00 {
        special
    } else if magnitude >= 0x0400 {
        normal
    } else {
        subnormal
    };
    f32::from_bits(bits | sign)
}

/// Rounds to nearest even. A value that exceeds 65504 by at least half a unit becomes infinite.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "every branch fits 16 bits")]
pub(super) fn f16_from_f32(value: f32) -> u16 {
    const F32_INFINITY_BITS: u32 = 0x7f80_0000;
    const F16_OVERFLOW_BITS: u32 = 0x477f_f000; // 65520
    const F16_MIN_NORMAL_BITS: u32 = 113 << 23; // 2^-14
    // 0.5, whose unit in the last place is the subnormal step 2^-24
    const HALF_ULP: u32 = 126 << 23;
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let normal =
        magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    let subnormal =
        (f32::from_bits(magnitude) + f32::from_bits(HALF_ULP)).to_bits().wrapping_sub(HALF_ULP);
    // The quiet bit keeps a NaN whose upper payload is 0 from becoming an infinity.
    let nan = 0x7e00 | ((magnitude >> 13) & 0x1ff);
    let half = if magnitude > F32_INFINITY_BITS {
        nan
    } else if magnitude >= F16_OVERFLOW_BITS {
        0x7c00
    } else if magnitude >= F16_MIN_NORMAL_BITS {
        normal
    } else {
        subnormal
    };
    (half | sign) as u16
}
