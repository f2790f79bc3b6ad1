// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Prints the processor time of a TCP link, both ends together, for each gigabyte and for each
//! small message: one thread sends and receives, so that nothing waits and other programs of the
//! machine hardly matter. No build sends records unencrypted; `seal_speed` prints the part of the
//! encryption. `cargo run --release -p farandole-transport --features _test-harness --example
//! link_cost`
#![expect(clippy::unwrap_used, reason = "an example")]

use std::time::Duration;

use farandole_transport::Link;
use farandole_transport::link_contract::{join_meshes, open_link_pair};
use rustix::time::{ClockId, clock_gettime};

const REPETITIONS_PER_CASE: usize = 5;
const RING_BYTES: usize = 4 << 20;

fn thread_cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap())
}

/// Moves `total` bytes in messages of `bytes`, each read before the next is sent.
fn stream_messages(from: &mut Link, to: &mut Link, bytes: usize, total: usize) -> Duration {
    let started = thread_cpu_time();
    for _ in 0..total / bytes {
        let mut sent = 0;
        while sent < bytes {
            let window = from.sender.window().unwrap();
            let part = window.len().min(bytes - sent);
            from.sender.commit(part).unwrap();
            sent += part;
        }
        let mut read = 0;
        while read < bytes {
            from.sender.flush().unwrap();
            let part = to.receiver.window().unwrap().len();
            to.receiver.release(part).unwrap();
            read += part;
        }
    }
    thread_cpu_time() - started
}

fn main() {
    let meshes = join_meshes(2, |options| options.use_shared_memory = false);
    let (mut a, mut b) = open_link_pair(&meshes, 1, RING_BYTES);
    let only: Option<usize> = std::env::args().nth(1).and_then(|t| t.parse().ok());
    for (bytes, total) in [
        (64, 1 << 21),
        (1 << 10, 1 << 25),
        (64 << 10, 1 << 30),
        (1 << 20, 1 << 30),
        (4 << 20, 1 << 30),
    ] {
        if only.is_some_and(|only| only != bytes) {
            continue;
        }
        let mut shortest = Duration::MAX;
        for _ in 0..REPETITIONS_PER_CASE {
            shortest = shortest.min(stream_messages(&mut a, &mut b, bytes, total));
        }
        println!(
            "messages of {bytes:>8} bytes: {:>10.1?} each, {:.3} s for a gigabyte",
            shortest / u32::try_from(total / bytes).unwrap(),
            shortest.as_secs_f64() / (total as f64 / 1e9),
        );
    }
}
