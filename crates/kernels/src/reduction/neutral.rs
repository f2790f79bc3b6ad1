// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Neutral element, which a member without data contributes.

use crate::{DataType, Error, ReduceOp, Result};

/// Returns the element that changes no result, in the first `dtype.element_size()` bytes; the other
/// bytes are 0. The element is neutral after prescaling, so contribute it only to operations with a
/// prescale of 1. For a Sum it is `-0.0`, because `-0.0 + 0.0` is `0.0`. For Adasum, a vector of
/// these elements has the length 0.
///
/// # Errors
/// `Unsupported` when the reduction is not defined for the type.
pub fn neutral_element(dtype: DataType, op: ReduceOp) -> Result<[u8; 16]> {
    let unsupported = Err(Error::Unsupported { op, dtype });
    let op = op.with_unrounded_partials();
    let mut bytes = [0_u8; 16];
    let mut set = |value: &[u8]| bytes[..value.len()].copy_from_slice(value);
    macro_rules! integer {
        ($type:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Average => {}
                ReduceOp::Product => set(&<$type>::to_ne_bytes(1)),
                ReduceOp::Min => set(&<$type>::MAX.to_ne_bytes()),
                ReduceOp::Max => set(&<$type>::MIN.to_ne_bytes()),
                _ => return unsupported,
            }
        };
    }
    macro_rules! float {
        ($negative_zero:expr, $one:expr, $infinity:expr, $negative_infinity:expr) => {
            match op {
                ReduceOp::Product => set(&$one.to_ne_bytes()),
                ReduceOp::Min => set(&$infinity.to_ne_bytes()),
                ReduceOp::Max => set(&$negative_infinity.to_ne_bytes()),
                // Also for Adasum: a vector of zeros has the length 0 and changes no sum.
                _ => set(&$negative_zero.to_ne_bytes()),
            }
        };
    }
    match dtype {
        DataType::U8 => integer!(u8),
        DataType::I8 => integer!(i8),
        DataType::U16 => integer!(u16),
        DataType::I16 => integer!(i16),
        DataType::U32 => integer!(u32),
        DataType::I32 => integer!(i32),
        DataType::U64 => integer!(u64),
        DataType::I64 => integer!(i64),
        DataType::F16 => float!(0x8000_u16, 0x3c00_u16, 0x7c00_u16, 0xfc00_u16),
        DataType::Bf16 => float!(0x8000_u16, 0x3f80_u16, 0x7f80_u16, 0xff80_u16),
        DataType::F8E4M3 | DataType::F8E5M2 if op == ReduceOp::Adasum => return unsupported,
        // E4M3 has no infinities, so Min and Max take the largest numbers.
        DataType::F8E4M3 => float!(0x80_u8, 0x38_u8, 0x7e_u8, 0xfe_u8),
        DataType::F8E5M2 => float!(0x80_u8, 0x3c_u8, 0x7c_u8, 0xfc_u8),
        DataType::F32 => float!(-0.0_f32, 1.0_f32, f32::INFINITY, f32::NEG_INFINITY),
        DataType::F64 => float!(-0.0_f64, 1.0_f64, f64::INFINITY, f64::NEG_INFINITY),
        DataType::Bool => match op {
            ReduceOp::Sum | ReduceOp::Max => {}
            ReduceOp::Product | ReduceOp::Min => set(&[1]),
            _ => return unsupported,
        },
        DataType::C64 | DataType::C128 => match (op, dtype) {
            (ReduceOp::Sum | ReduceOp::Average, DataType::C64) => {
                let part = (-0.0_f32).to_ne_bytes();
                set(&[part, part].concat());
            }
            (ReduceOp::Sum | ReduceOp::Average, _) => {
                let part = (-0.0_f64).to_ne_bytes();
                set(&[part, part].concat());
            }
            _ => return unsupported,
        },
    }
    Ok(bytes)
}
