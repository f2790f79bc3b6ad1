// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Timelines that arrive in pieces from the agents of a job.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tempfile::TempDir;

use super::read::Trace;
use super::{Summary, merge, refused};
use crate::error::Result;

/// Kind of the records that carry pieces.
pub const KIND: &str = "timeline";

/// What comes before a piece's bytes, on a line.
#[derive(Deserialize)]
struct Head {
    offset: u64,
    size: u64,
}

struct Arriving {
    file: File,
    bytes: u64,
    size: u64,
}

/// The pieces that have arrived, in a folder that goes with this.
pub struct Pieces {
    folder: TempDir,
    /// By the worker's task: a rank may be another worker's later.
    files: BTreeMap<u32, Arriving>,
}

impl Pieces {
    /// None yet.
    ///
    /// # Errors
    /// `Timeline` if there is no room for a folder.
    pub fn new() -> Result<Self> {
        let made = tempfile::Builder::new().prefix("farandole-timeline-").tempdir();
        let folder = made.map_err(|error| refused(Path::new("timeline"), error.to_string()))?;
        Ok(Self { folder, files: BTreeMap::new() })
    }

    /// Takes a piece of the timeline of a task's worker. What is no piece is left.
    ///
    /// # Errors
    /// `Timeline` if it cannot be written.
    pub fn take(&mut self, task: u32, piece: &[u8]) -> Result<()> {
        let Some(end) = piece.iter().position(|byte| *byte == b'\n') else { return Ok(()) };
        let (head, bytes) = (&piece[..end], &piece[end + 1..]);
        let Ok(Head { offset, size }) = serde_json::from_slice(head) else { return Ok(()) };
        let path = self.path(task);
        let failed = |error: std::io::Error| refused(&path, error.to_string());
        if offset == 0 {
            let file = File::create(&path).map_err(failed)?;
            self.files.insert(task, Arriving { file, bytes: 0, size });
        }
        let Some(arriving) = self.files.get_mut(&task) else { return Ok(()) };
        // After a gap the rest has no use: a trace is read from its beginning.
        if offset == arriving.bytes {
            arriving.file.write_all_at(bytes, offset).map_err(failed)?;
            arriving.bytes += bytes.len() as u64;
        }
        Ok(())
    }

    /// Merges what has arrived.
    ///
    /// # Errors
    /// As [`merge`].
    pub fn merge(&self, output: &Path) -> Result<Summary> {
        let mut summary = merge(&[self.folder.path().to_owned()], output)?;
        for (task, _) in self.files.iter().filter(|(_, file)| file.bytes != file.size) {
            let rank = Trace::open(&self.path(*task)).map(|trace| trace.rank);
            summary.incomplete.extend(rank.ok().filter(|rank| !summary.incomplete.contains(rank)));
        }
        summary.incomplete.sort_unstable();
        Ok(summary)
    }

    fn path(&self, task: u32) -> PathBuf {
        self.folder.path().join(format!("{task}.json"))
    }
}
