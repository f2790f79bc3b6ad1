// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The arithmetic of Adasum: `adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`.
//!
//! Products, sums and factors are `float64`. A factor whose vector has next to no length is 1.

use super::native::Native;

/// Below, a squared length counts as nothing: the square root of the smallest normal `float64`.
const NOTHING: f64 = 1.491_668_146_240_041_3e-154;
/// Sums kept apart, so that they can be made side by side.
const LANES: usize = 8;

/// The type of vectors between input and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// `float32`.
    Single,
    /// `float64`.
    Double,
}

/// `a.b`, `|a|^2` and `|b|^2`, or parts of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measures {
    pub(crate) dot: f64,
    pub(crate) first: f64,
    pub(crate) second: f64,
}

impl Measures {
    /// Bytes on a link.
    pub(crate) const BYTES: usize = 24;

    /// Returns the products of two equally long vectors.
    pub(crate) fn of(carrier: Carrier, first: &[u8], second: &[u8]) -> Self {
        match carrier {
            Carrier::Single => measure::<f32>(first, second),
            Carrier::Double => measure::<f64>(first, second),
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (to, value) in
            bytes.as_chunks_mut().0.iter_mut().zip([self.dot, self.first, self.second])
        {
            *to = value.to_ne_bytes();
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut values = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        let mut next = || values.next().unwrap_or_default();
        Self { dot: next(), first: next(), second: next() }
    }

    /// Joins the parts of two pieces; the order of the two does not matter.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            dot: self.dot + other.dot,
            first: self.first + other.first,
            second: self.second + other.second,
        }
    }

    /// Returns the factors of the two vectors.
    fn factors(self) -> (f64, f64) {
        let factor =
            |length: f64| if length < NOTHING { 1.0 } else { 1.0 - self.dot / (2.0 * length) };
        (factor(self.first), factor(self.second))
    }

    /// Writes the sum over the first of the two vectors, or over the second.
    pub(crate) fn combine(
        self,
        carrier: Carrier,
        own: &mut [u8],
        other: &[u8],
        own_is_first: bool,
    ) {
        let (first, second) = self.factors();
        let (mine, theirs) = if own_is_first { (first, second) } else { (second, first) };
        match carrier {
            Carrier::Single => combine::<f32>(own, mine, other, theirs),
            Carrier::Double => combine::<f64>(own, mine, other, theirs),
        }
    }
}

fn measure<T: Native + Into<f64>>(first: &[u8], second: &[u8]) -> Measures {
    let (mut dots, mut firsts, mut seconds) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    for (a, b) in T::cells(first).chunks(LANES).zip(T::cells(second).chunks(LANES)) {
        for (lane, (a, b)) in a.iter().zip(b).enumerate() {
            let (a, b): (f64, f64) = (T::get(*a).into(), T::get(*b).into());
            dots[lane] += a * b;
            firsts[lane] += a * a;
            seconds[lane] += b * b;
        }
    }
    Measures { dot: dots.iter().sum(), first: firsts.iter().sum(), second: seconds.iter().sum() }
}

fn combine<T: Native + Into<f64>>(own: &mut [u8], mine: f64, other: &[u8], theirs: f64) {
    for (a, b) in T::cells_mut(own).iter_mut().zip(T::cells(other)) {
        let (x, y): (f64, f64) = (T::get(*a).into(), T::get(*b).into());
        *a = T::factor(mine * x + theirs * y).put();
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
        let measures = Measures::of(Carrier::Double, &a, &b);
        assert_eq!(Measures::from_bytes(&measures.to_bytes()), measures);
        measures.combine(Carrier::Double, &mut a, &b, true);
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
