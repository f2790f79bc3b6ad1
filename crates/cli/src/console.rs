// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Output of the workers: to this process's own streams, and to files of each rank.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use chrono::Local;
use farandole::telemetry::{LogLine, Record, Sink, Stream};

/// Writes `[rank]<stream>:line`, line by line.
#[derive(Default)]
pub(crate) struct Console {
    timestamps: bool,
    files: Option<RankFiles>,
}

impl Console {
    /// Lines with the time before them, where `timestamps`, and the bare ones in `folder` too, for
    /// ranks below `ranks`. Files that are there are emptied, unless `continued`.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub(crate) fn new(
        timestamps: bool,
        folder: Option<&Path>,
        ranks: u32,
        continued: bool,
    ) -> Result<Self> {
        let files = folder.map(|folder| RankFiles::new(folder, ranks, continued)).transpose()?;
        Ok(Self { timestamps, files })
    }
}

impl Sink for Console {
    fn accept(&self, record: Record) {
        let Record::Log(line) = record else { return };
        let rank = line.rank.map_or_else(|| "?".to_owned(), |rank| rank.to_string());
        let time = if self.timestamps { asctime() } else { String::new() };
        let text = format!("{time}[{rank}]<{}>:{}\n", line.stream, line.text);
        if let Some(files) = &self.files {
            files.write(&line);
        }
        // A reader that went away (`| head`) does not end the job.
        drop(match line.stream {
            Stream::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes()).and_then(|()| out.flush())
            }
            Stream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
        });
    }
}

/// Returns the time as Horovod writes it: `Thu Aug  5 14:38:47 2021`.
fn asctime() -> String {
    Local::now().format("%a %b %e %H:%M:%S %Y").to_string()
}

/// `rank.<N>/stdout` and `rank.<N>/stderr` of a folder; `N` has as many digits as the highest rank.
struct RankFiles {
    folder: PathBuf,
    width: usize,
    open: Mutex<HashMap<(u32, Stream), File>>,
}

impl RankFiles {
    fn new(folder: &Path, ranks: u32, continued: bool) -> Result<Self> {
        let width = ranks.saturating_sub(1).to_string().len();
        let files = Self { folder: folder.to_owned(), width, open: Mutex::default() };
        for rank in 0..ranks {
            for stream in [Stream::Stdout, Stream::Stderr] {
                let path = files.path(rank, stream);
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

    fn path(&self, rank: u32, stream: Stream) -> PathBuf {
        self.folder.join(format!("rank.{rank:0width$}", width = self.width)).join(stream.name())
    }

    fn write(&self, line: &LogLine) {
        let Some(rank) = line.rank else { return };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let written = match open.entry((rank, line.stream)) {
            std::collections::hash_map::Entry::Occupied(entry) => {
                writeln!(entry.into_mut(), "{}", line.text)
            }
            std::collections::hash_map::Entry::Vacant(entry) => {
                let path = self.path(rank, line.stream);
                // The world of an elastic job may grow beyond the ranks of its beginning.
                path.parent()
                    .map_or(Ok(()), fs::create_dir_all)
                    .and_then(|()| File::options().append(true).create(true).open(path))
                    .and_then(|file| writeln!(entry.insert(file), "{}", line.text))
            }
        };
        if let Err(error) = written {
            // A full disk does not end the job: the line is on the console.
            tracing_once(&error);
        }
    }
}

/// Says once that files are incomplete.
fn tracing_once(error: &io::Error) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        crate::say("farandole", &format!("the files of the ranks' output are incomplete: {error}"))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(rank: u32, stream: Stream, text: &str) -> Record {
        Record::Log(LogLine { task: rank, rank: Some(rank), stream, text: text.to_owned() })
    }

    #[test]
    fn every_rank_has_its_files_and_the_highest_sets_the_width() {
        let folder = tempfile::tempdir().unwrap();
        let console = Console::new(true, Some(folder.path()), 11, false).unwrap();
        console.accept(line(3, Stream::Stdout, "a"));
        console.accept(line(3, Stream::Stdout, "b"));
        console.accept(line(10, Stream::Stderr, "c"));
        let read = |path: &str| fs::read_to_string(folder.path().join(path)).unwrap();
        assert_eq!(
            (read("rank.03/stdout").as_str(), read("rank.10/stderr").as_str()),
            ("a\nb\n", "c\n")
        );
        assert_eq!(read("rank.00/stdout"), "");
        drop(Console::new(false, Some(&folder.path().join("one")), 1, false).unwrap());
        assert!(folder.path().join("one/rank.0/stderr").is_file());
    }

    #[test]
    fn a_job_that_is_continued_keeps_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let read = || fs::read_to_string(folder.path().join("rank.0/stdout")).unwrap();
        for (continued, text, all) in
            [(false, "a", "a\n"), (true, "b", "a\nb\n"), (false, "c", "c\n")]
        {
            let console = Console::new(false, Some(folder.path()), 1, continued).unwrap();
            console.accept(line(0, Stream::Stdout, text));
            assert_eq!(read(), all);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Console::new(false, Some(&file), 1, false).err().unwrap().to_string();
        assert!(
            error.starts_with("cannot write the output of rank 0 to ")
                && error.contains("file/rank.0"),
            "{error}"
        );
    }

    #[test]
    fn the_time_has_the_form_of_asctime() {
        let time = asctime();
        assert!(
            time.len() == 24 && time.as_bytes()[13] == b':' && time.as_bytes()[19] == b' ',
            "{time}"
        );
    }
}
