// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Random numbers from a counter. They must be the same on every machine and in every version,
//! because the order of rows depends on them.

/// The SplitMix64 generator.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

// The constants of SplitMix64 (Steele, Lea, Flood 2014). Others would change all orders of rows.
const GOLDEN_RATIO_64: u64 = 0x9E37_79B9_7F4A_7C15;

fn mix_bits(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Folds `value` into the hash `state`.
#[inline]
pub fn fold_hash(state: u64, value: u64) -> u64 {
    // Both are mixed: seeds and numbers of epochs are small and differ in few bits.
    mix_bits(state.wrapping_add(GOLDEN_RATIO_64) ^ mix_bits(value.wrapping_add(GOLDEN_RATIO_64)))
}

impl SplitMix64 {
    /// Returns the generator of this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN_RATIO_64);
        mix_bits(self.0)
    }

    /// Returns a number below `bound`, uniformly distributed; 0 if `bound` is 0.
    #[inline]
    pub fn next_below(&mut self, bound: u32) -> u32 {
        let bound64 = u64::from(bound);
        loop {
            let product = (self.next_u64() >> 32) * bound64;
            let (high, low) = (product >> 32, product & 0xFFFF_FFFF);
            // Lemire's rejection: the (2^32 mod bound) lowest low parts would make some results
            // more likely.
            if low >= bound64 || low >= (1 << 32) % bound64.max(1) {
                return u32::try_from(high).unwrap_or(u32::MAX);
            }
        }
    }
}

/// Returns a random permutation of `0..len`.
pub fn random_permutation(seed: u64, len: u32) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let mut order: Vec<u32> = (0..len).collect();
    // The direction of this loop is part of the format: the other one gives other permutations.
    for last in (1..len).rev() {
        order.swap(last as usize, rng.next_below(last + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_holds_every_number_once_and_repeats_for_its_seed() {
        for len in [0, 1, 2, 1000] {
            let mut order = random_permutation(7, len);
            assert_eq!(order, random_permutation(7, len));
            order.sort_unstable();
            assert!(order.into_iter().eq(0..len));
        }
        assert_ne!(random_permutation(7, 1000), random_permutation(8, 1000));
    }

    #[test]
    fn the_stream_never_changes() {
        let mut rng = SplitMix64::new(0);
        assert_eq!(rng.next_u64(), 0xE220_A839_7B1D_CDAF);
        assert_eq!(random_permutation(42, 8), random_permutation(42, 8));
    }

    #[test]
    fn numbers_below_a_bound_are_even() {
        let mut rng = SplitMix64::new(1);
        let mut counts = [0_u32; 7];
        for _ in 0..70_000 {
            counts[rng.next_below(7) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
        assert_eq!(rng.next_below(0), 0);
    }
}
