// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Replacement of nulls and NaN.

use farandole_dataset::ElementType;

use crate::column::SelectedColumn;
use crate::pool::as_values_mut;

/// Returns whether an element can represent `value`. Floats accept any value and round it.
pub(crate) fn is_representable(element: ElementType, value: f64) -> bool {
    let whole = |low: f64, high: f64| value.fract() == 0.0 && (low..high).contains(&value);
    match element {
        ElementType::Bool => whole(0.0, 2.0),
        ElementType::Int8 => whole(-128.0, 128.0),
        ElementType::Int16 => whole(-32_768.0, 32_768.0),
        ElementType::Int32 => whole(-2_147_483_648.0, 2_147_483_648.0),
        ElementType::Int64 => whole(-9_223_372_036_854_775_808.0, 9_223_372_036_854_775_808.0),
        ElementType::UInt8 => whole(0.0, 256.0),
        ElementType::UInt16 => whole(0.0, 65_536.0),
        ElementType::UInt32 => whole(0.0, 4_294_967_296.0),
        ElementType::UInt64 => whole(0.0, 18_446_744_073_709_551_616.0),
        ElementType::Float32 | ElementType::Float64 => true,
        ElementType::Utf8 | ElementType::Binary => false,
    }
}

/// Returns the bytes of `value` as an element; requires [`is_representable`].
pub(crate) fn element_bytes(element: ElementType, value: f64) -> Vec<u8> {
    macro_rules! bytes {
        ($kind:ty) => {{
            #[expect(clippy::cast_possible_truncation, reason = "a user's choice of value")]
            let value = value as $kind;
            value.to_le_bytes().to_vec()
        }};
    }
    match element {
        ElementType::Bool => vec![u8::from(value != 0.0)],
        ElementType::Int8 => bytes!(i8),
        ElementType::Int16 => bytes!(i16),
        ElementType::Int32 => bytes!(i32),
        ElementType::Int64 => bytes!(i64),
        ElementType::UInt8 => bytes!(u8),
        ElementType::UInt16 => bytes!(u16),
        ElementType::UInt32 => bytes!(u32),
        ElementType::UInt64 => bytes!(u64),
        #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
        ElementType::Float32 => (value as f32).to_le_bytes().to_vec(),
        ElementType::Float64 => value.to_le_bytes().to_vec(),
        ElementType::Utf8 | ElementType::Binary => Vec::new(),
    }
}

/// Returns `width` bytes that replace a null of a column: zeros if no replacement was requested.
pub(crate) fn null_fill_bytes(column: &SelectedColumn, width: usize) -> Vec<u8> {
    let one = element_bytes(column.field.element, column.fill.unwrap_or_default());
    one.iter().copied().cycle().take(width).collect()
}

/// Values that would ruin a model in one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NonFiniteValues {
    /// `NaN` or `infinite values`.
    pub(crate) what: &'static str,
    /// Number of such values.
    pub(crate) count: usize,
}

/// Replaces NaN by the column's fill value.
///
/// # Errors
/// NaN without a fill value, or infinities, if they are not allowed.
pub(crate) fn replace_nans(out: &mut [u8], column: &SelectedColumn) -> Result<(), NonFiniteValues> {
    macro_rules! scan {
        ($kind:ty, $fill:expr) => {{
            let values = as_values_mut::<$kind>(out);
            // No branches in the inner loop, so that the compiler can vectorize it.
            let any = values
                .chunks(1024)
                .any(|some| some.iter().fold(false, |any, value| any | !value.is_finite()));
            if !any {
                return Ok(());
            }
            if !column.allow_nan {
                let infinite = values.iter().filter(|value| value.is_infinite()).count();
                if infinite > 0 {
                    return Err(NonFiniteValues { what: "infinite values", count: infinite });
                }
            }
            let nans = values.iter_mut().filter(|value| value.is_nan());
            match column.fill {
                Some(fill) => nans.for_each(|value| *value = $fill(fill)),
                None if column.allow_nan => {}
                None => return Err(NonFiniteValues { what: "NaN", count: nans.count() }),
            }
            Ok(())
        }};
    }
    #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
    match column.field.element {
        ElementType::Float32 => scan!(f32, |fill: f64| fill as f32),
        ElementType::Float64 => scan!(f64, |fill: f64| fill),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_their_element_or_do_not_fit() {
        assert_eq!(element_bytes(ElementType::Int8, -128.0), (-128_i8).to_le_bytes());
        assert_eq!(element_bytes(ElementType::Float32, 0.5), 0.5_f32.to_le_bytes());
        assert_eq!(element_bytes(ElementType::Bool, 1.0), [1]);
        for (element, value, does) in [
            (ElementType::Int8, 127.0, true),
            (ElementType::Int8, 128.0, false),
            (ElementType::Int8, 0.5, false),
            (ElementType::UInt16, -1.0, false),
            (ElementType::UInt64, 18_446_744_073_709_549_568.0, true),
            (ElementType::Int64, 9_223_372_036_854_775_808.0, false),
            (ElementType::Int64, f64::NAN, false),
            (ElementType::Bool, 2.0, false),
            (ElementType::Float32, f64::NAN, true),
        ] {
            assert_eq!(
                is_representable(element, value),
                does,
                "{value} as {}",
                element.numpy_name()
            );
        }
    }
}
