// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The largest numbers only.

use super::{Compressor, require_length};
use crate::{Error, Result};

/// Bytes of an index and its value.
const ENTRY: usize = 8;

/// A share of the numbers: those of largest magnitude, with their indices; of equal ones those that
/// come first.
///
/// The payload is entries of index and value in the order of indices: 8 bytes for each number that
/// is sent, one at least. NaN counts as largest, so that it is noticed.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    share: f64,
}

impl TopK {
    /// Sends this share of the numbers; shares below 0 or above 1 count as the nearer bound.
    pub fn new(share: f64) -> Self {
        Self { share: if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) } }
    }

    /// Returns how many of `values` numbers are sent.
    pub fn count(&self, values: usize) -> usize {
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
        share.max(1).min(values)
    }

    /// Combines every number of `payload` with its place in `with`.
    fn decode(
        &self,
        payload: &[u8],
        with: &mut [f32],
        combine: impl Fn(&mut f32, f32),
    ) -> Result<()> {
        require_length(self, payload.len(), with.len())?;
        for [i0, i1, i2, i3, v0, v1, v2, v3] in payload.as_chunks::<ENTRY>().0 {
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

impl Compressor for TopK {
    fn payload_bytes(&self, values: usize) -> usize {
        self.count(values) * ENTRY
    }

    fn encode(&self, values: &[f32], payload: &mut [u8]) -> Result<()> {
        require_length(self, payload.len(), values.len())?;
        if u32::try_from(values.len()).is_err() {
            return Err(Error::Shape {
                reason: format!("indices have 32 bits; numbers: {}", values.len()),
            });
        }
        let count = self.count(values.len());
        if count == 0 {
            return Ok(());
        }
        let mut magnitudes: Vec<u32> = values.iter().map(|value| magnitude(*value)).collect();
        let (_, smallest, above) =
            magnitudes.select_nth_unstable_by(values.len() - count, u32::cmp);
        let smallest = *smallest;
        let larger = above.iter().filter(|magnitude| **magnitude > smallest).count();
        let mut ties = count - larger;
        let mut entries = payload.as_chunks_mut::<ENTRY>().0.iter_mut();
        for (index, value) in (0_u32..).zip(values) {
            let size = magnitude(*value);
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
        self.decode(payload, into, |into, value| *into += value)
    }

    fn deduct(&self, payload: &[u8], from: &mut [f32]) -> Result<()> {
        self.decode(payload, from, |from, value| *from -= value)
    }
}

/// Compares like the magnitude: NaN above infinity, infinity above all numbers.
fn magnitude(value: f32) -> u32 {
    value.abs().to_bits()
}
