// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Timelines that arrive in pieces from the agents of a job.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tempfile::TempDir;

use super::read::RankTrace;
use super::{BrokenTracePolicy, TimelineSummary, merge_traces};
use crate::error::{Result, timeline_error};

/// Kind of the records that carry pieces.
pub const TIMELINE_RECORD_KIND: &str = "timeline";

/// The limit for all timelines together, so that no worker fills the disk of the driver: 16 times
/// the default limit for the timelines of the ranks.
const MAX_TIMELINES_BYTES: u64 = 4 << 30;

/// The header of a piece, on a line before its bytes.
#[derive(Deserialize)]
struct PieceHeader {
    offset: u64,
    size: u64,
}

struct ArrivingTimeline {
    file: File,
    bytes: u64,
    size: u64,
}

/// The pieces that have arrived, in a folder that is deleted when this is dropped.
pub struct TimelinePieces {
    folder: TempDir,
    /// By task and not by rank, because a later world may give a rank to another worker.
    files: BTreeMap<u32, ArrivingTimeline>,
    /// Bytes that may still come.
    pub(super) bytes_left: u64,
}

impl TimelinePieces {
    /// Creates an empty collection.
    ///
    /// # Errors
    /// `Timeline` if there is no room for a folder.
    pub fn new() -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        // Other users of the host must not read it, whatever the umask.
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
        let made = builder.prefix("farandole-timeline-").tempdir();
        let folder =
            made.map_err(|error| timeline_error(Path::new("timeline"), error.to_string()))?;
        Ok(Self { folder, files: BTreeMap::new(), bytes_left: MAX_TIMELINES_BYTES })
    }

    /// Takes a piece of the timeline of a task's worker. Records that are no pieces, or beyond the
    /// size stated by the first one, are ignored, and so is everything once the files have 4 GiB.
    ///
    /// # Errors
    /// `Timeline` if it cannot be written.
    pub fn add_piece(&mut self, task: u32, piece: &[u8]) -> Result<()> {
        let Some(end) = piece.iter().position(|byte| *byte == b'\n') else { return Ok(()) };
        let (head, bytes) = (&piece[..end], &piece[end + 1..]);
        let Ok(PieceHeader { offset, size }) = serde_json::from_slice(head) else { return Ok(()) };
        let path = self.task_timeline_path(task);
        let failed = |error: std::io::Error| timeline_error(&path, error.to_string());
        if offset == 0 {
            let file = File::create(&path).map_err(failed)?;
            if let Some(before) = self.files.insert(task, ArrivingTimeline { file, bytes: 0, size })
            {
                // A worker that starts again sends another timeline, which replaces the first one.
                self.bytes_left += before.bytes;
            }
        }
        let Some(arriving) = self.files.get_mut(&task) else { return Ok(()) };
        // After a gap the rest has no use: a trace is read from its beginning.
        let more = bytes.len() as u64;
        let fits = more <= self.bytes_left && more <= arriving.size - arriving.bytes;
        if offset == arriving.bytes && fits {
            arriving.file.write_all_at(bytes, offset).map_err(failed)?;
            arriving.bytes += more;
            self.bytes_left -= more;
        }
        Ok(())
    }

    /// Merges the received pieces. Timelines that cannot be read are left out; their ranks are
    /// incomplete.
    ///
    /// # Errors
    /// `Timeline` if no timeline can be read, two of the last world have the same rank, or the
    /// trace cannot be written.
    pub fn merge_pieces(&self, output: &Path) -> Result<TimelineSummary> {
        let (mut traces, mut cut) = (Vec::new(), Vec::new());
        let mut failure = None;
        for (task, file) in &self.files {
            match RankTrace::open(&self.task_timeline_path(*task)) {
                Ok(trace) => {
                    if file.bytes != file.size {
                        cut.push((trace.generation, trace.rank));
                    }
                    traces.push(trace);
                }
                Err(error) => failure = Some(error),
            }
        }
        let Some(last) = traces.iter().map(|trace| trace.generation).max() else {
            let none = || timeline_error(output, "no worker has sent its timeline".to_owned());
            return Err(failure.unwrap_or_else(none));
        };
        let mut summary = merge_traces(traces, output, BrokenTracePolicy::Skip)?;
        // A rank of an earlier world may be another worker now, or none.
        for (_, rank) in cut.into_iter().filter(|(generation, _)| *generation == last) {
            if !summary.incomplete.contains(&rank) {
                summary.incomplete.push(rank);
            }
        }
        summary.incomplete.sort_unstable();
        Ok(summary)
    }

    fn task_timeline_path(&self, task: u32) -> PathBuf {
        self.folder.path().join(format!("{task}.json"))
    }
}
