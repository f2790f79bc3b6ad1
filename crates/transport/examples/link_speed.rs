// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prints what a link between two threads of one process costs: latency of 64 bytes there and back,
//! and throughput in windows of 256 KiB. `cargo run --release -p farandole-transport --features
//! _test-harness --example link_speed`
#![expect(clippy::unwrap_used, reason = "an example")]

use std::thread;
use std::time::{Duration, Instant};

use farandole_transport::link_contract::{join_meshes, open_link_pair};
use farandole_transport::{Link, LinkKind, Parker, Result};

const MESSAGE_BYTES: usize = 64;
const ROUND_TRIPS: usize = 200_000;
const WINDOW_BYTES: usize = 256 << 10;
const TOTAL_BYTES: usize = 8 << 30;

/// Polls `spins` times, then sleeps between polls, until `bytes` are there.
fn await_bytes(link: &mut Link, parker: &Parker, bytes: usize, spins: usize) -> Result<()> {
    for _ in 0..spins {
        if link.receiver.window()?.len() >= bytes {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    loop {
        parker.prepare_park();
        link.sender.flush()?;
        if link.receiver.window()?.len() >= bytes {
            parker.cancel_park();
            return Ok(());
        }
        parker.park(Instant::now() + Duration::from_secs(10))?;
    }
}

fn measure_round_trips(
    mut link: Link,
    parker: &Parker,
    first: bool,
    spins: usize,
) -> Vec<Duration> {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let started = Instant::now();
        if !first {
            await_bytes(&mut link, parker, MESSAGE_BYTES, spins).unwrap();
            link.receiver.release(MESSAGE_BYTES).unwrap();
        }
        link.sender.window().unwrap()[..MESSAGE_BYTES].fill(1);
        link.sender.commit(MESSAGE_BYTES).unwrap();
        if first {
            await_bytes(&mut link, parker, MESSAGE_BYTES, spins).unwrap();
            link.receiver.release(MESSAGE_BYTES).unwrap();
        }
        times.push(started.elapsed());
    }
    while !link.sender.flush().unwrap() {}
    times.sort();
    times
}

/// Whole windows only: whoever takes any byte at once ends up copying crumbs.
fn send_windows(mut link: Link, total: usize) {
    let source = vec![7_u8; WINDOW_BYTES];
    for _ in 0..total / WINDOW_BYTES {
        let window = loop {
            if link.sender.window().unwrap().len() >= WINDOW_BYTES {
                break link.sender.window().unwrap();
            }
            std::hint::spin_loop();
        };
        window[..WINDOW_BYTES].copy_from_slice(&source);
        link.sender.commit(WINDOW_BYTES).unwrap();
    }
    while !link.sender.flush().unwrap() {}
}

fn receive_windows(mut link: Link, total: usize) {
    let mut target = vec![0_u8; WINDOW_BYTES];
    for _ in 0..total / WINDOW_BYTES {
        while link.receiver.window().unwrap().len() < WINDOW_BYTES {
            std::hint::spin_loop();
        }
        target.copy_from_slice(&link.receiver.window().unwrap()[..WINDOW_BYTES]);
        link.receiver.release(WINDOW_BYTES).unwrap();
    }
}

fn main() {
    for kind in [LinkKind::SharedMemory, LinkKind::Tcp] {
        let meshes =
            join_meshes(2, |options| options.use_shared_memory = kind == LinkKind::SharedMemory);
        let (park_a, park_b) = (meshes[0].parker(), meshes[1].parker());
        for (channel, spins, how) in [(1, usize::MAX, "spinning"), (2, 0, "sleeping")] {
            let (a, b) = open_link_pair(&meshes, channel, 4096);
            let times = thread::scope(|scope| {
                scope.spawn(|| measure_round_trips(b, &park_b, false, spins));
                measure_round_trips(a, &park_a, true, spins)
            });
            let (p50, p99) = (times[ROUND_TRIPS / 2], times[ROUND_TRIPS / 100 * 99]);
            println!(
                "{kind:?} {how}: {MESSAGE_BYTES} bytes there and back: p50 {p50:?}, p99 {p99:?}"
            );
        }
        let (a, b) = open_link_pair(&meshes, 3, 4 * WINDOW_BYTES);
        let total = if kind == LinkKind::Tcp { TOTAL_BYTES / 4 } else { TOTAL_BYTES };
        let started = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| receive_windows(b, total));
            send_windows(a, total);
        });
        let gigabytes = (total >> 20) as f64 / 1024.0 * 1.073_741_824;
        println!(
            "{kind:?}: {:.1} GB/s, copied in and out",
            gigabytes / started.elapsed().as_secs_f64()
        );
    }
}
