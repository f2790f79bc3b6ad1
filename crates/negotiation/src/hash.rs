// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! A fast hash for tensor names and handles, which are not chosen by attackers.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// Map with the fast hash.
pub type FastHashMap<K, V> = HashMap<K, V, BuildHasherDefault<FastHasher>>;
/// Set with the fast hash.
pub type FastHashSet<K> = HashSet<K, BuildHasherDefault<FastHasher>>;

/// Hasher that takes eight bytes at a time: rotate, exclusive or, multiply.
#[derive(Clone, Copy, Debug, Default)]
pub struct FastHasher(u64);

impl FastHasher {
    fn mix_word(&mut self, word: u64) {
        // The odd constant is 2^64 divided by the golden ratio: it spreads each bit to higher ones,
        // and an odd factor loses none.
        self.0 = (self.0.rotate_left(26) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.mix_word(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        // Without the length, texts that differ only in zero bytes at the end would collide.
        self.mix_word(u64::from_le_bytes(last) ^ ((bytes.len() as u64) << 56));
    }

    fn write_u64(&mut self, word: u64) {
        self.mix_word(word);
    }

    fn finish(&self) -> u64 {
        // A product has its best bits at the top, and hash tables take their index from the low
        // ones.
        self.0 ^ (self.0 >> 29)
    }
}

/// Returns a hash of a list of names; never 0.
pub fn hash_names<'a>(names: impl Iterator<Item = &'a str>) -> u64 {
    // Ranks compare this hash, so it has no random seed. `write` mixes in the length of each name,
    // so the list `ab`, `c` differs from `a`, `bc`.
    let mut hash = FastHasher::default();
    for name in names {
        hash.write(name.as_bytes());
    }
    // 0 stands for a request outside of a group.
    hash.finish().max(1)
}
