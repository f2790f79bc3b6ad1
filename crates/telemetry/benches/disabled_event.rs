// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Cost of an unwanted event, beside a relaxed load, and of one that is kept.
//!
//! `cargo bench -p farandole-telemetry --bench disabled_event`

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use farandole_config::LogLevel;
use farandole_telemetry::log;

const MANY: u32 = 50_000_000;
const FEW: u32 = 20_000;

static WORD: AtomicUsize = AtomicUsize::new(0);

/// Nanoseconds for one call, the best of five rounds.
fn best(calls: u32, mut body: impl FnMut(u32)) -> f64 {
    let round = |body: &mut dyn FnMut(u32)| {
        let started = Instant::now();
        (0..calls).for_each(&mut *body);
        started.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
    };
    (0..5).map(|_| round(&mut body)).fold(f64::INFINITY, f64::min)
}

fn main() {
    log::queue_events_for_logger(LogLevel::Warning, true);
    let nothing = best(MANY, |index| {
        black_box(index);
    });
    let load = best(MANY, |index| {
        if WORD.load(Ordering::Relaxed) > 7 {
            println!("{index}");
        }
        black_box(index);
    });
    let disabled = best(MANY, |index| {
        tracing::trace!(target: "farandole_engine", rank = index, tensor = "gradient", "submitted");
        black_box(index);
    });
    log::queue_events_for_logger(LogLevel::Trace, true);
    let kept = best(FEW, |index| {
        tracing::trace!(target: "farandole_engine", rank = index, tensor = "gradient", "submitted");
    });
    let taken = log::take_events(Duration::ZERO)
        .map_or(0, |taken| taken.events.len() as u64 + taken.dropped);
    println!("nothing          {nothing:.2} ns");
    println!("a relaxed load   {load:.2} ns");
    println!("a disabled event {disabled:.2} ns");
    println!("a kept event     {kept:.0} ns, {taken} of them");
}
