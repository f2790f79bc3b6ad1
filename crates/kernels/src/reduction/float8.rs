// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Conversion between 8-bit floats and `f32`.

use super::native_elements::FloatElement;
use super::staged::{ElementFormat, f32_accumulators};

/// 8-bit float of the OCP 8-bit Floating Point Specification (OFP8, revision 1.0, 2023): a sign, an
/// exponent with the bias `BIAS`, and `MANTISSA` bits of mantissa. Numbers with an exponent of zero
/// are subnormal. `LAST` is the code, without a sign, for values that are too large: infinity if
/// its mantissa is 0, otherwise the largest number. All codes after `LAST` are NaN.
///
/// An `f32` is rounded to the nearest number, ties to even, as if there were no largest number;
/// results beyond `LAST` become `LAST`. For E4M3 this is the saturating conversion of the
/// specification, in which an infinity becomes 448. For E5M2 it is the non-saturating one. Both
/// convert like torch 2.15 on the CPU; torch 2.6, like `ml_dtypes`, converted values beyond the
/// range of E4M3 to NaN. A NaN becomes `0x7f` with its sign.
pub(super) struct Float8Format<const MANTISSA: u32, const BIAS: u32, const LAST: u32>;

/// `float8_e4m3fn`.
pub(super) type E4M3 = Float8Format<3, 7, 0x7e>;

/// `float8_e5m2`.
pub(super) type E5M2 = Float8Format<2, 15, 0x7c>;

impl<const MANTISSA: u32, const BIAS: u32, const LAST: u32> Float8Format<MANTISSA, BIAS, LAST> {
    /// Value of each code.
    const DECODED_VALUES: &'static [f32; 256] = &{
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            values[code as usize] = Self::decode_value(code);
            code += 1;
        }
        values
    };

    const fn decode_value(code: u32) -> f32 {
        let (sign, magnitude) = ((code & 0x80) << 24, code & 0x7f);
        let bits = if magnitude > LAST {
            f32::NAN.to_bits()
        } else if magnitude == LAST && LAST.trailing_zeros() >= MANTISSA {
            f32::INFINITY.to_bits()
        } else if magnitude >> MANTISSA == 0 {
            // The factor is 2^(1 - BIAS - MANTISSA), the step between subnormal numbers. The
            // product is exact.
            (magnitude as f32 * f32::from_bits((128 - BIAS - MANTISSA) << 23)).to_bits()
        } else {
            // Adds the difference of the two biases to the exponent.
            (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
        };
        f32::from_bits(bits | sign)
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "every branch fits 8 bits")]
    fn encode_value(value: f32) -> u8 {
        let dropped = 23 - MANTISSA;
        let normal_from = (128 - BIAS) << 23;
        // The unit in the last place of `large` is the subnormal step, so adding `large` rounds to
        // it.
        let large = f32::from_bits((128 - BIAS + dropped) << 23);
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
        // Half a unit less one, and one more if the last kept bit is odd: ties go to even.
        let half = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
        let normal = magnitude.wrapping_sub((127 - BIAS) << 23).wrapping_add(half) >> dropped;
        let subnormal = (f32::from_bits(magnitude) + large).to_bits().wrapping_sub(large.to_bits());
        let code = if value.is_nan() {
            0x7f
        } else if magnitude >= normal_from {
            // A carry out of the mantissa goes to the exponent, which is right. Beyond `LAST` it
            // saturates.
            normal.min(LAST)
        } else {
            subnormal
        };
        (code | sign) as u8
    }
}

impl<const MANTISSA: u32, const BIAS: u32, const LAST: u32> ElementFormat
    for Float8Format<MANTISSA, BIAS, LAST>
{
    const ELEMENT_BYTES: usize = 1;
    type Acc = f32;

    #[inline(always)]
    fn widen_to_accumulators(bytes: &[u8], acc: &mut [f32]) {
        for (a, b) in acc.iter_mut().zip(bytes) {
            *a = Self::DECODED_VALUES[usize::from(*b)];
        }
    }

    #[inline(always)]
    fn narrow_from_accumulators(acc: &[f32], bytes: &mut [u8]) {
        for (a, b) in acc.iter().zip(bytes) {
            *b = Self::encode_value(*a);
        }
    }

    f32_accumulators!();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<const M: u32, const B: u32, const L: u32>(codes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; codes.len()];
        Float8Format::<M, B, L>::widen_to_accumulators(codes, &mut values);
        values
    }

    #[test]
    fn codes_stand_for_the_numbers_of_the_specification() {
        // Smallest subnormal, largest subnormal, smallest normal, one, largest.
        let e4m3 = values::<3, 7, 0x7e>(&[0x00, 0x01, 0x07, 0x08, 0x38, 0x7e, 0xfe]);
        assert_eq!(e4m3, [0.0, 0.001_953_125, 0.875 / 64.0, 1.0 / 64.0, 1.0, 448.0, -448.0]);
        let e5m2 = values::<2, 15, 0x7c>(&[0x80, 0x01, 0x03, 0x04, 0x3c, 0x7b, 0x7c, 0xfc]);
        let (step, infinite) = (1.0 / 65536.0, f32::INFINITY);
        assert_eq!(e5m2, [0.0, step, 3.0 * step, 4.0 * step, 1.0, 57344.0, infinite, -infinite]);
        assert!(E4M3::DECODED_VALUES[0x7f].is_nan() && E4M3::DECODED_VALUES[0xff].is_nan());
        assert!(
            (0x7d..=0x7f).chain(0xfd..=0xff).all(|code: usize| E5M2::DECODED_VALUES[code].is_nan())
        );
        assert!(
            E4M3::DECODED_VALUES[0x80].is_sign_negative()
                && E5M2::DECODED_VALUES[0x80].is_sign_negative()
        );
    }

    #[test]
    fn every_code_comes_back() {
        for code in 0..=u8::MAX {
            let nan = 0x7f | (code & 0x80);
            let (e4m3, e5m2) =
                (E4M3::DECODED_VALUES[usize::from(code)], E5M2::DECODED_VALUES[usize::from(code)]);
            assert_eq!(E4M3::encode_value(e4m3), if e4m3.is_nan() { nan } else { code });
            assert_eq!(E5M2::encode_value(e5m2), if e5m2.is_nan() { nan } else { code });
        }
    }

    #[test]
    fn values_are_rounded_to_nearest_even_and_large_values_to_the_largest() {
        let e4m3 = [(1.0625, 0x38), (1.0626, 0x39), (1.1875, 0x3a), (0.000_976_562_5, 0x00)];
        let e4m3_large = [(464.0, 0x7e), (480.0, 0x7e), (1e30, 0x7e), (f32::INFINITY, 0x7e)];
        for (value, code) in e4m3.into_iter().chain(e4m3_large) {
            assert_eq!(
                (E4M3::encode_value(value), E4M3::encode_value(-value)),
                (code, code | 0x80),
                "{value}"
            );
        }
        let e5m2 = [(1.125, 0x3c), (1.126, 0x3d), (1.375, 0x3e), (1e-40, 0x00)];
        let e5m2_large = [(61_439.0, 0x7b), (61_440.0, 0x7c), (1e30, 0x7c), (f32::INFINITY, 0x7c)];
        for (value, code) in e5m2.into_iter().chain(e5m2_large) {
            assert_eq!(
                (E5M2::encode_value(value), E5M2::encode_value(-value)),
                (code, code | 0x80),
                "{value}"
            );
        }
    }
}
