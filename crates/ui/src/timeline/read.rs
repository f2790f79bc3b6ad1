// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The file of one rank, a record on each line.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::operation::{OperationKey, OperationPart};
use crate::error::{Result, timeline_error};

/// The track of changes of process sets, such as the one of `init()`: no step waits for them.
const PROCESS_SETS_TRACK: &str = "process_sets";

/// The suffix of the file with the earlier part of a rank's timeline, if files are bounded.
const OLD_FILE_SUFFIX: &str = ".old";
/// Ranks of a job at most.
// The summary lists missing ranks, so a damaged number would fill the memory.
const MAX_RANKS: u32 = 1 << 20;
/// Microseconds from the epoch, and from a file's begin, at most: some two thousand years. Sums and
/// differences of a few times and clock shifts cannot overflow.
const MAX_ABSOLUTE_TIME_US: u64 = 1 << 56;
/// Bytes of a record at most: a line is held in memory.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// A record of the file.
#[derive(Deserialize)]
pub(super) struct TraceRecord<'a> {
    #[serde(default, borrow)]
    pub(super) name: Option<std::borrow::Cow<'a, str>>,
    pub(super) ph: std::borrow::Cow<'a, str>,
    #[serde(default)]
    pub(super) ts: i64,
    pub(super) pid: u32,
    #[serde(default, borrow)]
    pub(super) args: Option<&'a RawValue>,
}

/// The content of a first record.
#[derive(Deserialize)]
struct TraceHeaderArguments {
    #[serde(rename = "start_time_since_epoch_in_micros")]
    start: i64,
    rank: u32,
    #[serde(default)]
    host: String,
    /// From when on the file has all events.
    #[serde(default)]
    since: i64,
    #[serde(default)]
    size: u32,
    #[serde(default)]
    generation: u64,
}

#[derive(Deserialize)]
struct TrackNameArgs {
    name: String,
}

#[derive(Deserialize)]
struct ResponseListNumberArgs {
    list: u64,
}

/// A rank's file, whose first record was read.
pub(super) struct RankTrace {
    pub(super) path: PathBuf,
    pub(super) rank: u32,
    pub(super) host: String,
    /// Time of its clock at its time 0, in microseconds since the epoch.
    pub(super) start: i64,
    /// The time before which no event is in a file, because it was dropped to keep the file small.
    pub(super) since: i64,
    /// Number of ranks; 0 where the file does not say.
    pub(super) size: u32,
    /// Number of the world of an elastic job.
    pub(super) generation: u64,
}

/// An operation of a track that has begun and not ended.
#[derive(Default)]
struct OpenOperation {
    begun: Option<i64>,
    list: Option<u64>,
}

impl RankTrace {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut title = None;
        for_each_record_with_old(path, |record| {
            if title.is_none() {
                title = record
                    .args
                    .and_then(|args| serde_json::from_str::<TraceHeaderArguments>(args.get()).ok());
                // A title is a metadata record at the begin: a large file of another program is not
                // read to its end.
                return Ok(title.is_none() && record.ph == "M");
            }
            Ok(false)
        })?;
        let Some(TraceHeaderArguments { start, rank, host, since, size, generation }) = title
        else {
            let reason = "it is no timeline of this version: its first record does not name a rank"
                .to_owned();
            return Err(timeline_error(path, reason));
        };
        if size > MAX_RANKS {
            return Err(timeline_error(
                path,
                format!("it is of a job of size {size}; {MAX_RANKS} is the most"),
            ));
        }
        if size > 0 && rank >= size {
            return Err(timeline_error(path, format!("it is of rank {rank} of {size} ranks")));
        }
        if start.unsigned_abs() > MAX_ABSOLUTE_TIME_US
            || since.unsigned_abs() > MAX_ABSOLUTE_TIME_US
        {
            return Err(timeline_error(
                path,
                format!("it begins at {start} us, {since} us; no clock has such a time"),
            ));
        }
        Ok(Self { path: path.to_owned(), rank, host, start, since, size, generation })
    }

    /// Calls `take` with each record until it returns false.
    pub(super) fn for_each_record(
        &self,
        take: impl FnMut(TraceRecord<'_>) -> Result<bool>,
    ) -> Result<()> {
        for_each_record_with_old(&self.path, take)
    }

    /// Returns the operations that this rank has completed.
    pub(super) fn completed_operations(&self) -> Result<Vec<(OperationKey, OperationPart)>> {
        let mut all = Vec::new();
        let mut tracks: HashMap<u32, (String, OpenOperation)> = HashMap::new();
        let own = self.rank.to_string();
        self.for_each_record(|record| {
            if let (Some(name), Some(tensor)) = (&record.name, track_name(&record))
                && name == "process_name"
            {
                // A file that continues another one names its tracks again.
                tracks.entry(record.pid).or_insert_with(|| (tensor, OpenOperation::default()));
                return Ok(true);
            }
            let Some((tensor, open)) = tracks.get_mut(&record.pid) else { return Ok(true) };
            if tensor == PROCESS_SETS_TRACK {
                return Ok(true);
            }
            match &*record.ph {
                "X" if record.name.as_deref() == Some(own.as_str()) => open.begun = Some(record.ts),
                "B" => {
                    if let Some(list) = response_list_number(&record) {
                        open.list = Some(list);
                    }
                }
                // Only an operation that succeeded has its output in the arguments.
                "E" if record.args.is_some() => {
                    if let OpenOperation { begun: Some(begun), list: Some(list) } =
                        std::mem::take(open)
                    {
                        let part = OperationPart {
                            rank: self.rank,
                            begun: self.start + begun,
                            ended: self.start + record.ts,
                        };
                        all.push(((tensor.clone(), list), part));
                    }
                }
                _ => {}
            }
            Ok(true)
        })?;
        Ok(all)
    }
}

/// Returns the name of the track that a record introduces.
pub(super) fn track_name(record: &TraceRecord<'_>) -> Option<String> {
    let args = record.args.filter(|_| record.ph == "M")?;
    serde_json::from_str::<TrackNameArgs>(args.get()).ok().map(|named| named.name)
}

/// Returns the list that an operation began in.
pub(super) fn response_list_number(record: &TraceRecord<'_>) -> Option<u64> {
    serde_json::from_str::<ResponseListNumberArgs>(record.args?.get())
        .ok()
        .map(|listed| listed.list)
}

/// Calls `take` with the older records, if they are in their own file, and then with the records of
/// the file.
fn for_each_record_with_old(
    path: &Path,
    mut take: impl FnMut(TraceRecord<'_>) -> Result<bool>,
) -> Result<()> {
    let mut old = path.as_os_str().to_owned();
    old.push(OLD_FILE_SUFFIX);
    let old = PathBuf::from(old);
    let has_old = old.try_exists().map_err(|error| timeline_error(&old, error.to_string()))?;
    if has_old && !visit_records_of_file(&old, &mut take)? {
        return Ok(());
    }
    visit_records_of_file(path, &mut take).map(drop)
}

/// Returns whether `take` wants more.
fn visit_records_of_file(
    path: &Path,
    take: &mut impl FnMut(TraceRecord<'_>) -> Result<bool>,
) -> Result<bool> {
    let file = File::open(path).map_err(|error| timeline_error(path, error.to_string()))?;
    let mut reader = BufReader::with_capacity(1 << 18, file);
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        let read = reader.by_ref().take(MAX_RECORD_BYTES).read_until(b'\n', &mut line);
        number += 1;
        if read.map_err(|error| timeline_error(path, error.to_string()))? == 0 {
            return Ok(true);
        }
        match parse_record(&line) {
            Ok(Some(record)) => {
                if !take(record)? {
                    return Ok(false);
                }
            }
            // Pieces of two files may have been put together.
            Ok(None) => {}
            // The last line of a process that was killed while it wrote.
            Err(_) if !line.ends_with(b"\n") && (line.len() as u64) < MAX_RECORD_BYTES => {
                return Ok(true);
            }
            Err(reason) => {
                return Err(timeline_error(
                    path,
                    format!("line {number} is no record of a timeline: {reason}"),
                ));
            }
        }
    }
}

/// Returns the record of a line, if it has one; or why it is none.
fn parse_record(line: &[u8]) -> std::result::Result<Option<TraceRecord<'_>>, String> {
    let text = std::str::from_utf8(line).map_err(|error| error.to_string())?;
    // The file is one JSON array with a record on each line.
    let text = text.trim().trim_end_matches(',');
    if matches!(text, "" | "[" | "]") {
        return Ok(None);
    }
    let record: TraceRecord<'_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if record.ts.unsigned_abs() > MAX_ABSOLUTE_TIME_US {
        return Err(format!("no event is at {} us", record.ts));
    }
    Ok(Some(record))
}
