// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Types of one element.

use serde::{Deserialize, Serialize};

/// The type of one element, named as in NumPy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// One byte, 0 or 1.
    Bool,
    /// Signed, 1 byte.
    Int8,
    /// Signed, 2 bytes.
    Int16,
    /// Signed, 4 bytes.
    Int32,
    /// Signed, 8 bytes.
    Int64,
    /// Unsigned, 1 byte.
    UInt8,
    /// Unsigned, 2 bytes.
    UInt16,
    /// Unsigned, 4 bytes.
    UInt32,
    /// Unsigned, 8 bytes.
    UInt64,
    /// IEEE 754 single precision.
    Float32,
    /// IEEE 754 double precision.
    Float64,
    /// Text of any length.
    Utf8,
    /// Bytes of any length.
    Binary,
}

impl ElementType {
    /// All elements with a fixed size.
    pub const FIXED_WIDTH: [Self; 11] = [
        Self::Bool,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::UInt8,
        Self::UInt16,
        Self::UInt32,
        Self::UInt64,
        Self::Float32,
        Self::Float64,
    ];

    /// Returns the bytes of one element; `None` if its size varies.
    pub const fn byte_width(self) -> Option<usize> {
        match self {
            Self::Bool | Self::Int8 | Self::UInt8 => Some(1),
            Self::Int16 | Self::UInt16 => Some(2),
            Self::Int32 | Self::UInt32 | Self::Float32 => Some(4),
            Self::Int64 | Self::UInt64 | Self::Float64 => Some(8),
            Self::Utf8 | Self::Binary => None,
        }
    }

    /// Returns NumPy's name of the element.
    pub const fn numpy_name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Int8 => "int8",
            Self::Int16 => "int16",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::UInt8 => "uint8",
            Self::UInt16 => "uint16",
            Self::UInt32 => "uint32",
            Self::UInt64 => "uint64",
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Utf8 => "utf8",
            Self::Binary => "binary",
        }
    }

    /// Returns the fixed-size element with this name.
    pub fn from_numpy_name(name: &str) -> Option<Self> {
        Self::FIXED_WIDTH.into_iter().find(|element| element.numpy_name() == name)
    }

    /// Returns whether the element is a float.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::Float32 | Self::Float64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_same_in_a_manifest_and_in_numpy() {
        for element in
            ElementType::FIXED_WIDTH.into_iter().chain([ElementType::Utf8, ElementType::Binary])
        {
            assert_eq!(
                serde_json::to_string(&element).unwrap(),
                format!("\"{}\"", element.numpy_name())
            );
        }
        assert_eq!(ElementType::from_numpy_name("float32"), Some(ElementType::Float32));
        assert_eq!(ElementType::from_numpy_name("utf8"), None);
    }
}
