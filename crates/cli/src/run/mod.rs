// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run`, and `horovodrun`.

mod file;
pub(crate) mod flags;
mod options;
#[cfg(test)]
mod tests;
mod watching;

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use farandole::launcher::elastic::{ElasticJob, Happening};
use farandole::launcher::{Job, Report, Work};
use farandole::telemetry::Sink;
use farandole::world::World;

use self::options::{Place, RunOptions};
use self::watching::Watching;
use crate::check_build::check_build;
use crate::console::Console;
use crate::logging;
use crate::surroundings::Surroundings;
use crate::timeline::Gathering;

/// Returns its command line.
pub(crate) fn command() -> Command {
    Command::new("run")
        .display_name("farandole")
        .about(
            "Runs a program on several processes, of this host or of several; `-np N` is the \
                same as `--num-proc N`.",
        )
        .override_usage("farandole run [-np N] [-H HOST:SLOTS,...] [OPTIONS] COMMAND...")
        .after_help(
            "Horovod's other flags are accepted and mean nothing here; each says why when \
                     it is used.",
        )
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
pub(crate) fn run(
    called: &str,
    matches: &ArgMatches,
    surroundings: &dyn Surroundings,
) -> Result<i32> {
    if matches.get_flag("check-build") {
        print!("{}", check_build(&surroundings.python(), &surroundings.modules()));
        return Ok(0);
    }
    let options = RunOptions::read(matches)?;
    logging::install(options.config.log_level, options.config.log_hide_time);
    let say = |message: &str| crate::say(called, message);
    options.remarks.iter().for_each(|remark| say(remark));
    let place = options.place()?;
    let watching = Watching::open(&options, place.num_proc, surroundings)?;
    let verbose = options.verbose;
    let mut timeline = None;
    let report = sinks(&options, &place, &watching).and_then(|(sink, gathering)| {
        timeline = gathering;
        if options.is_elastic() {
            elastic(options, place, surroundings, (&sink, &watching), &say)
        } else {
            fixed(options, place, surroundings, (&sink, &watching), &say)
        }
    });
    watching.ended(&report);
    if let Ok(report) = &report {
        tell(report, verbose, &say);
    }
    if let Some(timeline) = timeline {
        // A missing timeline does not fail a job. The timeline of a failed job may show the reason.
        match timeline.merge() {
            Ok(lines) => lines.iter().for_each(|line| say(line)),
            Err(error) => say(&format!("there is no timeline of the ranks: {error:#}")),
        }
    }
    Ok(report?.exit_code())
}

/// The sink of a job's records, and the part of it that gathers the timeline.
type Sinks = (Arc<dyn Sink>, Option<Arc<Gathering>>);

/// Returns the sinks of a job's records: the console, the run viewer, and the timeline.
fn sinks(options: &RunOptions, place: &Place, watching: &Watching) -> Result<Sinks> {
    let shown = watching.watch().and_then(|watch| watch.folder());
    let folder = options.output_folder.as_deref().or(shown.as_deref());
    let console = Console::new(options.timestamps, folder, place.num_proc, options.is_continued())?;
    let sink = watching.before(Arc::new(console) as Arc<dyn Sink>);
    let timeline =
        options.timeline.as_deref().map(|path| Gathering::new(path, &sink)).transpose()?;
    let sink = timeline.as_ref().map_or(sink, |timeline| Arc::clone(timeline) as Arc<dyn Sink>);
    Ok((sink, timeline))
}

/// Runs a job of a fixed number of processes.
fn fixed(
    options: RunOptions,
    place: Place,
    surroundings: &dyn Surroundings,
    (sink, watching): (&Arc<dyn Sink>, &Watching),
    say: &dyn Fn(&str),
) -> Result<Report> {
    let verbose = options.verbose;
    let Place { num_proc, hosts, allocation, .. } = &place;
    if verbose {
        let system = allocation
            .as_ref()
            .map_or_else(String::new, |given| format!(", as {} says", given.system));
        say(&format!("starting {num_proc} processes of {}{system}", options.command.join(" ")));
    }
    let assigned = |world: &World| {
        let host = |task| {
            world.seats.iter().find(|seat| seat.task.0 == task).map(|seat| seat.host.to_string())
        };
        watching.world(world, |task| host(task).unwrap_or_default());
        for seat in (0u32..).zip(&world.seats).filter(|_| verbose) {
            say(&format!("rank {} is local rank {} on {}", seat.0, seat.1.local_rank, seat.1.host));
        }
    };
    let job = Job {
        num_proc: *num_proc,
        hosts: hosts.clone(),
        work: work(options, &place, surroundings),
    };
    Ok(job.run_told(sink, &|| surroundings.wish(), &assigned)?)
}

/// Runs a job whose processes come and go.
fn elastic(
    options: RunOptions,
    place: Place,
    surroundings: &dyn Surroundings,
    (sink, watching): (&Arc<dyn Sink>, &Watching),
    say: &dyn Fn(&str),
) -> Result<Report> {
    let rules = ElasticJob::rules(place.num_proc, &options.config)?;
    let discovery = options.discovery(&place, rules.most.saturating_add(rules.spares));
    let verbose = options.verbose;
    let before = RefCell::new(HashSet::new());
    let heard = |happening: Happening<'_>| match happening {
        Happening::Resumed { workers } => {
            say(&format!("continues a job that has {workers} processes"))
        }
        Happening::Loss(what) => {
            say(what);
            if let Some(watch) = watching.watch() {
                watch.loss(what);
            }
        }
        Happening::World { world, hosts } => {
            watching.world(world, |task| hosts.get(&task).cloned().unwrap_or_default());
            if verbose || world.generation.0 > 1 {
                say(&described(world, &before.borrow()));
            }
            *before.borrow_mut() = world.seats.iter().map(|seat| seat.task.0).collect();
            for (rank, seat) in (0u32..).zip(&world.seats).filter(|_| verbose) {
                let host = hosts.get(&seat.task.0).map_or("?", String::as_str);
                say(&format!("rank {rank} is local rank {} on {host}", seat.local_rank));
            }
        }
    };
    let journal = options.journal();
    let outage = options.config.registrar_timeout;
    let mut work = work(options, &place, surroundings);
    if journal.is_some() {
        work.outage = outage;
    }
    let job = ElasticJob { elastic: rules, work, journal };
    Ok(job.run(discovery, sink, &|| surroundings.wish(), &heard)?)
}

/// Describes a new world for the user. State that only workers had is lost with the last of them.
fn described(world: &World, before: &HashSet<u32>) -> String {
    let told = format!("world {} has {} ranks", world.generation, world.size());
    if before.is_empty() || world.seats.iter().any(|seat| before.contains(&seat.task.0)) {
        told
    } else {
        format!("{told}, all of them new: state that the script has not stored is lost")
    }
}

fn work(options: RunOptions, place: &Place, surroundings: &dyn Surroundings) -> Work {
    Work {
        shell: place.shell.clone(),
        python: surroundings.python().executable,
        ..Work::program(options.command, options.environment, options.config)
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
