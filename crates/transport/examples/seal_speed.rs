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

const REPETITIONS_PER_CASE: usize = 3;
/// As long as a record's.
const RECORD_HEADER: [u8; 16] = [1; 16];

fn record_nonce(record: usize) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&(record as u64).to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Processor seconds of this thread so far.
fn thread_cpu_seconds() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// GB/s of the fastest turn of as many calls as move 512 MiB.
fn measure_throughput(bytes: usize, mut call: impl FnMut(usize)) -> f64 {
    let records = (1 << 29) / bytes.max(4096);
    let turn = |_| {
        let started = thread_cpu_seconds();
        (0..records).for_each(&mut call);
        thread_cpu_seconds() - started
    };
    (records * bytes) as f64
        / (0..REPETITIONS_PER_CASE).map(turn).fold(f64::INFINITY, f64::min)
        / 1e9
}

/// Sealing, opening and authenticating only. What is opened does not open, which is found out at
/// the end only.
fn measure_ring_cipher(suite: &'static Algorithm, payload: &mut [u8]) -> [f64; 3] {
    let bytes = payload.len();
    let key = LessSafeKey::new(UnboundKey::new(suite, &vec![7; suite.key_len()]).unwrap());
    let aad = || Aad::from(RECORD_HEADER);
    let seal = measure_throughput(bytes, |record| {
        black_box(
            key.seal_in_place_separate_tag(record_nonce(record), aad(), payload).unwrap().as_ref(),
        );
    });
    let open = measure_throughput(bytes, |record| {
        let opened = key.open_in_place_separate_tag(
            record_nonce(record),
            aad(),
            [0; 16].into(),
            payload,
            0..,
        );
        black_box(opened.is_ok());
    });
    let authenticate = measure_throughput(bytes, |record| {
        let aad = Aad::from(&payload[..]);
        black_box(
            key.seal_in_place_separate_tag(record_nonce(record), aad, &mut []).unwrap().as_ref(),
        );
    });
    [seal, open, authenticate]
}

/// The same. What does not open is cleared, which takes time; so here one record is opened again
/// and again.
#[cfg(target_arch = "x86_64")]
fn measure_aegis_cipher(payload: &mut [u8]) -> [f64; 3] {
    use aegis::aegis128x2::{Aegis128X2, Aegis128X2Mac};
    let bytes = payload.len();
    let cipher = |record: usize| {
        let mut nonce = [0; 16];
        nonce[8..].copy_from_slice(&(record as u64).to_le_bytes());
        Aegis128X2::<16>::new(&[7; 16], &nonce)
    };
    let seal = measure_throughput(bytes, |record| {
        black_box(cipher(record).encrypt_in_place(payload, &RECORD_HEADER));
    });
    let (mut sealed, mut opened) = (payload.to_vec(), vec![0; bytes]);
    let tag = cipher(0).encrypt_in_place(&mut sealed, &RECORD_HEADER);
    let open = measure_throughput(bytes, |_| {
        let mut decryptor = cipher(0).decryptor(&RECORD_HEADER, &mut opened);
        decryptor.update(&sealed).unwrap();
        black_box(decryptor.finalize(&tag).is_ok());
    });
    let authenticate = measure_throughput(bytes, |_| {
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
            ("AES-128-GCM", measure_ring_cipher(&AES_128_GCM, &mut payload)),
            ("AES-256-GCM", measure_ring_cipher(&AES_256_GCM, &mut payload)),
            ("ChaCha20-Poly1305", measure_ring_cipher(&CHACHA20_POLY1305, &mut payload)),
        ];
        #[cfg(target_arch = "x86_64")]
        rows.push(("AEGIS-128X2", measure_aegis_cipher(&mut payload)));
        for (name, [seal, open, authenticate]) in rows {
            println!("{name:<18} {bytes:>8} {seal:>12.2} {open:>12.2} {authenticate:>22.2}");
        }
    }
}
