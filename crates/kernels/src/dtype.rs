// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Element types.

use std::fmt;

/// Type of a tensor's elements. The numbers are sent over links; 0 to 9 are Horovod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataType {
    /// Unsigned, 8 bits.
    U8 = 0,
    /// Signed, 8 bits.
    I8 = 1,
    /// Unsigned, 16 bits.
    U16 = 2,
    /// Signed, 16 bits.
    I16 = 3,
    /// Signed, 32 bits.
    I32 = 4,
    /// Signed, 64 bits.
    I64 = 5,
    /// IEEE half precision.
    F16 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// IEEE double precision.
    F64 = 8,
    /// One byte, 0 or 1.
    Bool = 9,
    /// Bfloat16: the upper half of a single.
    Bf16 = 10,
    /// Unsigned, 32 bits.
    U32 = 11,
    /// Unsigned, 64 bits.
    U64 = 12,
    /// Complex number of two singles.
    C64 = 13,
    /// Complex number of two doubles.
    C128 = 14,
    /// One byte: 4 bits of exponent, 3 of mantissa, no infinities.
    F8E4M3 = 15,
    /// One byte: 5 bits of exponent, 2 of mantissa.
    F8E5M2 = 16,
}

impl DataType {
    /// All types.
    pub const ALL: [Self; 17] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::Bool,
        Self::Bf16,
        Self::U32,
        Self::U64,
        Self::C64,
        Self::C128,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Returns the type with this wire number.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Returns the number of bytes of one element.
    pub const fn element_size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::C64 => 8,
            Self::C128 => 16,
        }
    }

    /// Returns the name of the type in NumPy, `ml_dtypes` and torch.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Bool => "bool",
            Self::Bf16 => "bfloat16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::C64 => "complex64",
            Self::C128 => "complex128",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The operation that combines elements. The numbers up to 5 are Horovod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum divided by the number of ranks; for integers this is an integer division that truncates
    /// toward zero.
    Average = 0,
    /// Sum.
    Sum = 1,
    /// Adaptive summation.
    Adasum = 2,
    /// Smallest.
    Min = 3,
    /// Largest.
    Max = 4,
    /// Product.
    Product = 5,
    /// `Average` whose sums of `float16` and `bfloat16` are rounded to that type between hosts. On
    /// one host, and for other types, it is an `Average`.
    RoundedAverage = 6,
    /// `Sum` with the same rounding between hosts.
    RoundedSum = 7,
}

impl ReduceOp {
    /// Returns the operation without the rounding between hosts.
    #[must_use]
    pub const fn with_unrounded_partials(self) -> Self {
        match self {
            Self::RoundedAverage => Self::Average,
            Self::RoundedSum => Self::Sum,
            exact => exact,
        }
    }

    /// Returns whether sums are rounded between hosts.
    pub const fn rounds_between_hosts(self) -> bool {
        matches!(self, Self::RoundedAverage | Self::RoundedSum)
    }

    /// Returns the operation with this wire number.
    pub fn from_wire(number: u8) -> Option<Self> {
        const ALL: [ReduceOp; 8] = [
            ReduceOp::Average,
            ReduceOp::Sum,
            ReduceOp::Adasum,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Product,
            ReduceOp::RoundedAverage,
            ReduceOp::RoundedSum,
        ];
        ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_numbers_lead_back_to_their_type() {
        for dtype in DataType::ALL {
            assert_eq!(DataType::from_wire(dtype as u8), Some(dtype));
        }
        assert_eq!(DataType::from_wire(17), None);
        assert_eq!(ReduceOp::from_wire(5), Some(ReduceOp::Product));
        assert_eq!(ReduceOp::from_wire(7), Some(ReduceOp::RoundedSum));
        assert_eq!(ReduceOp::from_wire(8), None);
    }
}
