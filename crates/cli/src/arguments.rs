// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The command line.

use clap::{Arg, ArgAction, Command, value_parser};
use farandole::config::{KNOBS, Knob, PREFIX, Value};

use crate::{agent, bench, data, store};

/// The whole command.
pub(crate) fn command() -> Command {
    Command::new("farandole")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Data-parallel deep learning on Spark, on plain hosts and in notebooks.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(run())
        .subcommand(agent::command())
        .subcommand(bench::command())
        .subcommand(data::command())
        .subcommand(store::command())
        .subcommand(
            Command::new("doctor")
                .about("Says what is installed, which links and devices work, and what is wrong."),
        )
}

fn run() -> Command {
    Command::new("run")
        .about("Runs a program on several processes of this host; `-np N` may be written for `--num-proc N`.")
        .override_usage("farandole run -np <N> [OPTIONS] <COMMAND>...")
        .arg(
            Arg::new("num_proc")
                .long("num-proc")
                .short('n')
                .value_name("N")
                .required(true)
                .value_parser(value_parser!(u32).range(1..))
                .help("Number of processes"),
        )
        .arg(
            Arg::new("hosts").long("hosts").short('H').value_name("HOSTS").help("Hosts and slots: `a:2,b:4`"),
        )
        .arg(Arg::new("verbose").long("verbose").action(ArgAction::SetTrue).help("Say where each rank runs"))
        .args(flags().map(|knob| {
            let arg = Arg::new(knob.key)
                .long(knob.flag.unwrap_or_default().trim_start_matches('-'))
                .help(format!("{} [{PREFIX}{}]", knob.doc.trim(), knob.name));
            if is_switch(knob) { arg.action(ArgAction::SetTrue) } else { arg.value_name("VALUE") }
        }))
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .required(true)
                .num_args(1..)
                .trailing_var_arg(true)
                .help("The program and its arguments"),
        )
}

/// Knobs that are flags of `run`.
pub(crate) fn flags() -> impl Iterator<Item = &'static Knob> {
    KNOBS.iter().filter(|knob| knob.flag.is_some())
}

/// Whether a knob's flag takes no value.
pub(crate) fn is_switch(knob: &Knob) -> bool {
    knob.expected == <bool as Value>::EXPECTED
}

/// `-np` as Horovod's scripts have it becomes `--num-proc`, as long as it is ours and not the program's.
pub(crate) fn normalized(argv: &[String]) -> Vec<String> {
    if argv.get(1).is_some_and(|word| word == "bench") {
        // There is no other program whose words these could be.
        return argv.iter().map(|word| if word == "-np" { "--num-proc" } else { word }.to_owned()).collect();
    }
    let takes_value = |word: &str| {
        matches!(word, "-np" | "-n" | "--num-proc" | "-H" | "--hosts")
            || flags().any(|knob| knob.flag == Some(word) && !is_switch(knob))
    };
    let mut words = Vec::with_capacity(argv.len());
    let mut rest = argv.iter();
    words.extend(rest.by_ref().take(2).cloned());
    while let Some(word) = rest.next() {
        if !word.starts_with('-') || word == "--" {
            words.push(word.clone());
            break;
        }
        words.push(if word == "-np" { "--num-proc".to_owned() } else { word.clone() });
        if takes_value(word) {
            words.extend(rest.next().cloned());
        }
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
        command().debug_assert();
    }

    #[test]
    fn only_our_own_np_is_rewritten() {
        let line = words("farandole run --start-timeout 5 -np 2 mpirun -np 4 a.out");
        assert_eq!(
            normalized(&line).join(" "),
            "farandole run --start-timeout 5 --num-proc 2 mpirun -np 4 a.out"
        );
        let matches = command().try_get_matches_from(normalized(&line)).unwrap();
        let (_, run) = matches.subcommand().unwrap();
        assert_eq!(run.get_one::<u32>("num_proc"), Some(&2));
        let program: Vec<&String> = run.get_many("command").unwrap().collect();
        assert_eq!(program, ["mpirun", "-np", "4", "a.out"]);
    }

    #[test]
    fn np_of_a_bench_may_stand_anywhere() {
        let line = words("farandole bench allreduce --sizes 4,1K -np 2 --json");
        let matches = command().try_get_matches_from(normalized(&line)).unwrap();
        let (_, bench) = matches.subcommand().unwrap();
        assert_eq!(bench.get_one::<u32>("num_proc"), Some(&2));
        assert_eq!(bench.get_many::<u64>("sizes").unwrap().copied().collect::<Vec<_>>(), [4, 1024]);
        assert!(command().try_get_matches_from(words("farandole bench sum -n 2")).is_err());
    }

    #[test]
    fn every_knob_with_a_flag_is_one() {
        // CL-2.
        let run = run();
        for knob in flags() {
            assert!(run.get_arguments().any(|arg| arg.get_id() == knob.key), "{} has no flag", knob.key);
        }
    }

    #[test]
    fn no_process_and_no_program_are_refused() {
        assert!(command().try_get_matches_from(words("farandole run -n 0 a.out")).is_err());
        assert!(command().try_get_matches_from(words("farandole run -n 2")).is_err());
        assert!(command().try_get_matches_from(words("farandole")).is_err());
    }
}
