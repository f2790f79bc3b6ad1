// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prints what a link between two threads of one process costs: latency of 64 bytes there and back,
//! and throughput in windows of 256 KiB. `cargo run --release -p farandole-transport --features
//! _test-harness --example link_speed`
#![expect(clippy::unwrap_used, reason = "an example")]

use std::thread;
use std::time::{Duration, Instant};

use farandole_transport::contract::{meshes, open_pair};
use farandole_transport::{Link, LinkKind, Parker, Result};

const MESSAGE: usize = 64;
const ROUNDS: usize = 200_000;
const WINDOW: usize = 256 << 10;
const TOTAL: usize = 8 << 30;

/// Polls `spins` times, then sleeps between polls, until `bytes` are there.
fn await_bytes(link: &mut Link, parker: &Parker, bytes: usize, spins: usize) -> Result<()> {
    for _ in 0..spins {
        if link.receiver.window()?.len() >= bytes {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    loop {
        parker.prepare();
        link.sender.flush()?;
        if link.receiver.window()?.len() >= bytes {
            parker.cancel();
            return Ok(());
        }
        parker.park(Instant::now() + Duration::from_secs(10))?;
    }
}

fn bounce(mut link: Link, parker: &Parker, first: bool, spins: usize) -> Vec<Duration> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        if !first {
            await_bytes(&mut link, parker, MESSAGE, spins).unwrap();
            link.receiver.release(MESSAGE).unwrap();
        }
        link.sender.window().unwrap()[..MESSAGE].fill(1);
        link.sender.commit(MESSAGE).unwrap();
        if first {
            await_bytes(&mut link, parker, MESSAGE, spins).unwrap();
            link.receiver.release(MESSAGE).unwrap();
        }
        times.push(started.elapsed());
    }
    while !link.sender.flush().unwrap() {}
    times.sort();
    times
}

/// Whole windows only: whoever takes any byte at once ends up copying crumbs.
fn stream(mut link: Link, total: usize) {
    let source = vec![7_u8; WINDOW];
    for _ in 0..total / WINDOW {
        let window = loop {
            if link.sender.window().unwrap().len() >= WINDOW {
                break link.sender.window().unwrap();
            }
            std::hint::spin_loop();
        };
        window[..WINDOW].copy_from_slice(&source);
        link.sender.commit(WINDOW).unwrap();
    }
    while !link.sender.flush().unwrap() {}
}

fn drain(mut link: Link, total: usize) {
    let mut target = vec![0_u8; WINDOW];
    for _ in 0..total / WINDOW {
        while link.receiver.window().unwrap().len() < WINDOW {
            std::hint::spin_loop();
        }
        target.copy_from_slice(&link.receiver.window().unwrap()[..WINDOW]);
        link.receiver.release(WINDOW).unwrap();
    }
}

fn main() {
    for kind in [LinkKind::SharedMemory, LinkKind::Tcp] {
        let meshes =
            meshes(2, |options| options.use_shared_memory = kind == LinkKind::SharedMemory);
        let (park_a, park_b) = (meshes[0].parker(), meshes[1].parker());
        for (channel, spins, how) in [(1, usize::MAX, "spinning"), (2, 0, "sleeping")] {
            let (a, b) = open_pair(&meshes, channel, 4096);
            let times = thread::scope(|scope| {
                scope.spawn(|| bounce(b, &park_b, false, spins));
                bounce(a, &park_a, true, spins)
            });
            let (p50, p99) = (times[ROUNDS / 2], times[ROUNDS / 100 * 99]);
            println!("{kind:?} {how}: {MESSAGE} bytes there and back: p50 {p50:?}, p99 {p99:?}");
        }
        let (a, b) = open_pair(&meshes, 3, 4 * WINDOW);
        let total = if kind == LinkKind::Tcp { TOTAL / 4 } else { TOTAL };
        let started = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| drain(b, total));
            stream(a, total);
        });
        let gigabytes = (total >> 20) as f64 / 1024.0 * 1.073_741_824;
        println!(
            "{kind:?}: {:.1} GB/s, copied in and out",
            gigabytes / started.elapsed().as_secs_f64()
        );
    }
}
