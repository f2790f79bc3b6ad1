// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What takes the place of nulls and NaN.

use farandole_dataset::Element;

use crate::pool::typed_mut;
use crate::reader::Selected;

/// The bytes of `value` as an element; whole numbers are cut off and kept within their range.
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

/// What a null of a column becomes, `width` bytes; zeros while nobody asked for anything.
pub(crate) fn filled(column: &Selected, width: usize) -> Vec<u8> {
    let one = bytes_of(column.field.element, column.fill.unwrap_or_default());
    one.iter().copied().cycle().take(width).collect()
}

/// Replaces NaN by what the column is filled with.
///
/// # Errors
/// How many there are, when it is not filled.
pub(crate) fn no_nan(out: &mut [u8], column: &Selected) -> Result<(), usize> {
    macro_rules! scan {
        ($kind:ty, $fill:expr) => {{
            let values = typed_mut::<$kind>(out);
            // Without branches, so that many values are looked at in one instruction.
            let any =
                values.chunks(1024).any(|some| some.iter().fold(false, |any, value| any | value.is_nan()));
            if !any {
                return Ok(());
            }
            let nans = values.iter_mut().filter(|value| value.is_nan());
            match column.fill {
                Some(fill) => {
                    nans.for_each(|value| *value = $fill(fill));
                    Ok(())
                }
                None => Err(nans.count()),
            }
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
    fn values_stay_within_the_range_of_their_element() {
        assert_eq!(bytes_of(Element::Int8, -300.0), (-128_i8).to_le_bytes());
        assert_eq!(bytes_of(Element::UInt16, -1.0), 0_u16.to_le_bytes());
        assert_eq!(bytes_of(Element::Float32, 0.5), 0.5_f32.to_le_bytes());
        assert_eq!(bytes_of(Element::Bool, 2.0), [1]);
        assert_eq!(bytes_of(Element::Int64, f64::NAN), 0_i64.to_le_bytes());
    }
}
