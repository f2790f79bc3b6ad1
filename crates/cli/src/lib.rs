// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The farandole command.
//!
//! Owns the command line: `demo` trains a small network with the installed frameworks, `run` starts
//! a program on several processes of one host or of several, `bench` measures collectives, `data`
//! prepares and shows data, `store` lists and cleans up stores, `ui` shows their runs in the
//! browser, `explain` shows what limits the speed of a run, `timeline` merges the timelines of
//! ranks, `doctor` checks this machine, `simulate` computes the times of operations on a simulated
//! cluster. The crate contains no library logic: it parses arguments, calls the facade and
//! prints. It is linked into the Python extension, which passes an interpreter through
//! [`EmbeddingInterpreter`]; there is no second binary.
//!
//! ```text
//! arguments ── clap ─┬─> run, bench, doctor, store, ui, explain, simulate, timeline, agent
//!                    │      └──> facade (Rust)
//!                    └─> demo, data ──> EmbeddingInterpreter ──> Python package
//! ```
//!
//! Invariants:
//! - `CL-1`: the exit status of `run` is the status of the worker that failed first (128 + n for
//!   signal n), else 0.
//! - `CL-2`: every knob with a flag is a flag of `run`; flags on the command line reach the workers
//!   as variables.
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
mod embedding_interpreter;
mod explain;
mod logging;
mod message;
#[cfg(test)]
mod reference;
mod run;
mod simulate;
mod store;
mod timeline;
mod ui;

pub use embedding_interpreter::{
    EmbeddingInterpreter, JobViewer, JobViewerOptions, PythonDistribution, PythonInstallation,
};

/// Name of the drop-in command.
const HOROVODRUN_NAME: &str = "horovodrun";

/// Runs the command; returns the exit status. `argv` starts with the name of the program. If that
/// is `horovodrun`, the subcommand is `run`.
pub fn main(argv: &[String], surroundings: &dyn EmbeddingInterpreter) -> i32 {
    logging::install_logging_from_environment();
    let drop_in = argv.first().is_some_and(|name| name == HOROVODRUN_NAME);
    let called = if drop_in { HOROVODRUN_NAME } else { "farandole" };
    let (subcommand, matches) = match arguments::parse_arguments(argv, drop_in) {
        Ok(found) => found,
        Err(error) => {
            // Help and version go to stdout and are no failure, even if stdout is closed.
            drop(error.print());
            return error.exit_code();
        }
    };
    let ended = match subcommand.as_str() {
        "agent" => agent::run_agent(surroundings),
        "bench" => bench::run_bench(&matches, surroundings),
        "data" => data::run_data(&matches, surroundings),
        "demo" => demo::run_demo(&matches, surroundings),
        "doctor" => doctor::run_doctor(surroundings),
        "explain" => explain::run_explain(&matches, surroundings),
        "run" => run::run_job(called, &matches, surroundings),
        "simulate" => simulate::run_simulate(&matches),
        "store" => store::run_store(&matches, surroundings),
        "timeline" => timeline::run_timeline(&matches),
        "ui" => ui::run_ui(&matches, surroundings),
        other => Err(anyhow::anyhow!("no such command: {other}")),
    };
    match ended {
        Ok(status) => status,
        Err(error) => {
            message::print_message(called, &format!("{error:#}"));
            1
        }
    }
}
