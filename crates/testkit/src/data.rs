// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Seeded tensors.

use farandole_kernels::DataType;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::float8;
use crate::rounding::single;

/// The seed of data: equal seeds give equal bytes, everywhere and always.
pub type Seed = u64;

/// `count` elements of ordinary size, as bytes. Floats spread over a few orders of magnitude, so
/// that the order of summation shows; integers over their whole range; booleans are 0 or 1.
pub fn elements(dtype: DataType, count: usize, seed: Seed) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = Vec::with_capacity(count * dtype.element_size());
    for _ in 0..count {
        element(dtype, &mut random, &mut bytes);
    }
    bytes
}

/// Like [`elements`], with zeros of both signs, infinities, NaNs, subnormals and extremes among the
/// floats.
pub fn special_elements(dtype: DataType, count: usize, seed: Seed) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = Vec::with_capacity(count * dtype.element_size());
    for _ in 0..count {
        if random.random_bool(0.5) {
            element(dtype, &mut random, &mut bytes);
        } else {
            special(dtype, &mut random, &mut bytes);
        }
    }
    bytes
}

fn float(random: &mut StdRng) -> f64 {
    let magnitude = 2_f64.powi(random.random_range(-6..6));
    magnitude * random.random_range(-1.0..1.0)
}

fn element(dtype: DataType, random: &mut StdRng, bytes: &mut Vec<u8>) {
    match dtype {
        DataType::F16 => bytes.extend(f16::from_f64(float(random)).to_ne_bytes()),
        DataType::Bf16 => bytes.extend(bf16::from_f64(float(random)).to_ne_bytes()),
        DataType::F8E4M3 | DataType::F8E5M2 => {
            bytes.push(float8::encode(dtype, single(float(random))))
        }
        DataType::F32 => bytes.extend(single(float(random)).to_ne_bytes()),
        DataType::F64 => bytes.extend(float(random).to_ne_bytes()),
        DataType::C64 => {
            bytes.extend(single(float(random)).to_ne_bytes());
            bytes.extend(single(float(random)).to_ne_bytes());
        }
        DataType::C128 => {
            bytes.extend(float(random).to_ne_bytes());
            bytes.extend(float(random).to_ne_bytes());
        }
        DataType::Bool => bytes.push(u8::from(random.random_bool(0.5))),
        _ => bytes
            .extend(std::iter::repeat_with(|| random.random::<u8>()).take(dtype.element_size())),
    }
}

fn special(dtype: DataType, random: &mut StdRng, bytes: &mut Vec<u8>) {
    const VALUES: [f64; 12] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        65504.0,
        65520.0,
        5.960_464_477_539_063e-8, // the smallest half
        1e-40,
        3.4e38,
    ];
    let mut value = || VALUES[random.random_range(0..VALUES.len())];
    match dtype {
        DataType::F16 => bytes.extend(f16::from_f64(value()).to_ne_bytes()),
        DataType::Bf16 => bytes.extend(bf16::from_f64(value()).to_ne_bytes()),
        DataType::F32 => bytes.extend(single(value()).to_ne_bytes()),
        DataType::F64 => bytes.extend(value().to_ne_bytes()),
        // As it happens: few codes are not special.
        DataType::F8E4M3 | DataType::F8E5M2 => bytes.push(random.random()),
        _ => element(dtype, random, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_bytes_of_the_right_length() {
        for dtype in DataType::ALL {
            let first = elements(dtype, 100, 7);
            assert_eq!(first.len(), 100 * dtype.element_size());
            assert_eq!(first, elements(dtype, 100, 7));
            assert_ne!(first, elements(dtype, 100, 8));
            assert_eq!(special_elements(dtype, 100, 7).len(), 100 * dtype.element_size());
        }
    }
}
