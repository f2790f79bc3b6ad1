// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Output of the workers: to this process's own streams, and to files for each rank.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use chrono::Local;
use farandole::telemetry::{LogLine, OutputStream, RecordSink, WorkerRecord};

/// Writes `[rank]<stream>:line`, one line at a time.
#[derive(Default)]
pub(crate) struct ConsoleSink {
    timestamps: bool,
    files: Option<RankOutputFiles>,
}

impl ConsoleSink {
    /// Returns a sink that puts the time before each line if `timestamps` is set, and also writes
    /// the bare lines of ranks below `ranks` to `folder`. Existing files are emptied, unless
    /// `continued`.
    ///
    /// # Errors
    /// The folder is not writable.
    pub(crate) fn new(
        timestamps: bool,
        folder: Option<&Path>,
        ranks: u32,
        continued: bool,
    ) -> Result<Self> {
        let files =
            folder.map(|folder| RankOutputFiles::new(folder, ranks, continued)).transpose()?;
        Ok(Self { timestamps, files })
    }
}

impl RecordSink for ConsoleSink {
    fn accept_record(&self, record: WorkerRecord) {
        let WorkerRecord::Log(line) = record else { return };
        // A worker has no rank before its world is formed.
        let rank = line.rank.map_or_else(|| "?".to_owned(), |rank| rank.to_string());
        let time = if self.timestamps { format_asctime() } else { String::new() };
        let text = format!("{time}[{rank}]<{}>:{}\n", line.stream, line.text);
        if let Some(files) = &self.files {
            files.write_line(&line);
        }
        // A closed stdout (`| head`) does not end the job.
        drop(match line.stream {
            OutputStream::Stdout => {
                // One write under the lock, so that lines of different ranks do not mix.
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush())
            }
            OutputStream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
        });
    }
}

/// Formats the current time like Horovod: `Thu Aug  5 14:38:47 2021`.
fn format_asctime() -> String {
    Local::now().format("%a %b %e %H:%M:%S %Y").to_string()
}

/// The files `rank.<N>/stdout` and `rank.<N>/stderr`; `N` has as many digits as the highest rank.
struct RankOutputFiles {
    folder: PathBuf,
    width: usize,
    open_files: Mutex<HashMap<(u32, OutputStream), File>>,
}

impl RankOutputFiles {
    fn new(folder: &Path, ranks: u32, continued: bool) -> Result<Self> {
        let width = ranks.saturating_sub(1).to_string().len();
        let files = Self { folder: folder.to_owned(), width, open_files: Mutex::default() };
        // Before the job starts: a folder without write access must not be found after hours.
        for rank in 0..ranks {
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                let path = files.file_path(rank, stream);
                let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| {
                    File::options().write(true).create(true).truncate(!continued).open(&path)
                });
                made.with_context(|| {
                    format!("cannot write the output of rank {rank} to {}", path.display())
                })?;
            }
        }
        Ok(files)
    }

    fn file_path(&self, rank: u32, stream: OutputStream) -> PathBuf {
        self.folder.join(format!("rank.{rank:0width$}", width = self.width)).join(stream.as_str())
    }

    fn write_line(&self, line: &LogLine) {
        let Some(rank) = line.rank else { return };
        let mut open = self.open_files.lock().unwrap_or_else(PoisonError::into_inner);
        let written = match open.entry((rank, line.stream)) {
            std::collections::hash_map::Entry::Occupied(entry) => {
                writeln!(entry.into_mut(), "{}", line.text)
            }
            std::collections::hash_map::Entry::Vacant(entry) => {
                let path = self.file_path(rank, line.stream);
                // The world of an elastic job may grow beyond its initial ranks.
                path.parent()
                    .map_or(Ok(()), fs::create_dir_all)
                    .and_then(|()| File::options().append(true).create(true).open(path))
                    .and_then(|file| writeln!(entry.insert(file), "{}", line.text))
            }
        };
        if let Err(error) = written {
            // A full disk does not end the job: the line is on the console.
            warn_incomplete_once(&error);
        }
    }
}

/// Warns once that files are incomplete.
fn warn_incomplete_once(error: &io::Error) {
    // A full disk would cause a warning for every line.
    static INCOMPLETE_WARNING: std::sync::Once = std::sync::Once::new();
    INCOMPLETE_WARNING.call_once(|| {
        crate::message::print_message(
            "farandole",
            &format!("the files of the ranks' output are incomplete: {error}"),
        )
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(rank: u32, stream: OutputStream, text: &str) -> WorkerRecord {
        WorkerRecord::Log(LogLine { task: rank, rank: Some(rank), stream, text: text.to_owned() })
    }

    #[test]
    fn every_rank_has_its_files_and_the_highest_sets_the_width() {
        let folder = tempfile::tempdir().unwrap();
        let console = ConsoleSink::new(true, Some(folder.path()), 11, false).unwrap();
        console.accept_record(line(3, OutputStream::Stdout, "a"));
        console.accept_record(line(3, OutputStream::Stdout, "b"));
        console.accept_record(line(10, OutputStream::Stderr, "c"));
        let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
        assert_eq!(
            (read("rank.03/stdout").as_str(), read("rank.10/stderr").as_str()),
            ("a\nb\n", "c\n")
        );
        assert_eq!(read("rank.00/stdout"), "");
        drop(ConsoleSink::new(false, Some(&folder.path().join("one")), 1, false).unwrap());
        assert!(folder.path().join("one/rank.0/stderr").is_file());
    }

    #[test]
    fn a_job_that_is_continued_keeps_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let read = || fs::read_to_string(folder.path().join("rank.0/stdout")).unwrap();
        for (continued, text, all) in
            [(false, "a", "a\n"), (true, "b", "a\nb\n"), (false, "c", "c\n")]
        {
            let console = ConsoleSink::new(false, Some(folder.path()), 1, continued).unwrap();
            console.accept_record(line(0, OutputStream::Stdout, text));
            assert_eq!(read(), all);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = ConsoleSink::new(false, Some(&file), 1, false).err().unwrap().to_string();
        assert!(
            error.starts_with("cannot write the output of rank 0 to ")
                && error.contains("file/rank.0"),
            "{error}"
        );
    }

    #[test]
    fn the_time_has_the_form_of_asctime() {
        let time = format_asctime();
        assert!(
            time.len() == 24 && time.as_bytes()[13] == b':' && time.as_bytes()[19] == b' ',
            "{time}"
        );
    }
}
