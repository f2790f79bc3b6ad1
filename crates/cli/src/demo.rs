// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole demo`: a first fit with the installed frameworks. The Python package does the work,
//! because it has the estimators.

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::embedding_interpreter::EmbeddingInterpreter;

/// Module that does the work: its `main` takes the store, then `local` to run without Spark.
const DEMO_MODULE: &str = "farandole.spark.demo";

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    Command::new("demo")
        .about(
            "Trains a small PyTorch network on generated data with two processes: on Spark \
             local[2], or without Spark if there is no Java. Needs the extras torch and spark.",
        )
        .arg(
            Arg::new("store")
                .long("store")
                .value_name("STORE")
                .default_value("farandole-demo")
                .help("Path of the store for the data and the run"),
        )
        .arg(Arg::new("local").long("local").action(ArgAction::SetTrue).help("Train without Spark"))
}

/// Runs the command.
pub(crate) fn run_demo(
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    let store = matches.get_one::<String>("store").cloned().unwrap_or_default();
    let local = matches.get_flag("local").then(|| "local".to_owned());
    let words: Vec<String> = std::iter::once(store).chain(local).collect();
    surroundings.call_python_main(DEMO_MODULE, &words).map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_has_a_default_and_spark_can_be_left_out() {
        let read = |words: &[&str]| build_command().try_get_matches_from(words).unwrap();
        let plain = read(&["demo"]);
        assert_eq!(plain.get_one::<String>("store").map(String::as_str), Some("farandole-demo"));
        assert!(!plain.get_flag("local"));
        let local = read(&["demo", "--local", "--store", "/data"]);
        assert_eq!(local.get_one::<String>("store").map(String::as_str), Some("/data"));
        assert!(local.get_flag("local"));
    }
}
