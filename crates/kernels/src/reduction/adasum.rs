// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The arithmetic of Adasum: `adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`.
//!
//! Products, sums and factors are `float64`. If the squared length of a vector is negligible, its
//! factor is 1.

use super::native_elements::NativeElement;

/// Squared length below which a vector counts as zero: the square root of the smallest normal
/// `float64`.
// Horovod has the same limit. The quotient of a smaller length would lose its precision.
const NEGLIGIBLE_SQUARED_LENGTH: f64 = 1.491_668_146_240_041_3e-154;
/// Number of separate sums, which the processor computes in parallel.
// A fixed number, because it decides the order of the additions and so the bits (KE-1).
const PARALLEL_SUMS: usize = 8;

/// Type of the vectors between input and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdasumPrecision {
    /// `float32`.
    Single,
    /// `float64`.
    Double,
}

/// The products `a.b`, `|a|^2` and `|b|^2`, over whole vectors or over parts of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AdasumProducts {
    dot: f64,
    first_squared: f64,
    second_squared: f64,
}

impl AdasumProducts {
    /// Number of bytes on a link.
    pub const ENCODED_BYTES: usize = 24;

    /// Returns the products of two vectors of equal length.
    pub fn from_vectors(carrier: AdasumPrecision, first: &[u8], second: &[u8]) -> Self {
        match carrier {
            AdasumPrecision::Single => compute_products::<f32>(first, second),
            AdasumPrecision::Double => compute_products::<f64>(first, second),
        }
    }

    /// Returns the bytes for a link, in the byte order of this machine.
    pub fn to_bytes(self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        for (to, value) in bytes.as_chunks_mut().0.iter_mut().zip([
            self.dot,
            self.first_squared,
            self.second_squared,
        ]) {
            *to = value.to_ne_bytes();
        }
        bytes
    }

    /// Returns the products that `to_bytes` has encoded.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut values = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        let mut next = || values.next().unwrap_or_default();
        Self { dot: next(), first_squared: next(), second_squared: next() }
    }

    /// Adds the products over two pieces. The order of the pieces does not change the bits.
    pub fn add_parts(self, other: Self) -> Self {
        Self {
            dot: self.dot + other.dot,
            first_squared: self.first_squared + other.first_squared,
            second_squared: self.second_squared + other.second_squared,
        }
    }

    /// Returns the factors of the two vectors.
    fn combination_factors(self) -> (f64, f64) {
        let factor = |length: f64| {
            if length < NEGLIGIBLE_SQUARED_LENGTH { 1.0 } else { 1.0 - self.dot / (2.0 * length) }
        };
        (factor(self.first_squared), factor(self.second_squared))
    }

    /// Writes the Adasum of the two vectors to `own`, which is either the first or the second of
    /// them.
    pub fn combine_vectors(
        self,
        carrier: AdasumPrecision,
        own: &mut [u8],
        other: &[u8],
        own_is_first: bool,
    ) {
        let (first, second) = self.combination_factors();
        let (mine, theirs) = if own_is_first { (first, second) } else { (second, first) };
        match carrier {
            AdasumPrecision::Single => combine_elements::<f32>(own, mine, other, theirs),
            AdasumPrecision::Double => combine_elements::<f64>(own, mine, other, theirs),
        }
    }
}

fn compute_products<T: NativeElement + Into<f64>>(first: &[u8], second: &[u8]) -> AdasumProducts {
    let (mut dots, mut firsts, mut seconds) =
        ([0.0; PARALLEL_SUMS], [0.0; PARALLEL_SUMS], [0.0; PARALLEL_SUMS]);
    for (a, b) in T::value_chunks(first)
        .chunks(PARALLEL_SUMS)
        .zip(T::value_chunks(second).chunks(PARALLEL_SUMS))
    {
        for (lane, (a, b)) in a.iter().zip(b).enumerate() {
            let (a, b): (f64, f64) = (T::load_value(*a).into(), T::load_value(*b).into());
            dots[lane] += a * b;
            firsts[lane] += a * a;
            seconds[lane] += b * b;
        }
    }
    AdasumProducts {
        dot: dots.iter().sum(),
        first_squared: firsts.iter().sum(),
        second_squared: seconds.iter().sum(),
    }
}

fn combine_elements<T: NativeElement + Into<f64>>(
    own: &mut [u8],
    mine: f64,
    other: &[u8],
    theirs: f64,
) {
    for (a, b) in T::value_chunks_mut(own).iter_mut().zip(T::value_chunks(other)) {
        let (x, y): (f64, f64) = (T::load_value(*a).into(), T::load_value(*b).into());
        // The sum is computed in `float64` and rounded once.
        *a = T::factor_from_f64(mine * x + theirs * y).store_value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f64]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn adasum(a: &[f64], b: &[f64]) -> Vec<f64> {
        let (mut a, b) = (bytes(a), bytes(b));
        let measures = AdasumProducts::from_vectors(AdasumPrecision::Double, &a, &b);
        assert_eq!(AdasumProducts::from_bytes(&measures.to_bytes()), measures);
        measures.combine_vectors(AdasumPrecision::Double, &mut a, &b, true);
        a.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes)).collect()
    }

    #[test]
    fn parallel_vectors_are_averaged_and_orthogonal_ones_added() {
        assert_eq!(adasum(&[2.0, 4.0], &[2.0, 4.0]), [2.0, 4.0]);
        assert_eq!(adasum(&[3.0, 0.0], &[0.0, 5.0]), [3.0, 5.0]);
        assert_eq!(adasum(&[1.0, 0.0], &[1.0, 1.0]), [0.5 + 0.75, 0.75]);
    }

    #[test]
    fn a_vector_without_length_changes_nothing() {
        assert_eq!(adasum(&[1.5, -2.0], &[0.0, 0.0]), [1.5, -2.0]);
        assert_eq!(adasum(&[1e-80, 0.0], &[7.0, 0.0]), [7.0, 0.0]);
    }
}
