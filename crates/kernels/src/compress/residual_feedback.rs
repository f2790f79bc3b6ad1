// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Error feedback: the loss of one payload is added to the next.

use super::Compressor;
use crate::{Error, Result};

/// Encodes `values + residual`, and writes the loss of the payload to `residual`.
///
/// The first call takes a `residual` of zeros. Over many steps the sum of the payloads is then the
/// sum of the values, up to the loss of one step. If a loss is not finite, for example after the
/// overflow of a gradient, it is replaced by zero. Otherwise it would spoil all later steps.
///
/// # Errors
/// [`Error::Shape`] when the lengths do not fit.
pub fn encode_with_residual(
    compressor: &dyn Compressor,
    values: &[f32],
    residual: &mut [f32],
    payload: &mut [u8],
) -> Result<()> {
    if values.len() != residual.len() {
        return Err(Error::Shape {
            reason: format!(
                "{} numbers have as many residuals, not: {}",
                values.len(),
                residual.len()
            ),
        });
    }
    for (left, value) in residual.iter_mut().zip(values) {
        *left += value;
    }
    compressor.encode(residual, payload)?;
    compressor.subtract_decoded(payload, residual)?;
    // An infinity or NaN would stay in the residual for all later steps.
    for left in residual {
        if !left.is_finite() {
            *left = 0.0;
        }
    }
    Ok(())
}
