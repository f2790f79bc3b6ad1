// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole explain`: shows in three lines what limits the speed of a run.

use std::io::Write as _;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};
use farandole::ui::explain_run;

use crate::{store, ui};

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    store::add_store_options(Command::new("explain"))
        .about(
            "Says what limits the speed of a run: a slow rank, the data, the reduction or the \
             computation. Prints a verdict, the numbers that it is based on, and what to try next. \
             Works for running and ended runs.",
        )
        .arg_required_else_help(true)
        .arg(Arg::new("run").value_name("RUN").required(true).help(
            "Directory of the run, such as /data/farandole/runs/mine or \
                       s3://bucket/prefix/runs/mine",
        ))
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help(
            "Print JSON instead of \
                                                                            three lines",
        ))
}

/// Runs the command.
pub(crate) fn run_explain(matches: &ArgMatches) -> Result<i32> {
    let run = ui::absolute_location(matches.get_one::<String>("run").cloned().unwrap_or_default());
    store::configure_stores(matches, std::slice::from_ref(&run))?;
    let explanation = explain_run(&run)?;
    let mut out = std::io::stdout();
    if matches.get_flag("json") {
        writeln!(out, "{}", serde_json::to_string(&explanation)?)?;
    } else {
        writeln!(
            out,
            "verdict: {}\nwhy:     {}\nnext:    {}",
            explanation.verdict, explanation.why, explanation.next
        )?;
    }
    Ok(0)
}
