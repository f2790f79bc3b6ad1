// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole timeline` and `farandole run --timeline`: merge the timelines of all ranks into one
//! trace.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use farandole::telemetry::{RecordSink, WorkerRecord};
use farandole::ui::timeline::{TIMELINE_RECORD_KIND, TimelinePieces, merge_timeline_files};

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    Command::new("timeline")
        .about(
            "Merges the timelines of all ranks into one trace, which opens in Perfetto \
             (https://ui.perfetto.dev) and chrome://tracing. Clocks of hosts are aligned by the \
             operations that ranks share. Says which rank the others wait for.",
        )
        .arg_required_else_help(true)
        .arg(
            Arg::new("inputs")
                .value_name("INPUT")
                .required(true)
                .num_args(1..)
                .value_parser(value_parser!(PathBuf))
                .help("Files that FARANDOLE_TIMELINE={rank}.json has written, or their folder"),
        )
        .arg(
            Arg::new("output")
                .long("output")
                .short('o')
                .value_name("FILE")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .help("File for the trace"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help(
            "Print JSON instead of \
                                                                            a table",
        ))
}

/// Runs the command.
pub(crate) fn run_timeline(matches: &ArgMatches) -> Result<i32> {
    let inputs: Vec<_> =
        matches.get_many::<PathBuf>("inputs").unwrap_or_default().cloned().collect();
    let output = matches.get_one::<PathBuf>("output").cloned().unwrap_or_default();
    let summary = merge_timeline_files(&inputs, &output)?;
    let mut out = std::io::stdout();
    if matches.get_flag("json") {
        writeln!(out, "{}", summary.to_json())?;
    } else {
        writeln!(out, "{}", summary.summary_lines().join("\n"))?;
    }
    Ok(0)
}

/// Stores the timelines that agents send, and passes all other records to the console.
pub(crate) struct TimelineReceivingSink {
    path: PathBuf,
    pieces: Mutex<TimelinePieces>,
    next: Arc<dyn RecordSink>,
}

impl TimelineReceivingSink {
    /// Returns a sink for a trace at `path`.
    ///
    /// # Errors
    /// `path` is not writable, or there is no space for a temporary folder.
    pub(crate) fn new(path: &Path, next: &Arc<dyn RecordSink>) -> Result<Arc<Self>> {
        // Checked before the job runs for hours. An existing trace stays until it can be replaced.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot write the timeline to {}", path.display()))?;
        let pieces = Mutex::new(TimelinePieces::new()?);
        Ok(Arc::new(Self { path: path.to_owned(), pieces, next: Arc::clone(next) }))
    }

    /// Merges the received timelines; returns messages for the user.
    ///
    /// # Errors
    /// No timeline was received, or the trace cannot be written.
    pub(crate) fn merge_received_timelines(&self) -> Result<Vec<String>> {
        let pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let merged = pieces.merge_pieces(&self.path);
        if merged.is_err()
            && std::fs::metadata(&self.path).is_ok_and(|metadata| metadata.len() == 0)
        {
            drop(std::fs::remove_file(&self.path)); // made by `new`
        }
        let mut lines = merged?.summary_lines();
        lines.push(format!("the timeline of all ranks is in {}", self.path.display()));
        Ok(lines)
    }
}

impl RecordSink for TimelineReceivingSink {
    fn accept_record(&self, record: WorkerRecord) {
        match record {
            WorkerRecord::Metric(metric) if metric.kind == TIMELINE_RECORD_KIND => {
                let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
                if let Err(error) = pieces.add_piece(metric.task, &metric.data) {
                    crate::message::print_message(
                        "farandole",
                        &format!("a piece of a timeline is lost: {error}"),
                    );
                }
            }
            record => self.next.accept_record(record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_and_an_output_are_needed() {
        let read = |line: &str| build_command().try_get_matches_from(line.split(' '));
        let matches = read("timeline a b -o c").unwrap();
        assert_eq!(matches.get_many::<PathBuf>("inputs").unwrap().count(), 2);
        assert!(read("timeline a").is_err());
        assert!(read("timeline -o c").is_err());
    }
}
