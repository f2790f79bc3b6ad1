// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The command line.

use clap::{ArgMatches, Command};

use crate::run::flags::RUN_FLAGS;
use crate::{agent, bench, data, demo, explain, run, simulate, store, timeline, ui};

/// Returns the whole command.
pub(crate) fn build_command() -> Command {
    Command::new("farandole")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Data-parallel deep learning on Spark, on plain hosts and in notebooks.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(demo::build_command())
        .subcommand(run::build_command())
        .subcommand(agent::build_command())
        .subcommand(bench::build_command())
        .subcommand(data::build_command())
        .subcommand(store::build_command())
        .subcommand(ui::build_command())
        .subcommand(explain::build_command())
        .subcommand(timeline::build_command())
        .subcommand(simulate::build_command())
        .subcommand(
            Command::new("doctor").about(
                "Reports what is installed, which links and devices work, and what is wrong.",
            ),
        )
}

/// Parses the arguments: returns the subcommand and its arguments. With `drop_in`, they are
/// horovodrun's, and the subcommand is `run`.
///
/// # Errors
/// clap's message: an error, or the requested help.
pub(crate) fn parse_arguments(
    argv: &[String],
    drop_in: bool,
) -> Result<(String, ArgMatches), clap::Error> {
    if !drop_in {
        let subcommand =
            build_command().try_get_matches_from(normalize_arguments(argv))?.remove_subcommand();
        return Ok(subcommand.unwrap_or_default());
    }
    let mut words = argv.to_vec();
    // `normalize_arguments` expects the name of the subcommand, which `horovodrun` leaves out.
    words.insert(words.len().min(1), "run".to_owned());
    let mut words = normalize_arguments(&words);
    words.remove(1);
    let horovodrun = run::build_command()
        .name("horovodrun")
        .display_name("horovodrun")
        .override_usage("horovodrun [-np N] [-H HOST:SLOTS,...] [OPTIONS] COMMAND...");
    Ok(("run".to_owned(), horovodrun.try_get_matches_from(words)?))
}

/// Replaces Horovod's names behind a single dash by ours, in the arguments before the program's
/// name.
pub(crate) fn normalize_arguments(argv: &[String]) -> Vec<String> {
    // For clap, `-np` is the flag `-n` with the value `p`.
    let long = |word: &str| {
        let (name, value) = match word.strip_prefix('-')?.split_once('=') {
            Some((name, value)) => (name, format!("={value}")),
            None => (word.strip_prefix('-')?, String::new()),
        };
        let flag = RUN_FLAGS.iter().find(|flag| flag.single_dash.contains(&name))?;
        Some(format!("--{}{value}", flag.name))
    };
    if argv.get(1).is_some_and(|word| word == "bench") {
        // `bench` runs no program, so all words are our own.
        return argv.iter().map(|word| long(word).unwrap_or_else(|| word.clone())).collect();
    }
    if argv.get(1).is_none_or(|word| word != "run") {
        return argv.to_vec();
    }
    let command = run::build_command();
    // The program begins at the first word that is neither a flag nor the value of one.
    let takes = |word: &str| {
        let arg = command.get_arguments().find(|arg| {
            let long = word.strip_prefix("--").is_some_and(|name| {
                arg.get_long() == Some(name)
                    || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
            });
            let short = word.strip_prefix('-').and_then(|name| {
                let mut letters = name.chars();
                letters.next().filter(|_| letters.next().is_none())
            });
            long || (short.is_some() && arg.get_short() == short)
        });
        arg.map_or(0, |arg| {
            let one = usize::from(arg.get_action().takes_values());
            arg.get_num_args().map_or(one, |count| {
                count.min_values().min(count.max_values()).max(one * count.min_values())
            })
        })
    };
    let mut words = Vec::with_capacity(argv.len());
    let mut rest = argv.iter();
    words.extend(rest.by_ref().take(2).cloned());
    while let Some(word) = rest.next() {
        if !word.starts_with('-') || word == "--" {
            words.push(word.clone());
            break;
        }
        let word = long(word).unwrap_or_else(|| word.clone());
        let count = takes(&word);
        words.push(word);
        words.extend(rest.by_ref().take(count).cloned());
    }
    words.extend(rest.cloned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_command_line_is_consistent() {
        build_command().debug_assert();
    }

    #[test]
    fn only_our_own_np_is_rewritten() {
        let line = words("farandole run --start-timeout 5 -np 2 mpirun -np 4 a.out");
        assert_eq!(
            normalize_arguments(&line).join(" "),
            "farandole run --start-timeout 5 --num-proc 2 mpirun -np 4 a.out"
        );
        let matches = build_command().try_get_matches_from(normalize_arguments(&line)).unwrap();
        let (_, run) = matches.subcommand().unwrap();
        assert_eq!(run.get_one::<String>("num-proc").unwrap(), "2");
        let program: Vec<&String> = run.get_many("command").unwrap().collect();
        assert_eq!(program, ["mpirun", "-np", "4", "a.out"]);
    }

    #[test]
    fn a_value_may_stand_behind_a_sign() {
        let line = words("farandole run -np=2 -hostfile=h=x python -np=4");
        assert_eq!(
            normalize_arguments(&line).join(" "),
            "farandole run --num-proc=2 --hostfile=h=x python -np=4"
        );
    }

    #[test]
    fn np_of_a_bench_may_stand_anywhere() {
        let line = words("farandole bench allreduce --sizes 4,1K -np 2 --json");
        let matches = build_command().try_get_matches_from(normalize_arguments(&line)).unwrap();
        let (_, bench) = matches.subcommand().unwrap();
        assert_eq!(bench.get_one::<u32>("num_proc"), Some(&2));
        assert_eq!(bench.get_many::<u64>("sizes").unwrap().copied().collect::<Vec<_>>(), [4, 1024]);
        assert!(build_command().try_get_matches_from(words("farandole bench sum -n 2")).is_err());
    }

    #[test]
    fn every_version_is_the_commands() {
        let printed = |words: &[&str], drop_in| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            parse_arguments(&words, drop_in).unwrap_err().to_string()
        };
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(printed(&["farandole", "--version"], false), format!("farandole {version}\n"));
        assert_eq!(
            printed(&["farandole", "run", "--version"], false),
            format!("farandole {version}\n")
        );
        assert_eq!(printed(&["horovodrun", "-v"], true), format!("horovodrun {version}\n"));
    }

    #[test]
    fn no_process_and_no_program_are_refused() {
        assert!(build_command().try_get_matches_from(words("farandole run -n 2")).is_err());
        assert!(build_command().try_get_matches_from(words("farandole")).is_err());
    }
}
