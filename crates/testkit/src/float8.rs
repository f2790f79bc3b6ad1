// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! 8-bit floats by their definition, and by looking for the nearest.

use std::sync::LazyLock;

use farandole_kernels::DataType;

use crate::rounding::single;

/// The layout of a type's numbers.
struct Layout {
    mantissa: i32,
    bias: i32,
    /// Codes up to the one for values that are too large.
    codes: u8,
}

const E4M3: Layout = Layout { mantissa: 3, bias: 7, codes: 0x7f };
const E5M2: Layout = Layout { mantissa: 2, bias: 15, codes: 0x7d };

impl Layout {
    /// The numbers of codes without a sign, as though the last one were a number, too.
    fn numbers(&self) -> Vec<f64> {
        let steps = 1 << self.mantissa;
        let number = |code: i32| {
            let (exponent, fraction) = (code / steps, f64::from(code % steps) / f64::from(steps));
            match exponent {
                0 => 2_f64.powi(1 - self.bias) * fraction,
                _ => 2_f64.powi(exponent - self.bias) * (1.0 + fraction),
            }
        };
        (0..i32::from(self.codes)).map(number).collect()
    }
}

fn numbers(dtype: DataType) -> &'static [f64] {
    static ALL: LazyLock<[Vec<f64>; 2]> = LazyLock::new(|| [E4M3.numbers(), E5M2.numbers()]);
    &ALL[usize::from(dtype == DataType::F8E5M2)]
}

/// The number that a code stands for.
pub(crate) fn decode(dtype: DataType, code: u8) -> f32 {
    let value = match (dtype, code & 0x7f) {
        (DataType::F8E5M2, 0x7c) => f64::INFINITY,
        (_, own) => numbers(dtype).get(usize::from(own)).copied().unwrap_or(f64::NAN),
    };
    single(if code < 0x80 { value } else { -value })
}

/// The code of the number that is nearest, of two the even code; of the last one for all that is
/// beyond.
pub(crate) fn encode(dtype: DataType, value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let (value, numbers) = (f64::from(value.abs()), numbers(dtype));
    let above = numbers.partition_point(|number| *number <= value);
    let below = above - 1;
    let up = numbers.get(above).is_some_and(|number| {
        let (down, up) = (value - numbers[below], number - value);
        up < down || (up == down && above % 2 == 0)
    });
    sign | u8::try_from(if up { above } else { below }).unwrap_or(0x7f)
}
