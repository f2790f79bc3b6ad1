// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prints how fast a core of this machine seals and opens records, and authenticates them only, in
//! processor time, as the libraries that links use does it: the reason why links encrypt
//! everything. `cargo run --release -p farandole-transport --example seal_speed`
#![expect(clippy::unwrap_used, reason = "an example")]

use std::hint::black_box;

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustix::time::{ClockId, clock_gettime};

const TURNS: usize = 3;
/// As long as a record's.
const HEADER: [u8; 16] = [1; 16];

fn nonce(record: usize) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&(record as u64).to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Processor seconds of this thread so far.
fn spent() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// GB/s of the fastest turn of as many calls as move 512 MiB.
fn speed(bytes: usize, mut call: impl FnMut(usize)) -> f64 {
    let records = (1 << 29) / bytes.max(4096);
    let turn = |_| {
        let started = spent();
        (0..records).for_each(&mut call);
        spent() - started
    };
    (records * bytes) as f64 / (0..TURNS).map(turn).fold(f64::INFINITY, f64::min) / 1e9
}

/// Sealing, opening and authenticating only. What is opened does not open, which is found out at
/// the end only.
fn of_ring(suite: &'static Algorithm, payload: &mut [u8]) -> [f64; 3] {
    let bytes = payload.len();
    let key = LessSafeKey::new(UnboundKey::new(suite, &vec![7; suite.key_len()]).unwrap());
    let aad = || Aad::from(HEADER);
    let seal = speed(bytes, |record| {
        black_box(key.seal_in_place_separate_tag(nonce(record), aad(), payload).unwrap().as_ref());
    });
    let open = speed(bytes, |record| {
        let opened =
            key.open_in_place_separate_tag(nonce(record), aad(), [0; 16].into(), payload, 0..);
        black_box(opened.is_ok());
    });
    let authenticate = speed(bytes, |record| {
        let aad = Aad::from(&payload[..]);
        black_box(key.seal_in_place_separate_tag(nonce(record), aad, &mut []).unwrap().as_ref());
    });
    [seal, open, authenticate]
}

/// The same. What does not open is cleared, which takes time; so here one record is opened again
/// and again.
#[cfg(target_arch = "x86_64")]
fn of_aegis(payload: &mut [u8]) -> [f64; 3] {
    use aegis::aegis128x2::{Aegis128X2, Aegis128X2Mac};
    let bytes = payload.len();
    let cipher = |record: usize| {
        let mut nonce = [0; 16];
        nonce[8..].copy_from_slice(&(record as u64).to_le_bytes());
        Aegis128X2::<16>::new(&[7; 16], &nonce)
    };
    let seal = speed(bytes, |record| {
        black_box(cipher(record).encrypt_in_place(payload, &HEADER));
    });
    let (mut sealed, mut opened) = (payload.to_vec(), vec![0; bytes]);
    let tag = cipher(0).encrypt_in_place(&mut sealed, &HEADER);
    let open = speed(bytes, |_| {
        let mut decryptor = cipher(0).decryptor(&HEADER, &mut opened);
        decryptor.update(&sealed).unwrap();
        black_box(decryptor.finalize(&tag).is_ok());
    });
    let authenticate = speed(bytes, |_| {
        let mut mac = Aegis128X2Mac::<16>::new(&[7; 16]);
        mac.update(payload);
        black_box(mac.finalize());
    });
    [seal, open, authenticate]
}

fn main() {
    println!(
        "{:<18} {:>8} {:>12} {:>12} {:>22}",
        "GB/s", "bytes", "seal", "open", "authenticate only"
    );
    for bytes in [64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let mut payload = vec![1; bytes];
        let mut rows = vec![
            ("AES-128-GCM", of_ring(&AES_128_GCM, &mut payload)),
            ("AES-256-GCM", of_ring(&AES_256_GCM, &mut payload)),
            ("ChaCha20-Poly1305", of_ring(&CHACHA20_POLY1305, &mut payload)),
        ];
        #[cfg(target_arch = "x86_64")]
        rows.push(("AEGIS-128X2", of_aegis(&mut payload)));
        for (name, [seal, open, authenticate]) in rows {
            println!("{name:<18} {bytes:>8} {seal:>12.2} {open:>12.2} {authenticate:>22.2}");
        }
    }
}
