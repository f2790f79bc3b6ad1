// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole explain`: shows in three lines what limits the speed of a run, or of the newest run
//! of a store.

use std::io::Write as _;

use anyhow::Result;
use chrono::{DateTime, Local};
use clap::{Arg, ArgAction, ArgMatches, Command};
use farandole::ui::{RunIdentity, explain_location};
use farandole::world::format_counted_noun;

use crate::embedding_interpreter::EmbeddingInterpreter;
use crate::{store, ui};

/// Other runs of a store that are listed by name.
const MAX_LISTED_RUNS: usize = 20;

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    store::add_store_options(Command::new("explain"))
        .about(
            "Says what limits the speed of a run: a slow rank, the data, the reduction or the \
             computation. Prints a verdict, the numbers that it is based on, and what to try next. \
             Works for running and ended runs. For a store, it explains the newest run and lists the \
             others.",
        )
        .arg_required_else_help(true)
        .arg(Arg::new("run").value_name("RUN").required(true).help(
            "Directory of the run, such as /data/farandole/runs/mine or \
             s3://bucket/prefix/runs/mine, or a store with runs, such as /data/farandole",
        ))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help(
            "Print JSON instead of text",
        ))
}

/// Runs the command.
pub(crate) fn run_explain(
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    let run = ui::absolute_location(matches.get_one::<String>("run").cloned().unwrap_or_default());
    let urls = store::configure_stores(matches, vec![run.clone()], surroundings)?;
    let mut found = explain_location(&urls[0])?;
    // A volume of Unity Catalog is named as the user names it, so that its paths can be used again.
    for identity in std::iter::once(&mut found.run).chain(found.others.iter_mut().flatten()) {
        if let Some(below) = identity.directory.strip_prefix(&urls[0]) {
            identity.directory = format!("{run}{below}");
        }
    }
    let mut out = std::io::stdout();
    if matches.get_flag("json") {
        writeln!(out, "{}", serde_json::to_string(&found)?)?;
        return Ok(0);
    }
    if let Some(others) = &found.others {
        let count = format_counted_noun(others.len() as u64 + 1, "run");
        writeln!(out, "run:     {}, the newest of {count}", describe_run(&found.run))?;
    }
    let explanation = &found.explanation;
    writeln!(
        out,
        "verdict: {}\nwhy:     {}\nnext:    {}",
        explanation.verdict, explanation.why, explanation.next
    )?;
    write!(out, "{}", list_other_runs(found.others.as_deref().unwrap_or_default(), &run))?;
    Ok(0)
}

/// Returns a line for each of the other runs.
fn list_other_runs(others: &[RunIdentity], store: &str) -> String {
    let mut lines = String::new();
    for (index, other) in others.iter().take(MAX_LISTED_RUNS).enumerate() {
        let head = if index == 0 { "others:" } else { "" };
        lines += &format!("{head:<8} {}\n", describe_run(other));
    }
    let more = others.len().saturating_sub(MAX_LISTED_RUNS);
    if more > 0 {
        lines += &format!("         and {more} more: farandole ui {store} shows all\n");
    }
    lines
}

/// Returns where a run is, its state, and when it was started.
fn describe_run(run: &RunIdentity) -> String {
    let state = if run.state.is_empty() { "unknown" } else { &run.state };
    let started = run.started.and_then(local_time_text);
    let started = started.map_or_else(String::new, |time| format!(", started {time}"));
    format!("{} ({state}{started})", run.directory)
}

fn local_time_text(milliseconds: f64) -> Option<String> {
    #[expect(clippy::cast_possible_truncation, reason = "a time beyond chrono's is not shown")]
    let time = DateTime::from_timestamp_millis(milliseconds as i64)?;
    Some(time.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(directory: String) -> RunIdentity {
        RunIdentity { directory, state: "ended".to_owned(), started: None }
    }

    #[test]
    fn a_run_says_where_it_is_and_when_it_began() {
        let mut one = run("/s/runs/a".to_owned());
        assert_eq!(describe_run(&one), "/s/runs/a (ended)");
        one.started = Some(1e12);
        one.state.clear();
        assert!(
            describe_run(&one).starts_with("/s/runs/a (unknown, started 2001-09-"),
            "{}",
            describe_run(&one)
        );
        one.started = Some(f64::MAX);
        assert_eq!(describe_run(&one), "/s/runs/a (unknown)", "no time that chrono has");
    }

    #[test]
    fn of_many_runs_the_first_are_listed_and_the_rest_is_counted() {
        for count in [0, 1, MAX_LISTED_RUNS, MAX_LISTED_RUNS + 1, 3 * MAX_LISTED_RUNS] {
            let others: Vec<RunIdentity> =
                (0..count).map(|index| run(format!("/s/runs/{index}"))).collect();
            let text = list_other_runs(&others, "/s");
            let listed = text.matches("/s/runs/").count();
            assert_eq!(listed, count.min(MAX_LISTED_RUNS));
            let more = count - listed;
            assert_eq!(text.contains(&format!("and {more} more: farandole ui /s shows")), more > 0);
            assert_eq!(text.matches("others: ").count(), usize::from(count > 0));
        }
    }
}
