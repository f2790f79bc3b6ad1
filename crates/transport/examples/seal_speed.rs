// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prints what it costs to seal and to open records on this machine, and to authenticate them only, as the library that
//! links use does it: the reason why links encrypt everything. `cargo run --release -p farandole-transport --example
//! seal_speed`
#![expect(clippy::unwrap_used, reason = "an example")]

use std::hint::black_box;
use std::time::Instant;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};

const TURNS: usize = 3;
/// A header's.
const HEADER: [u8; 4] = [1; 4];

fn nonce(record: usize) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&(record as u64).to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Seconds of the fastest turn of `records` calls.
fn fastest(records: usize, mut call: impl FnMut(usize)) -> f64 {
    let turn = |_| {
        let started = Instant::now();
        (0..records).for_each(&mut call);
        started.elapsed().as_secs_f64()
    };
    (0..TURNS).map(turn).fold(f64::INFINITY, f64::min)
}

fn main() {
    let suites: [(&str, &'static Algorithm); 3] = [
        ("AES-128-GCM", &AES_128_GCM),
        ("AES-256-GCM", &AES_256_GCM),
        ("ChaCha20-Poly1305", &CHACHA20_POLY1305),
    ];
    println!("{:<18} {:>8} {:>12} {:>12} {:>22}", "GB/s", "bytes", "seal", "open", "authenticate only");
    for (name, suite) in suites {
        let key = LessSafeKey::new(UnboundKey::new(suite, &vec![7; suite.key_len()]).unwrap());
        for bytes in [64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
            let records = (1 << 29) / bytes.max(4096);
            let mut payload = vec![1; bytes];
            let sealing = fastest(records, |record| {
                let aad = Aad::from(HEADER);
                let tag = key.seal_in_place_separate_tag(nonce(record), aad, &mut payload).unwrap();
                black_box(tag.as_ref());
            });
            // It does not open, which is found out at the end only.
            let opening = fastest(records, |record| {
                let tag = [0; 16].into();
                let opened =
                    key.open_in_place_separate_tag(nonce(record), Aad::from(HEADER), tag, &mut payload, 0..);
                black_box(opened.is_ok());
            });
            let authenticating = fastest(records, |record| {
                let aad = Aad::from(&payload[..]);
                let tag = key.seal_in_place_separate_tag(nonce(record), aad, &mut []).unwrap();
                black_box(tag.as_ref());
            });
            let speed = |seconds: f64| (records * bytes) as f64 / seconds / 1e9;
            let (sealed, opened, only) = (speed(sealing), speed(opening), speed(authenticating));
            println!("{name:<18} {bytes:>8} {sealed:>12.2} {opened:>12.2} {only:>22.2}");
        }
    }
}
