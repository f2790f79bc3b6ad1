// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run`, and `horovodrun`.

mod file;
pub(crate) mod flags;
mod options;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use farandole::launcher::{Job, Report};
use farandole::telemetry::Sink;
use farandole::world::World;

use self::options::{Place, RunOptions};
use crate::check_build::check_build;
use crate::console::Console;
use crate::surroundings::Surroundings;

/// Its command line.
pub(crate) fn command() -> Command {
    Command::new("run")
        .about("Runs a program on several processes, of this host or of several; `-np N` may be written for `--num-proc N`.")
        .override_usage("farandole run [-np N] [-H HOST:SLOTS,...] [OPTIONS] COMMAND...")
        .after_help("Horovod's other flags are accepted and mean nothing here; each says why when it is used.")
        .disable_version_flag(true)
        .args(flags::arguments())
        .arg(
            Arg::new("version")
                .long("version")
                .short('v')
                .action(clap::ArgAction::Version)
                .help("Print the version"),
        )
        .version(env!("CARGO_PKG_VERSION"))
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .required_unless_present("check-build")
                .num_args(1..)
                .trailing_var_arg(true)
                .help("The program and its arguments"),
        )
}

/// Runs the program; the exit status is that of the first failure. `called` is the command's name.
pub(crate) fn run(called: &str, matches: &ArgMatches, surroundings: &dyn Surroundings) -> Result<i32> {
    if matches.get_flag("check-build") {
        print!("{}", check_build(&surroundings.python()));
        return Ok(0);
    }
    let options = RunOptions::read(matches)?;
    let say = |message: &str| crate::say(called, message);
    options.remarks.iter().for_each(|remark| say(remark));
    let place = options.place()?;
    let console = Console::new(options.timestamps, options.output_folder.as_deref(), place.num_proc)?;
    let (verbose, job) = (options.verbose, job(options, &place, surroundings));
    if verbose {
        let system = place.system.map_or_else(String::new, |system| format!(", as {system} says"));
        say(&format!("starting {} processes of {}{system}", job.num_proc, job.command.join(" ")));
    }
    let sink = Arc::new(console) as Arc<dyn Sink>;
    let assigned = |world: &World| {
        for seat in (0u32..).zip(&world.seats).filter(|_| verbose) {
            say(&format!("rank {} is local rank {} on {}", seat.0, seat.1.local_rank, seat.1.host));
        }
    };
    let report = job.run_told(&sink, &|| surroundings.wish(), &assigned)?;
    tell(&report, verbose, &say);
    Ok(report.exit_code())
}

fn job(options: RunOptions, place: &Place, surroundings: &dyn Surroundings) -> Job {
    Job {
        hosts: place.hosts.clone(),
        shell: place.shell.clone(),
        python: surroundings.python().executable,
        ..Job::here(place.num_proc, options.command, options.environment, options.config)
    }
}

fn tell(report: &Report, verbose: bool, say: &dyn Fn(&str)) {
    if verbose {
        for outcome in &report.outcomes {
            if let (Some(rank), Some(how)) = (outcome.rank, &outcome.how) {
                say(&format!("rank {rank} {how}"));
            }
        }
    }
    let Some(reason) = report.reason() else { return };
    let others = report.outcomes.iter().filter(|outcome| outcome.aborted).count();
    if report.interrupted || others == 0 {
        say(reason);
    } else {
        say(&format!("{reason}; the other processes were ended"));
    }
}
