// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole timeline`, and `farandole run --timeline`: the timelines of all ranks as one trace.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use farandole::telemetry::{Record, Sink};
use farandole::ui::timeline::{KIND, Pieces, merge};

/// Returns the command line.
pub(crate) fn command() -> Command {
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

/// Runs it.
pub(crate) fn timeline(matches: &ArgMatches) -> Result<i32> {
    let inputs: Vec<_> =
        matches.get_many::<PathBuf>("inputs").unwrap_or_default().cloned().collect();
    let output = matches.get_one::<PathBuf>("output").cloned().unwrap_or_default();
    let summary = merge(&inputs, &output)?;
    let mut out = std::io::stdout();
    if matches.get_flag("json") {
        writeln!(out, "{}", summary.json())?;
    } else {
        writeln!(out, "{}", summary.lines().join("\n"))?;
    }
    Ok(0)
}

/// Keeps the timelines that agents send, and passes everything else to the console.
pub(crate) struct Gathering {
    path: PathBuf,
    pieces: Mutex<Pieces>,
    next: Arc<dyn Sink>,
}

impl Gathering {
    /// For a trace at `path`, which must be writable.
    ///
    /// # Errors
    /// It cannot be written, or there is no room for a folder.
    pub(crate) fn new(path: &Path, next: &Arc<dyn Sink>) -> Result<Arc<Self>> {
        // Said before the job runs for hours. The present file stays until it can be replaced.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot write the timeline to {}", path.display()))?;
        let pieces = Mutex::new(Pieces::new()?);
        Ok(Arc::new(Self { path: path.to_owned(), pieces, next: Arc::clone(next) }))
    }

    /// Merges the received timelines; returns a message.
    ///
    /// # Errors
    /// Nothing has come, or the trace cannot be written.
    pub(crate) fn merge(&self) -> Result<Vec<String>> {
        let pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let merged = pieces.merge(&self.path);
        if merged.is_err() && std::fs::metadata(&self.path).is_ok_and(|told| told.len() == 0) {
            drop(std::fs::remove_file(&self.path)); // made by `new`
        }
        let mut lines = merged?.lines();
        lines.push(format!("the timeline of all ranks is in {}", self.path.display()));
        Ok(lines)
    }
}

impl Sink for Gathering {
    fn accept(&self, record: Record) {
        match record {
            Record::Metric(metric) if metric.kind == KIND => {
                let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
                if let Err(error) = pieces.take(metric.task, &metric.data) {
                    crate::say("farandole", &format!("a piece of a timeline is lost: {error}"));
                }
            }
            record => self.next.accept(record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_and_an_output_are_needed() {
        let read = |line: &str| command().try_get_matches_from(line.split(' '));
        let matches = read("timeline a b -o c").unwrap();
        assert_eq!(matches.get_many::<PathBuf>("inputs").unwrap().count(), 2);
        assert!(read("timeline a").is_err());
        assert!(read("timeline -o c").is_err());
    }
}
