// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;

use anyhow::Result;
use clap::ArgMatches;
use farandole::config::{Config, PREFIX, environment};
use farandole::launcher::hosts::parse_hosts;
use farandole::launcher::{Job, Report};
use farandole::telemetry::Sink;

use crate::arguments::{flags, is_switch};
use crate::console::Prefixed;
use crate::surroundings::Surroundings;

/// Runs the program; the exit status is that of the first failure.
pub(crate) fn run(matches: &ArgMatches, surroundings: &dyn Surroundings) -> Result<i32> {
    let given = given(matches);
    let config = Config::read(environment, &given)?;
    let hosts = match matches.get_one::<String>("hosts") {
        Some(text) => parse_hosts(text)?,
        None => Vec::new(),
    };
    let job = Job {
        hosts,
        python: surroundings.python().executable,
        ..Job::here(
            matches.get_one("num_proc").copied().unwrap_or_default(),
            matches.get_many::<String>("command").unwrap_or_default().cloned().collect(),
            for_workers(&given),
            config,
        )
    };
    let verbose = matches.get_flag("verbose");
    if verbose {
        say(&format!("starting {} processes of {}", job.num_proc, job.command.join(" ")));
    }
    let sink = Arc::new(Prefixed) as Arc<dyn Sink>;
    let report = job.run(&sink, &|| surroundings.wish())?;
    tell(&report, verbose);
    Ok(report.exit_code())
}

/// The knobs given as flags, by key.
fn given(matches: &ArgMatches) -> BTreeMap<String, String> {
    flags()
        .filter_map(|knob| {
            let value = if is_switch(knob) {
                matches.get_flag(knob.key).then(|| "1".to_owned())
            } else {
                matches.get_one::<String>(knob.key).cloned()
            };
            Some((knob.key.to_owned(), value?))
        })
        .collect()
}

/// The same as variables, for those that workers are to know.
fn for_workers(given: &BTreeMap<String, String>) -> BTreeMap<String, Option<String>> {
    flags()
        .filter(|knob| knob.propagate)
        .filter_map(|knob| {
            given.get(knob.key).map(|value| (format!("{PREFIX}{}", knob.name), Some(value.clone())))
        })
        .collect()
}

fn tell(report: &Report, verbose: bool) {
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

fn say(message: &str) {
    // Nobody is left to tell when stderr is closed.
    drop(writeln!(std::io::stderr(), "farandole: {message}"));
}
