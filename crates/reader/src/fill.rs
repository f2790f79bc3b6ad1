// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Replacement of nulls and NaN.

use farandole_dataset::ElementType;

use crate::column::SelectedColumn;
use crate::fill_value::{FillValue, element_bytes};
use crate::pool::as_values_mut;

/// Returns `width` bytes that replace a null of a column: zeros if no replacement was requested.
pub(crate) fn null_fill_bytes(column: &SelectedColumn, width: usize) -> Vec<u8> {
    let one = element_bytes(column.field.element, column.fill.unwrap_or_default());
    let one = one.unwrap_or_default();
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
        ElementType::Float32 => scan!(f32, |fill: FillValue| fill.to_float() as f32),
        ElementType::Float64 => scan!(f64, FillValue::to_float),
        _ => Ok(()),
    }
}
