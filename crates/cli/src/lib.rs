// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The farandole command.
//!
//! Owns the command line: `demo` trains a small network with what is installed, `run` starts a
//! program on several processes of one host or of several, `bench` measures collectives, `data`
//! prepares and shows data, `store` lists and cleans up stores, `ui` shows their runs in the
//! browser, `explain` says what limits the speed of a run, `timeline` merges the timelines of
//! ranks, `doctor` says what works on this machine, `simulate` computes how long things take on a
//! cluster that is not there.
//! It has no logic: it reads arguments, calls the facade and prints. It is linked into the Python
//! extension, which passes an interpreter through [`Surroundings`]; there is no second binary.
//!
//! ```text
//! arguments ── clap ──> run, bench, doctor, store, explain, simulate, timeline, agent ──> facade (Rust)
//!                 └───> demo, data ──> Surroundings ──> Python package
//! ```
//!
//! Invariants:
//! - `CL-1`: the exit status of `run` is that of the worker that failed first (128 + n for signal
//!   n), else 0.
//! - `CL-2`: every knob with a flag is a flag of `run`; given flags reach the workers as variables.
//! - `CL-3`: events of the engine are lines on stderr, never on stdout, which is for results.

#![forbid(unsafe_code)]

mod agent;
mod arguments;
mod bench;
mod check_build;
mod console;
mod data;
mod demo;
mod doctor;
mod explain;
mod logging;
#[cfg(test)]
mod reference;
mod run;
mod simulate;
mod store;
mod surroundings;
mod timeline;
mod ui;

pub use surroundings::{Distribution, Python, Surroundings, Watch};

use std::io::Write as _;

/// The drop-in's command.
const HOROVODRUN: &str = "horovodrun";

/// Runs the command. `argv` starts with the program's name; the result is the exit status.
///
/// Called `horovodrun`, it is `run`.
pub fn main(argv: &[String], surroundings: &dyn Surroundings) -> i32 {
    logging::install_from_environment();
    let drop_in = argv.first().is_some_and(|name| name == HOROVODRUN);
    let called = if drop_in { HOROVODRUN } else { "farandole" };
    let (subcommand, matches) = match arguments::matches(argv, drop_in) {
        Ok(found) => found,
        Err(error) => {
            // Help and versions go to stdout and are no failure; a closed pipe does not make them
            // one.
            drop(error.print());
            return error.exit_code();
        }
    };
    let ended = match subcommand.as_str() {
        "agent" => agent::agent(surroundings),
        "bench" => bench::bench(&matches, surroundings),
        "data" => data::data(&matches, surroundings),
        "demo" => demo::demo(&matches, surroundings),
        "doctor" => doctor::doctor(surroundings),
        "explain" => explain::explain_run(&matches),
        "run" => run::run(called, &matches, surroundings),
        "simulate" => simulate::simulate(&matches),
        "store" => store::store(&matches),
        "timeline" => timeline::timeline(&matches),
        "ui" => ui::ui(&matches, surroundings),
        other => Err(anyhow::anyhow!("no such command: {other}")),
    };
    match ended {
        Ok(status) => status,
        Err(error) => {
            say(called, &format!("{error:#}"));
            1
        }
    }
}

/// Tells the user something.
fn say(called: &str, message: &str) {
    // If stderr is closed, there is no place for the message.
    drop(writeln!(std::io::stderr(), "{called}: {message}"));
}
