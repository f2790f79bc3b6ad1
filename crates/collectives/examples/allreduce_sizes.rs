// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Time of an allreduce (float32, sum, in place) among threads over rings in memory, by size.
//!
//! `cargo run --release -p farandole-collectives --example allreduce_sizes [ranks] [ring KiB]
//! [tensors]`

use std::hint::spin_loop;
use std::time::Instant;

use farandole_collectives::{
    CollectiveOperation, Communicator, HostCommunicator, OperationToken, Result, TensorSegment,
};
use farandole_kernels::{DataType, HostMemory, ReduceOp};
use farandole_testkit::Harness;

const TENSOR_SIZES: [usize; 13] = [
    4,
    128,
    1 << 10,
    8 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    32 << 20,
    64 << 20,
];
/// Polls without progress before a thread yields the processor, because the thread for which it
/// waits may need the same core.
const MAX_IDLE_POLLS: u32 = 2000;

fn main() {
    let argument = |k: usize, default: usize| {
        std::env::args().nth(k).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (ranks, ring, tensors) = (argument(1, 2), argument(2, 4096) << 10, argument(3, 1));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let patience = if ranks > cores { 0 } else { MAX_IDLE_POLLS };
    println!("{ranks} ranks, rings of {} KiB, {tensors} tensors", ring >> 10);
    for bytes in TENSOR_SIZES {
        let repeats = if bytes <= 512 << 10 { 2000 } else { (512 << 20) / bytes / 4 + 5 };
        let times = Harness::new(ranks).ring(ring).run(|_, mut communicator| {
            let each = (bytes / tensors).next_multiple_of(4);
            let memory: Vec<HostMemory> = (0..tensors).map(|_| HostMemory::new(each)).collect();
            (0..repeats)
                .map(|_| time_allreduce(&mut communicator, &memory, patience))
                .collect::<Result<Vec<f64>>>()
        });
        match times.into_iter().next() {
            Some(Ok(mut times)) => {
                times.sort_by(f64::total_cmp);
                let (best, median) = (times[0], times[times.len() / 2]);
                let rate = bytes as f64 / median / 1e9;
                println!(
                    "{bytes:>9} B  best {:>9.1} us  median {:>9.1} us  {rate:>6.2} GB/s",
                    best * 1e6,
                    median * 1e6
                );
            }
            Some(Err(error)) => println!("{bytes:>9} B  {error}"),
            None => {}
        }
    }
}

/// One allreduce, in seconds.
fn time_allreduce(
    communicator: &mut HostCommunicator,
    memory: &[HostMemory],
    patience: u32,
) -> Result<f64> {
    let start = Instant::now();
    let segments = memory
        .iter()
        .map(|memory| TensorSegment { input: memory.as_buffer(), output: memory.as_buffer() })
        .collect();
    let (op, dtype) = (ReduceOp::Sum, DataType::F32);
    let operation =
        CollectiveOperation::Allreduce { dtype, op, prescale: 1.0, postscale: 1.0, segments };
    communicator.submit_operation(OperationToken(0), operation)?;
    let mut completed = Vec::new();
    let mut idle = 0;
    while completed.is_empty() {
        if communicator.make_progress(&mut completed)? {
            idle = 0;
        } else if idle < patience {
            idle += 1;
            spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
    Ok(start.elapsed().as_secs_f64())
}
