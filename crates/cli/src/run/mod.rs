// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole run`, and `horovodrun`.

mod config_file;
pub(crate) mod flags;
mod job_viewer;
mod options;
mod requeue;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command};
use farandole::launcher::elastic::{ElasticJob, ElasticJobUpdate};
use farandole::launcher::{JobReport, StaticJob, WorkerProgram};
use farandole::telemetry::RecordSink;
use farandole::world::{World, format_counted_noun};

use self::job_viewer::OptionalJobViewer;
use self::options::{JobPlacement, RunOptions};
use self::requeue::OptionalRequeue;
use crate::check_build::check_build;
use crate::console::ConsoleSink;
use crate::embedding_interpreter::EmbeddingInterpreter;
use crate::logging;
use crate::timeline::TimelineReceivingSink;

/// Returns the command line.
pub(crate) fn build_command() -> Command {
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
        // Horovod has `-v` for the version, and clap would take `-V`.
        .disable_version_flag(true)
        .args(flags::run_arguments())
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
                // Flags after the name of the program belong to the program.
                .trailing_var_arg(true)
                .help("The program and its arguments"),
        )
}

/// Runs the program; returns the exit status of the first failure. `called` is the command's name.
pub(crate) fn run_job(
    called: &str,
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    if matches.get_flag("check-build") {
        print!(
            "{}",
            check_build(&surroundings.installation(), &surroundings.module_distributions())
        );
        return Ok(0);
    }
    let options = RunOptions::from_matches(matches)?;
    // Installed once more, because flags and the file may change the level.
    logging::install_logging(options.config.log_level, options.config.log_hide_time);
    let say = |message: &str| crate::message::print_message(called, message);
    options.remarks.iter().for_each(|remark| say(remark));
    // Before the viewer: wrong hosts must not leave a run in its store.
    let place = options.job_placement()?;
    let max_requeues = options.requeue.then_some(options.config.max_requeues);
    let requeue = OptionalRequeue::prepare(max_requeues, surroundings)?;
    let watching = OptionalJobViewer::open_viewer(&options, place.num_proc, surroundings)?;
    let verbose = options.verbose;
    let mut timeline = None;
    let report = open_record_sinks(&options, &place, &watching).and_then(|(sink, gathering)| {
        timeline = gathering;
        let sink = requeue.wrap_sink_with_report(sink);
        if options.is_elastic() {
            run_elastic_job(options, place, surroundings, (&sink, &watching, &requeue), &say)
        } else {
            run_static_job(options, place, surroundings, (&sink, &watching, &requeue), &say)
        }
    });
    watching.show_end(&report);
    if let Ok(report) = &report {
        print_job_report(report, verbose, &say);
    }
    if let Some(timeline) = timeline {
        // A missing timeline does not fail a job. The timeline of a failed job may show the reason.
        match timeline.merge_received_timelines() {
            Ok(lines) => lines.iter().for_each(|line| say(line)),
            Err(error) => say(&format!("there is no timeline of the ranks: {error:#}")),
        }
    }
    let report = report?;
    // Last: Slurm ends this process then.
    Ok(requeue.requeue_suspended_job(&report, &say).unwrap_or_else(|| report.exit_code()))
}

/// The sink of a job's records, and the sink within it that collects the timeline.
type JobSinks = (Arc<dyn RecordSink>, Option<Arc<TimelineReceivingSink>>);

/// Returns the sinks of a job's records: the console, the run viewer, and the timeline.
fn open_record_sinks(
    options: &RunOptions,
    place: &JobPlacement,
    watching: &OptionalJobViewer,
) -> Result<JobSinks> {
    let shown = watching.viewer().and_then(|watch| watch.output_folder());
    let folder = options.output_folder.as_deref().or(shown.as_deref());
    let console = ConsoleSink::new(
        options.timestamps,
        folder,
        place.num_proc,
        options.continues_earlier_job(),
    )?;
    let sink = watching.wrap_sink_with_metrics(Arc::new(console) as Arc<dyn RecordSink>);
    // Outermost, so that the viewer does not get the timelines as metrics.
    let timeline = options
        .timeline
        .as_deref()
        .map(|path| TimelineReceivingSink::new(path, &sink))
        .transpose()?;
    let sink =
        timeline.as_ref().map_or(sink, |timeline| Arc::clone(timeline) as Arc<dyn RecordSink>);
    Ok((sink, timeline))
}

/// Runs a job of a fixed number of processes.
fn run_static_job(
    options: RunOptions,
    place: JobPlacement,
    surroundings: &dyn EmbeddingInterpreter,
    (sink, watching, requeue): (&Arc<dyn RecordSink>, &OptionalJobViewer, &OptionalRequeue),
    say: &dyn Fn(&str),
) -> Result<JobReport> {
    let verbose = options.verbose;
    let JobPlacement { num_proc, hosts, allocation, .. } = &place;
    if verbose {
        let system = allocation
            .as_ref()
            .map_or_else(String::new, |given| format!(", as {} says", given.system));
        say(&format!(
            "starting {} of {}{system}",
            format_counted_noun((*num_proc).into(), "process"),
            options.command.join(" ")
        ));
    }
    let assigned = |world: &World| {
        let host = |task| {
            world.seats.iter().find(|seat| seat.task.0 == task).map(|seat| seat.host.to_string())
        };
        watching.show_world(world, |task| host(task).unwrap_or_default());
        for seat in (0u32..).zip(&world.seats).filter(|_| verbose) {
            say(&format!("rank {} is local rank {} on {}", seat.0, seat.1.local_rank, seat.1.host));
        }
    };
    let job = StaticJob {
        num_proc: *num_proc,
        hosts: hosts.clone(),
        program: worker_program(options, &place, requeue, surroundings),
    };
    Ok(job.run_with_observer(sink, &|| requeue.stop_level(surroundings, say), &assigned)?)
}

/// Runs a job whose number of processes may change.
fn run_elastic_job(
    options: RunOptions,
    place: JobPlacement,
    surroundings: &dyn EmbeddingInterpreter,
    (sink, watching, requeue): (&Arc<dyn RecordSink>, &OptionalJobViewer, &OptionalRequeue),
    say: &dyn Fn(&str),
) -> Result<JobReport> {
    let rules = ElasticJob::elastic_rules_from_config(place.num_proc, &options.config)?;
    // Spares need slots, too.
    let discovery = options.host_discovery(&place, rules.max_workers.saturating_add(rules.spares));
    let verbose = options.verbose;
    let before = RefCell::new(HashSet::new());
    let observer = |happening: ElasticJobUpdate<'_>| match happening {
        ElasticJobUpdate::Resumed { workers } => say(&format!(
            "continues a job that has {}",
            format_counted_noun(workers as u64, "process")
        )),
        ElasticJobUpdate::Loss(what) => {
            say(what);
            if let Some(watch) = watching.viewer() {
                watch.show_loss(what);
            }
        }
        ElasticJobUpdate::World { world, hosts } => {
            watching.show_world(world, |task| hosts.get(&task).cloned().unwrap_or_default());
            // Later worlds are news, even without `--verbose`.
            if verbose || world.generation.0 > 1 {
                say(&describe_world(world, &before.borrow()));
            }
            *before.borrow_mut() = world.seats.iter().map(|seat| seat.task.0).collect();
            for (rank, seat) in (0u32..).zip(&world.seats).filter(|_| verbose) {
                let host = hosts.get(&seat.task.0).map_or("?", String::as_str);
                say(&format!("rank {rank} is local rank {} on {host}", seat.local_rank));
            }
        }
    };
    let journal = options.journal_path();
    let outage = options.config.registrar_timeout;
    let mut work = worker_program(options, &place, requeue, surroundings);
    // Without a journal, no other command can continue the job, and waiting is useless.
    if journal.is_some() {
        work.outage = outage;
    }
    let job = ElasticJob { rules, program: work, journal };
    Ok(job.run(discovery, sink, &|| requeue.stop_level(surroundings, say), &observer)?)
}

/// Describes a new world for the user. If all its workers are new, state that was only in workers
/// is lost.
fn describe_world(world: &World, before: &HashSet<u32>) -> String {
    let summary = format!(
        "world {} has {}",
        world.generation,
        format_counted_noun(world.size() as u64, "rank")
    );
    if before.is_empty() || world.seats.iter().any(|seat| before.contains(&seat.task.0)) {
        summary
    } else {
        format!("{summary}, all of them new: state that the script has not stored is lost")
    }
}

fn worker_program(
    options: RunOptions,
    place: &JobPlacement,
    requeue: &OptionalRequeue,
    surroundings: &dyn EmbeddingInterpreter,
) -> WorkerProgram {
    WorkerProgram {
        suspension: requeue.suspension(),
        shell: place.shell.clone(),
        python: surroundings.installation().executable,
        ..WorkerProgram::for_this_host(options.command, options.environment, options.config)
    }
}

fn print_job_report(report: &JobReport, verbose: bool, say: &dyn Fn(&str)) {
    if verbose {
        for outcome in &report.outcomes {
            if let (Some(rank), Some(how)) = (outcome.rank, &outcome.exit_kind) {
                say(&format!("rank {rank} {how}"));
            }
        }
    }
    let Some(reason) = report.job_failure_reason() else { return };
    let others = report.outcomes.iter().filter(|outcome| outcome.aborted).count();
    if report.interrupted || others == 0 {
        say(reason);
    } else {
        say(&format!("{reason}; the other processes were ended"));
    }
}
