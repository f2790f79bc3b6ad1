// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads epochs of a data set and prints rows per second: `epoch_speed <url> [batch size] [epochs]
//! [threads]`.
#![expect(clippy::expect_used, clippy::cast_precision_loss, reason = "an example")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use farandole_reader::{NextBatch, ParquetDataset, Reader, ReaderOptions};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().expect("a URL");
    let mut number =
        |default: u64| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let (batch_size, epochs, threads) = (number(1024), number(5), number(2));
    let threads = usize::try_from(threads).expect("a small number");
    let dataset = Arc::new(ParquetDataset::open_directory(&url).expect("a data set"));
    let reader =
        Reader::new(dataset, ReaderOptions { batch_size, threads, ..ReaderOptions::default() })
            .expect("columns");
    for number in 0..epochs {
        let start = Instant::now();
        let epoch = reader.start_epoch(number, 0, None).expect("an epoch");
        let mut rows = 0;
        while let NextBatch::Batch(batch) =
            epoch.next_batch(Duration::from_secs(60)).expect("a batch")
        {
            rows += batch.valid_rows();
        }
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "epoch {number}: {rows} rows in {:.1} ms, {:.2} M rows/s",
            seconds * 1e3,
            rows as f64 / seconds / 1e6
        );
    }
}
