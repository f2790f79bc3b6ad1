// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Error feedback: the loss of one payload is added to the next.

use super::Compressor;
use crate::{Error, Result};

/// Encodes `values + residual` and leaves in `residual` what the payload has lost.
///
/// Start with zeros. Over many steps the sum of payloads then is the sum of values, up to one
/// step's loss. A loss that is not a number, as of an overflown gradient, is forgotten instead of
/// spoiling all that follows.
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
    compressor.deduct(payload, residual)?;
    for left in residual {
        if !left.is_finite() {
            *left = 0.0;
        }
    }
    Ok(())
}
