// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compression of a sum of `f32`: the payload of a member, and the sum of all payloads.
//!
//! ```text
//!  values + residual --encode--> payload --(an allgather, or an all-to-all of parts)--> payloads of all members
//!         |                         |                                                       |
//!         +-- residual = values - values of the payload                     accumulate, in member order: the sum
//! ```
//!
//! Payloads are decoded before they are summed, so 8-bit codes cannot overflow. Payloads are opaque
//! to the engine, which moves them as bytes. Members that accumulate the same payloads in the same
//! order get the same bits.

mod half_precision_compressors;
mod int8;
mod residual_feedback;
mod top_k;

pub use half_precision_compressors::{Bf16Compressor, Fp16Compressor};
pub use int8::Int8Compressor;
pub use residual_feedback::encode_with_residual;
pub use top_k::TopKCompressor;

use crate::{Error, Result};

/// Lossy encoding of vectors of `f32`.
///
/// Payloads have the byte order of this machine: all members of a world run on one kind of machine.
pub trait Compressor: Send + Sync {
    /// Returns the number of bytes of the payload for `values` numbers.
    fn payload_bytes(&self, values: usize) -> usize;

    /// Writes the payload for `values`.
    ///
    /// # Errors
    /// [`Error::Shape`] when the length of `payload` is not [`payload_bytes`](Self::payload_bytes).
    fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()>;

    /// Adds the values of `payload` to `into`.
    ///
    /// # Errors
    /// [`Error::Shape`] when `payload` is not a payload for `into.len()` numbers. `into` may then
    /// be partly written.
    fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()>;

    /// Subtracts the values of `payload` from `from`. The remainder is the loss of the payload.
    ///
    /// # Errors
    /// Like [`accumulate`](Self::accumulate).
    fn subtract_decoded(&self, payload: &[u8], from: &mut [f32]) -> Result<()>;
}

/// Returns an error if a payload does not have the length for `values` numbers.
fn require_payload_length(
    compressor: &dyn Compressor,
    payload: usize,
    values: usize,
) -> Result<()> {
    let expected = compressor.payload_bytes(values);
    if payload == expected {
        return Ok(());
    }
    Err(Error::Shape {
        reason: format!(
            "a payload for {values} numbers has {expected} bytes, this one has: {payload}"
        ),
    })
}
