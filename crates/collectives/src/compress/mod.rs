// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compression of a sum of `f32`: the payload of a member, and the sum of all payloads.
//!
//! ```text
//!  values + residual --encode--> payload --(an allgather, or an all-to-all of parts)--> payloads of all members
//!         |                         |                                                       |
//!         +-- residual = values - what the payload says                     accumulate, in member order: the sum
//! ```
//!
//! A payload is never summed in its own form, so 8-bit codes cannot overflow. Payloads are opaque
//! to the engine: it moves them as bytes. Members that accumulate the same payloads in the same
//! order get the same bits.

mod cast;
mod feedback;
mod int8;
mod top_k;

pub use cast::{Bf16, Fp16};
pub use feedback::encode_with_residual;
pub use int8::Int8;
pub use top_k::TopK;

use crate::{Error, Result};

/// A lossy form of vectors of `f32`.
///
/// Payloads are in this machine's byte order: members of a world run on one kind of machine.
pub trait Compressor: Send + Sync {
    /// Returns the bytes of the payload for `values` numbers.
    fn payload_bytes(&self, values: usize) -> usize;

    /// Writes the payload for `values`.
    ///
    /// # Errors
    /// [`Error::Shape`] when `payload` has not [`payload_bytes`](Self::payload_bytes) bytes.
    fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()>;

    /// Adds what `payload` says to `into`.
    ///
    /// # Errors
    /// [`Error::Shape`] when `payload` is not one for `into.len()` numbers; `into` is then partly
    /// written at most.
    fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()>;

    /// Subtracts the values of `payload` from `from`: the rest is the loss of the payload.
    ///
    /// # Errors
    /// Like [`accumulate`](Self::accumulate).
    fn deduct(&self, payload: &[u8], from: &mut [f32]) -> Result<()>;
}

/// Refuses a payload that is none for `values` numbers.
fn require_length(compressor: &dyn Compressor, payload: usize, values: usize) -> Result<()> {
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
