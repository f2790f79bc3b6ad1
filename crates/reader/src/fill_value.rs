// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Numbers that replace missing values, and their bytes as elements.

use std::fmt;

use farandole_dataset::ElementType;

/// A number that replaces missing values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FillValue {
    /// A whole number, which may need more digits than a float has.
    Integer(i128),
    /// Any other number.
    Float(f64),
}

impl fmt::Display for FillValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => value.fmt(out),
            Self::Float(value) => value.fmt(out),
        }
    }
}

impl Default for FillValue {
    fn default() -> Self {
        Self::Integer(0)
    }
}

impl FillValue {
    /// Returns the value as a float, rounded to the nearest one.
    #[expect(clippy::cast_precision_loss, reason = "rounded to the nearest")]
    pub(crate) fn to_float(self) -> f64 {
        match self {
            Self::Integer(value) => value as f64,
            Self::Float(value) => value,
        }
    }

    /// Returns the value as a whole number, if it is one.
    fn to_integer(self) -> Option<i128> {
        match self {
            Self::Integer(value) => Some(value),
            // Floats of this size and without a fraction are exact in 128 bits.
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 1e30 => {
                #[expect(clippy::cast_possible_truncation, reason = "it fits, see above")]
                let value = value as i128;
                Some(value)
            }
            Self::Float(_) => None,
        }
    }
}

/// Returns whether an element can represent `value`. Floats round it, but a finite value stays
/// finite.
pub(crate) fn is_representable(element: ElementType, value: FillValue) -> bool {
    element_bytes(element, value).is_some()
}

/// Returns the bytes of `value` as an element; `None` if the element cannot represent it.
pub(crate) fn element_bytes(element: ElementType, value: FillValue) -> Option<Vec<u8>> {
    macro_rules! bytes {
        ($kind:ty) => {
            <$kind>::try_from(value.to_integer()?).ok()?.to_le_bytes().to_vec()
        };
    }
    Some(match element {
        ElementType::Bool => match value.to_integer()? {
            0 => vec![0],
            1 => vec![1],
            _ => return None,
        },
        ElementType::Int8 => bytes!(i8),
        ElementType::Int16 => bytes!(i16),
        ElementType::Int32 => bytes!(i32),
        ElementType::Int64 => bytes!(i64),
        ElementType::UInt8 => bytes!(u8),
        ElementType::UInt16 => bytes!(u16),
        ElementType::UInt32 => bytes!(u32),
        ElementType::UInt64 => bytes!(u64),
        ElementType::Float32 => {
            #[expect(clippy::cast_possible_truncation, reason = "to the nearest")]
            let narrow = value.to_float() as f32;
            if narrow.is_infinite() && value.to_float().is_finite() {
                return None;
            }
            narrow.to_le_bytes().to_vec()
        }
        ElementType::Float64 => value.to_float().to_le_bytes().to_vec(),
        ElementType::Utf8 | ElementType::Binary => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_their_element_or_do_not_fit() {
        let float = FillValue::Float;
        assert_eq!(element_bytes(ElementType::Int8, float(-128.0)).unwrap(), [0x80]);
        assert_eq!(element_bytes(ElementType::Float32, float(0.5)).unwrap(), 0.5_f32.to_le_bytes());
        assert_eq!(element_bytes(ElementType::Bool, float(1.0)).unwrap(), [1]);
        let odd = (1_i64 << 53) + 1;
        assert_eq!(
            element_bytes(ElementType::Int64, FillValue::Integer(odd.into())).unwrap(),
            odd.to_le_bytes(),
            "no float comes between"
        );
        for (element, value, does) in [
            (ElementType::Int8, float(127.0), true),
            (ElementType::Int8, float(128.0), false),
            (ElementType::Int8, float(0.5), false),
            (ElementType::UInt16, float(-1.0), false),
            (ElementType::UInt64, float(18_446_744_073_709_549_568.0), true),
            (ElementType::UInt64, FillValue::Integer(1 << 64), false),
            (ElementType::Int64, float(9_223_372_036_854_775_808.0), false),
            (ElementType::Int64, float(f64::NAN), false),
            (ElementType::Bool, float(2.0), false),
            (ElementType::Float32, float(f64::NAN), true),
            (ElementType::Float32, float(f64::INFINITY), true),
            (ElementType::Float32, float(1e300), false),
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
