// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Compression that keeps only the largest numbers.

use super::{Compressor, require_payload_length};
use crate::{Error, Result};

/// Bytes of an index and its value.
const ENTRY_BYTES: usize = 8;

/// Compressor that keeps the numbers with the largest magnitude, with their indices. Of equal
/// magnitudes, the first in the vector are kept.
///
/// The payload holds entries of index and value in the order of indices: 8 bytes for each number
/// that is sent, at least one. NaN counts as the largest magnitude, so that it reaches the result.
#[derive(Clone, Copy, Debug)]
pub struct TopKCompressor {
    share: f64,
}

impl TopKCompressor {
    /// Returns a compressor that sends this share of the numbers. A share below 0 counts as 0, a
    /// share above 1 as 1.
    pub fn new(share: f64) -> Self {
        Self { share: if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) } }
    }

    /// Returns the number of sent numbers for a vector of `values` numbers.
    pub fn sent_value_count(&self, values: usize) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a share of a length is no larger than it"
        )]
        #[expect(
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "neither is negative; a share is rough"
        )]
        let share = (self.share * values as f64).ceil() as usize;
        // At least one number, so that a small share of a short vector still makes progress.
        share.max(1).min(values)
    }

    /// Combines every number of `payload` with the number at the same index in `with`.
    fn combine_decoded(
        &self,
        payload: &[u8],
        with: &mut [f32],
        combine: impl Fn(&mut f32, f32),
    ) -> Result<()> {
        require_payload_length(self, payload.len(), with.len())?;
        for [i0, i1, i2, i3, v0, v1, v2, v3] in payload.as_chunks::<ENTRY_BYTES>().0 {
            let index = u32::from_ne_bytes([*i0, *i1, *i2, *i3]);
            let place = usize::try_from(index).ok().and_then(|index| with.get_mut(index));
            let Some(place) = place else {
                return Err(Error::Shape {
                    reason: format!("a payload names a number beyond its vector: {index}"),
                });
            };
            combine(place, f32::from_ne_bytes([*v0, *v1, *v2, *v3]));
        }
        Ok(())
    }
}

impl Compressor for TopKCompressor {
    fn payload_bytes(&self, values: usize) -> usize {
        self.sent_value_count(values) * ENTRY_BYTES
    }

    fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()> {
        require_payload_length(self, payload.len(), values.len())?;
        if u32::try_from(values.len()).is_err() {
            return Err(Error::Shape {
                reason: format!("indices have 32 bits; numbers: {}", values.len()),
            });
        }
        let count = self.sent_value_count(values.len());
        if count == 0 {
            return Ok(());
        }
        // A copy, because the selection reorders it.
        let mut magnitudes: Vec<u32> = values.iter().map(|value| magnitude_bits(*value)).collect();
        let (_, smallest, above) =
            magnitudes.select_nth_unstable_by(values.len() - count, u32::cmp);
        let smallest = *smallest;
        let larger = above.iter().filter(|magnitude| **magnitude > smallest).count();
        // Of the numbers that equal the smallest one, only as many as still fit are sent.
        let mut ties = count - larger;
        let mut entries = payload.as_chunks_mut::<ENTRY_BYTES>().0.iter_mut();
        // A second pass in index order needs no sort of the entries.
        for (index, value) in (0_u32..).zip(values) {
            let size = magnitude_bits(*value);
            if size < smallest {
                continue;
            }
            if size == smallest {
                if ties == 0 {
                    continue;
                }
                ties -= 1;
            }
            let Some(entry) = entries.next() else { break };
            let (place, number) = entry.split_at_mut(4);
            place.copy_from_slice(&index.to_ne_bytes());
            number.copy_from_slice(&value.to_ne_bytes());
        }
        Ok(())
    }

    fn accumulate(&self, payload: &[u8], into: &mut [f32]) -> Result<()> {
        self.combine_decoded(payload, into, |into, value| *into += value)
    }

    fn subtract_decoded(&self, payload: &[u8], from: &mut [f32]) -> Result<()> {
        self.combine_decoded(payload, from, |from, value| *from -= value)
    }
}

/// Returns bits with the order of the magnitudes: NaN above infinity, infinity above all numbers.
fn magnitude_bits(value: f32) -> u32 {
    value.abs().to_bits()
}
