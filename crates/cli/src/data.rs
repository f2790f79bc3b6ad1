// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole data`: prepares and inspects data. The Python package does the work, because it has
//! pyarrow.

use std::io::Write as _;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::embedding_interpreter::EmbeddingInterpreter;

/// Module that does the work: its `main` takes the name of the subcommand and its arguments.
const DATA_MODULE: &str = "farandole.data.data_command";

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    let text = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    let many = |name: &'static str, value: &'static str, help: &'static str| {
        text(name, value, help).action(ArgAction::Append)
    };
    let json = || {
        Arg::new("json")
            .long("json")
            .action(ArgAction::SetTrue)
            .help("Print JSON instead of a table")
    };
    let url = || {
        Arg::new("url")
            .value_name("URL")
            .required(true)
            .help("A directory of Parquet files, or a Delta table")
    };
    Command::new("data")
        .about("Prepares data for training without Spark, and inspects data.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("prepare")
                .about(
                    "Writes Parquet, CSV, JSON lines, Arrow IPC files or a Delta table to a store, \
                     in the form that training reads fastest. A preparation that was cut off \
                     continues; one that is complete is not repeated.",
                )
                .arg(
                    Arg::new("source")
                        .value_name("SOURCE")
                        .required(true)
                        .num_args(1..)
                        .help("Files, directories or patterns in quotes, in any store"),
                )
                .arg(
                    text(
                        "to",
                        "STORE",
                        "The store, such as /data/farandole or \
                                          s3://bucket/prefix",
                    )
                    .required(true),
                )
                .arg(many(
                    "features",
                    "COLUMNS",
                    "Columns for the model; default: all columns \
                                                  without another role",
                ))
                .arg(many("labels", "COLUMNS", "Columns to compare with"))
                .arg(text("weight", "COLUMN", "Column with each row's weight"))
                .arg(text(
                    "validation",
                    "SHARE|COLUMN",
                    "Share of rows to hold out, or a column \
                                                         that selects them",
                ))
                .arg(text(
                    "stratify",
                    "COLUMN",
                    "Column of classes: the share of --validation is held out of each class",
                ))
                .arg(text(
                    "group",
                    "COLUMN",
                    "Column of groups: all rows of a group are on one \
                                              side",
                ))
                .arg(text(
                    "time",
                    "COLUMN",
                    "Column of times or numbers: the latest rows are held \
                                             out",
                ))
                .arg(
                    text("seed", "SEED", "Of the split")
                        .default_value("0")
                        .value_parser(value_parser!(u64)),
                )
                .arg(many("fill", "[COLUMN=]VALUE", "Replacement of nulls and NaN"))
                .arg(many(
                    "categories",
                    "COLUMN[=COUNT]",
                    "Column of strings, integers or booleans that becomes indices, of the COUNT \
                     most frequent values at most",
                ))
                .arg(many(
                    "ragged",
                    "COLUMN[=OPTION:VALUE,...]",
                    "Column of lists of different lengths; options: max_length, value, buckets",
                ))
                .arg(
                    Arg::new("allow-nan")
                        .long("allow-nan")
                        .action(ArgAction::SetTrue)
                        .help("Accept NaN and infinities like other values"),
                )
                .arg(
                    text("format", "FORMAT", "Format of files whose names do not show it")
                        .value_parser(["parquet", "csv", "json", "ipc"]),
                )
                .arg(many(
                    "type",
                    "COLUMN=TYPE",
                    "Type of a column of CSV or JSON, such as \
                                                  id=string",
                ))
                .arg(many(
                    "csv",
                    "OPTION=VALUE",
                    "How CSV is read, such as delimiter=; or \
                                                  encoding=latin1",
                ))
                .arg(text(
                    "sql",
                    "QUERY",
                    "A query of the source, which is the table `source` in \
                                           it",
                ))
                .arg(
                    text("compression", "KIND", "Compression of the written files")
                        .default_value("none")
                        .value_parser(["none", "snappy", "lz4", "zstd"]),
                )
                .arg(
                    text("row-group-rows", "ROWS", "Rows of a row group; default: by size")
                        .value_parser(value_parser!(u64).range(1..)),
                )
                .arg(Arg::new("statistics").long("statistics").action(ArgAction::SetTrue).help(
                    "Also compute statistics of the rows, in one more pass, which fitted \
                               models carry",
                ))
                .arg(
                    Arg::new("again")
                        .long("again")
                        .action(ArgAction::SetTrue)
                        .help("Prepare again even if this was done before"),
                )
                .arg(json()),
        )
        .subcommand(
            Command::new("inspect")
                .about(
                    "Prints the content of a data set: rows, files, columns with types, shapes \
                        and extremes.",
                )
                .arg(url())
                .arg(Arg::new("verify").long("verify").action(ArgAction::SetTrue).help(
                    "Read every file and compare its checksum; status 1 when one \
                               differs",
                ))
                .arg(json()),
        )
        .subcommand(
            Command::new("head")
                .about("Prints the first rows of a data set.")
                .arg(url())
                .arg(
                    Arg::new("rows")
                        .long("rows")
                        .short('n')
                        .value_name("ROWS")
                        .default_value("5")
                        .value_parser(value_parser!(u32).range(1..))
                        .help("How many"),
                )
                .arg(json()),
        )
}

/// Runs the command.
pub(crate) fn run_data(
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    let Some((name, matches)) = matches.subcommand() else { anyhow::bail!("no such command") };
    let mut words = vec![name.to_owned()];
    for id in matches.ids().map(clap::Id::as_str) {
        if matches.value_source(id).is_none() {
            continue;
        }
        // Arguments have different types, and clap gives an error for every other type.
        if let Ok(Some(values)) = matches.try_get_many::<String>(id) {
            words.extend(values.map(|value| format!("{id}={value}")));
        } else if let Ok(Some(number)) = matches.try_get_one::<u64>(id) {
            words.push(format!("{id}={number}"));
        } else if let Ok(Some(number)) = matches.try_get_one::<u32>(id) {
            words.push(format!("{id}={number}"));
        } else if let Ok(Some(true)) = matches.try_get_one::<bool>(id) {
            words.push(format!("{id}="));
        }
    }
    match surroundings.call_python_main(DATA_MODULE, &words) {
        Ok(status) => Ok(status),
        Err(message) => {
            // `eprintln!` would panic if the standard error is closed.
            drop(writeln!(std::io::stderr(), "farandole: {message}"));
            Ok(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use farandole::launcher::StopLevel;

    use super::*;
    use crate::embedding_interpreter::{PythonDistribution, PythonInstallation};

    #[derive(Default)]
    struct RecordedCalls(RefCell<Vec<String>>);

    impl EmbeddingInterpreter for RecordedCalls {
        fn package_folder(&self) -> std::path::PathBuf {
            std::path::PathBuf::new()
        }

        fn requested_stop_level(&self) -> StopLevel {
            StopLevel::Continue
        }

        fn module_distributions(&self) -> BTreeMap<String, Vec<PythonDistribution>> {
            BTreeMap::new()
        }

        fn installation(&self) -> PythonInstallation {
            PythonInstallation::default()
        }

        fn call_python_main(&self, module: &str, words: &[String]) -> Result<i32, String> {
            assert_eq!(module, DATA_MODULE);
            self.0.replace(words.to_vec());
            if words.len() > 3 { Ok(0) } else { Err("no".to_owned()) }
        }
    }

    #[test]
    fn arguments_reach_the_package_by_name() {
        let line = "data prepare a.csv b=c.csv --to /s --fill x=0 --fill 1 --allow-nan \
                    --statistics --row-group-rows 7";
        let recorder = RecordedCalls::default();
        let status = |line: &str| {
            let matches = build_command().try_get_matches_from(line.split(' ')).unwrap();
            run_data(&matches, &recorder).unwrap()
        };
        assert_eq!(status(line), 0);
        let mut words = recorder.0.borrow().clone();
        assert_eq!(words.remove(0), "prepare");
        words.sort();
        let expected = [
            "allow-nan=",
            "compression=none",
            "fill=1",
            "fill=x=0",
            "row-group-rows=7",
            "seed=0",
            "source=a.csv",
            "source=b=c.csv",
            "statistics=",
            "to=/s",
        ];
        assert_eq!(words, expected);
        assert_eq!(status("data head /d"), 1);
        let mut words = recorder.0.borrow().clone();
        words.sort();
        assert_eq!(words, ["head", "rows=5", "url=/d"]);
    }

    #[test]
    fn a_missing_argument_is_refused() {
        for line in
            ["data", "data prepare a.csv", "data head", "data prepare a --to s --format xml"]
        {
            assert!(build_command().try_get_matches_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
