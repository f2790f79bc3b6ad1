// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Reads what others wrote, with little memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use farandole_fuzz::{Limit, Random};
use farandole_reader::{Error, FillValue, NextBatch, ParquetDataset, Reader, ReaderOptions};

/// No case may take longer: the files have a few kilobytes.
const LONGEST: Duration = Duration::from_secs(20);
/// No batch may be waited for longer, on a busy machine either.
const PATIENCE: Duration = Duration::from_secs(300);
/// Limit of the reader for decoded rows, in bytes.
pub(crate) const BUDGET: u64 = 64 << 20;
/// Batches of a case at most: a file may say that it has rows without end, each of them the same.
const BATCHES: usize = 200;

/// Reads a data set, or `BATCHES` of it; how many rows there were.
pub(crate) fn read(url: &str, columns: &[&str], random: &mut Random) -> Result<usize, Error> {
    let limit = Limit::of(LONGEST);
    let found = rows(url, columns, random);
    limit.check();
    found
}

fn rows(url: &str, columns: &[&str], random: &mut Random) -> Result<usize, Error> {
    let dataset = Arc::new(ParquetDataset::open_directory(url)?);
    let options = ReaderOptions {
        columns: (random.below(2) == 0)
            .then(|| columns.iter().map(|name| (*name).to_owned()).collect()),
        batch_size: 64,
        threads: 1 + random.below(2),
        shuffle: random.below(2) > 0,
        byte_budget: BUDGET,
        fill: HashMap::from([("*".to_owned(), FillValue::Integer(0))]),
        ..ReaderOptions::default()
    };
    let epoch = Reader::new(dataset, options)?.start_epoch(0, 0, None)?;
    let mut rows = 0;
    for _ in 0..BATCHES {
        match epoch.next_batch(PATIENCE)? {
            NextBatch::Batch(batch) => rows += batch.valid_rows(),
            NextBatch::End => break,
            NextBatch::Pending => unreachable!("nothing within {PATIENCE:?}"),
        }
    }
    Ok(rows)
}

/// The library panics on some files; the reader makes that an error, and its words are of no
/// interest here.
pub(crate) fn hush() {
    std::panic::set_hook(Box::new(|info| {
        if std::thread::current().name().is_some_and(|name| !name.starts_with("fd-")) {
            eprintln!("{info}");
        }
    }));
}
