// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Replacements of nulls and NaN.

use farandole_dataset::Element;

use crate::column::Selected;
use crate::pool::typed_mut;

/// Returns whether `value` is one of an element's; floats take any, to the nearest.
pub(crate) fn fits(element: Element, value: f64) -> bool {
    let whole = |low: f64, high: f64| value.fract() == 0.0 && (low..high).contains(&value);
    match element {
        Element::Bool => whole(0.0, 2.0),
        Element::Int8 => whole(-128.0, 128.0),
        Element::Int16 => whole(-32_768.0, 32_768.0),
        Element::Int32 => whole(-2_147_483_648.0, 2_147_483_648.0),
        Element::Int64 => whole(-9_223_372_036_854_775_808.0, 9_223_372_036_854_775_808.0),
        Element::UInt8 => whole(0.0, 256.0),
        Element::UInt16 => whole(0.0, 65_536.0),
        Element::UInt32 => whole(0.0, 4_294_967_296.0),
        Element::UInt64 => whole(0.0, 18_446_744_073_709_551_616.0),
        Element::Float32 | Element::Float64 => true,
        Element::Utf8 | Element::Binary => false,
    }
}

/// The bytes of `value`, which [`fits`], as an element.
pub(crate) fn bytes_of(element: Element, value: f64) -> Vec<u8> {
    macro_rules! bytes {
        ($kind:ty) => {{
            #[expect(clippy::cast_possible_truncation, reason = "a user's choice of value")]
            let value = value as $kind;
            value.to_le_bytes().to_vec()
        }};
    }
    match element {
        Element::Bool => vec![u8::from(value != 0.0)],
        Element::Int8 => bytes!(i8),
        Element::Int16 => bytes!(i16),
        Element::Int32 => bytes!(i32),
        Element::Int64 => bytes!(i64),
        Element::UInt8 => bytes!(u8),
        Element::UInt16 => bytes!(u16),
        Element::UInt32 => bytes!(u32),
        Element::UInt64 => bytes!(u64),
        #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
        Element::Float32 => (value as f32).to_le_bytes().to_vec(),
        Element::Float64 => value.to_le_bytes().to_vec(),
        Element::Utf8 | Element::Binary => Vec::new(),
    }
}

/// Returns the replacement of a column's nulls, `width` bytes; zeros if none was requested.
pub(crate) fn filled(column: &Selected, width: usize) -> Vec<u8> {
    let one = bytes_of(column.field.element, column.fill.unwrap_or_default());
    one.iter().copied().cycle().take(width).collect()
}

/// Values that ruin a model in one step of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Odd {
    /// `NaN` or `infinite values`.
    pub(crate) what: &'static str,
    /// Number of such values.
    pub(crate) count: usize,
}

/// Replaces NaN by what the column is filled with.
///
/// # Errors
/// NaN that is not filled, or infinities, where they are not allowed.
pub(crate) fn numbers(out: &mut [u8], column: &Selected) -> Result<(), Odd> {
    macro_rules! scan {
        ($kind:ty, $fill:expr) => {{
            let values = typed_mut::<$kind>(out);
            // Without branches, so that many values are looked at in one instruction.
            let any = values
                .chunks(1024)
                .any(|some| some.iter().fold(false, |any, value| any | !value.is_finite()));
            if !any {
                return Ok(());
            }
            if !column.allow_nan {
                let infinite = values.iter().filter(|value| value.is_infinite()).count();
                if infinite > 0 {
                    return Err(Odd { what: "infinite values", count: infinite });
                }
            }
            let nans = values.iter_mut().filter(|value| value.is_nan());
            match column.fill {
                Some(fill) => nans.for_each(|value| *value = $fill(fill)),
                None if column.allow_nan => {}
                None => return Err(Odd { what: "NaN", count: nans.count() }),
            }
            Ok(())
        }};
    }
    #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
    match column.field.element {
        Element::Float32 => scan!(f32, |fill: f64| fill as f32),
        Element::Float64 => scan!(f64, |fill: f64| fill),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_their_element_or_do_not_fit() {
        assert_eq!(bytes_of(Element::Int8, -128.0), (-128_i8).to_le_bytes());
        assert_eq!(bytes_of(Element::Float32, 0.5), 0.5_f32.to_le_bytes());
        assert_eq!(bytes_of(Element::Bool, 1.0), [1]);
        for (element, value, does) in [
            (Element::Int8, 127.0, true),
            (Element::Int8, 128.0, false),
            (Element::Int8, 0.5, false),
            (Element::UInt16, -1.0, false),
            (Element::UInt64, 18_446_744_073_709_549_568.0, true),
            (Element::Int64, 9_223_372_036_854_775_808.0, false),
            (Element::Int64, f64::NAN, false),
            (Element::Bool, 2.0, false),
            (Element::Float32, f64::NAN, true),
        ] {
            assert_eq!(fits(element, value), does, "{value} as {}", element.name());
        }
    }
}
