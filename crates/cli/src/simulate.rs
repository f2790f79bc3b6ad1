// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole simulate`: times of operations on a simulated cluster.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use farandole::config::{Config, environment_variable};
use farandole::world::format_counted_noun;
use farandole_simulator::{
    AllreduceEstimate, AllreduceSimulator, ControlRound, FormationEstimate, ModelProfile,
    PUBLISHED_EFFICIENCIES, PassTiming, SimulatedCluster, StepEstimate, StepOptions, goal_format,
};
use serde_json::{Value, json};

use crate::bench::parse_bytes;

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    let number =
        |name: &'static str, value: &'static str, default: &'static str, help: &'static str| {
            Arg::new(name)
                .long(name)
                .value_name(value)
                .default_value(default)
                .value_parser(value_parser!(f64))
                .help(help)
        };
    let count = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").value_parser(value_parser!(u32)).help(help)
    };
    let pass = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("MS")
            .value_parser(value_parser!(f64))
            .requires("model")
            .help(help)
    };
    Command::new("simulate")
        .about(
            "Computes how long a cluster takes to form a world, for allreduces, and for a training \
             step. Nothing runs: the schedules of a job go over a model of the network.",
        )
        .arg(count("ranks", "Processes, 1 to 4096").required(true))
        .arg(count("hosts", "Hosts, which have equally many ranks").required(true))
        .arg(number("bandwidth", "GBIT/S", "25", "Of each interface in each direction"))
        .arg(number("latency", "US", "20", "Microseconds from one host to another, one way"))
        .arg(count("interfaces", "Interfaces of each host").default_value("1"))
        .arg(count("mtu", "Bytes of the largest packet").default_value("1500"))
        .arg(number("loss", "SHARE", "0", "Packets that are lost, such as 0.001"))
        .arg(count("stragglers", "Hosts that are slower than the others").default_value("0"))
        .arg(number("slowdown", "TIMES", "1.5", "How many times longer these take"))
        .arg(number("copy-rate", "GB/S", "6", "What one core copies"))
        .arg(number(
            "socket-rate",
            "GB/S",
            "5.8",
            "What one core sends or receives over encrypted \
                                                   TCP",
        ))
        .arg(number("memory-rate", "GB/S", "100", "What all cores of a host read and write"))
        .arg(
            Arg::new("bytes")
                .long("bytes")
                .value_name("BYTES")
                .value_delimiter(',')
                .value_parser(parse_bytes)
                .help("Sizes of allreduces of float32, such as 4,64K,64M"),
        )
        .arg(
            Arg::new("model")
                .long("model")
                .value_name("MODEL")
                .value_parser(ModelProfile::MODEL_NAMES)
                .help("Model whose training step is simulated"),
        )
        .arg(pass(
            "forward",
            "Milliseconds of the forward pass and the update, instead of a \
                              P100's",
        ))
        .arg(pass("backward", "Milliseconds of the backward pass"))
        .arg(
            Arg::new("overlap-forward")
                .long("overlap-forward")
                .action(ArgAction::SetTrue)
                .requires("model")
                .help("Let the next forward pass begin before all gradients are reduced"),
        )
        .arg(
            Arg::new("goal")
                .long("goal")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .requires("bytes")
                .help("Write the schedule of the first allreduce in the GOAL format"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help(
            "Print one JSON object \
                                                                            instead of a table",
        ))
}

/// The results of a simulation.
struct SimulationReport {
    cluster: SimulatedCluster,
    forming: FormationEstimate,
    control: ControlRound,
    allreduces: Vec<AllreduceEstimate>,
    step: Option<(ModelProfile, PassTiming, StepEstimate)>,
}

/// Runs the command.
pub(crate) fn run_simulate(matches: &ArgMatches) -> Result<i32> {
    let report = simulate_cluster(matches)?;
    let mut out = std::io::stdout();
    if matches.get_flag("json") {
        writeln!(out, "{}", report.to_json())?;
    } else {
        writeln!(out, "{}", report.text_lines().join("\n"))?;
    }
    Ok(0)
}

fn simulate_cluster(matches: &ArgMatches) -> Result<SimulationReport> {
    let cluster = cluster_from_arguments(matches)?;
    // A job reads the same variables: the simulation chooses the algorithms that the job would
    // choose.
    let config = Config::read(environment_variable, &BTreeMap::new())?;
    let mut collective = AllreduceSimulator::new(&cluster, &config)?;
    let sizes: Vec<u64> = matches.get_many::<u64>("bytes").unwrap_or_default().copied().collect();
    let allreduces =
        sizes.iter().map(|bytes| collective.simulate(*bytes)).collect::<Result<_, _>>()?;
    if let (Some(path), Some(bytes)) = (matches.get_one::<PathBuf>("goal"), sizes.first()) {
        save_file_atomically(path, |out| {
            goal_format::write_goal_schedule(out, &collective, *bytes)
        })?;
    }
    let control = ControlRound::simulate(&cluster)?;
    let step =
        match matches.get_one::<String>("model").and_then(|name| ModelProfile::from_name(name)) {
            None => None,
            Some(model) => {
                let timing = pass_timing_from_arguments(matches, &model)?;
                let options = StepOptions {
                    fusion_threshold: config.fusion_threshold,
                    overlap_forward: matches.get_flag("overlap-forward"),
                };
                let step =
                    StepEstimate::simulate(&mut collective, &control, &model, timing, options)?;
                Some((model, timing, step))
            }
        };
    let forming = FormationEstimate::simulate(&cluster, &config)?;
    Ok(SimulationReport { cluster, forming, control, allreduces, step })
}

/// Writes a temporary file beside `path`, which replaces `path` when it is complete.
fn save_file_atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> farandole_simulator::Result<()>,
) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let cannot = || format!("cannot write {}", path.display());
    let mut out = BufWriter::new(File::create(&part).with_context(cannot)?);
    let written = write(&mut out).map_err(anyhow::Error::from);
    let saved = written.and_then(|()| {
        out.flush().with_context(cannot)?;
        fs::rename(&part, path).with_context(cannot)
    });
    if saved.is_err() {
        // The reason is returned. If the temporary file does not exist, there is nothing to clean
        // up.
        drop(fs::remove_file(&part));
    }
    saved
}

fn cluster_from_arguments(matches: &ArgMatches) -> Result<SimulatedCluster> {
    let count = |name: &str| matches.get_one::<u32>(name).copied().unwrap_or_default();
    let number = |name: &str| matches.get_one::<f64>(name).copied().unwrap_or_default();
    let stragglers = count("stragglers");
    let cluster = SimulatedCluster {
        latency: seconds_to_duration(number("latency") / 1e6).context("--latency")?,
        bandwidth: number("bandwidth") * 1e9 / 8.0,
        interfaces: count("interfaces"),
        mtu: count("mtu"),
        loss: number("loss"),
        stragglers,
        // The flag has a default, which is for stragglers only.
        slowdown: if stragglers > 0 { number("slowdown") } else { 1.0 },
        copy_rate: number("copy-rate") * 1e9,
        socket_rate: number("socket-rate") * 1e9,
        memory_rate: number("memory-rate") * 1e9,
        ..SimulatedCluster::new(count("hosts"), count("ranks"))?
    };
    cluster.check_parameters()?;
    Ok(cluster)
}

fn pass_timing_from_arguments(matches: &ArgMatches, model: &ModelProfile) -> Result<PassTiming> {
    let pass = |name: &'static str, default: Duration| match matches.get_one::<f64>(name) {
        None => Ok(default),
        Some(milliseconds) => {
            seconds_to_duration(milliseconds / 1e3).with_context(|| format!("--{name}"))
        }
    };
    let PassTiming { forward, backward } = model.timing;
    Ok(PassTiming { forward: pass("forward", forward)?, backward: pass("backward", backward)? })
}

/// Converts a time of at most one day.
fn seconds_to_duration(seconds: f64) -> Result<Duration> {
    let day = 86_400.0;
    // NaN is in no range, and is refused, too.
    if !(0.0..=day).contains(&seconds) {
        anyhow::bail!("must be a time of at least 0: {seconds} s");
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn algorithm_name(allreduce: &AllreduceEstimate) -> String {
    allreduce.algorithm.map_or_else(|| "none".to_owned(), |algorithm| algorithm.to_string())
}

fn to_milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl SimulationReport {
    fn text_lines(&self) -> Vec<String> {
        let Self { cluster, forming, control, .. } = self;
        let mut lines = vec![
            format!(
                "{} on {}, {} Gbit/s, {:.0} us",
                format_counted_noun(cluster.ranks.into(), "rank"),
                format_counted_noun(cluster.hosts.into(), "host"),
                cluster.bandwidth * 8.0 / 1e9,
                cluster.latency.as_secs_f64() * 1e6
            ),
            format!(
                "forming a world: {:.3} s; {} and {} at the registrar, {} of the busiest rank",
                forming.time.as_secs_f64(),
                format_counted_noun(forming.calls, "call"),
                format_counted_noun(forming.connections, "connection"),
                format_counted_noun(forming.links, "link")
            ),
            format!(
                "negotiation: {:.3} ms up and {:.3} ms down, {} at the busiest rank",
                to_milliseconds(control.announce_time),
                to_milliseconds(control.distribute_time),
                format_counted_noun(control.busiest_rank_messages, "message")
            ),
        ];
        if !self.allreduces.is_empty() {
            lines.push(format!(
                "{:>12} {:>12} {:>10}  {:<10} {:>14} {:>10}  simulated",
                "bytes", "ms", "GB/s", "algorithm", "sent by a host", "messages"
            ));
        }
        for found in &self.allreduces {
            lines.push(format!(
                "{:>12} {:>12.3} {:>10.3}  {:<10} {:>14} {:>10}  {}",
                found.bytes,
                to_milliseconds(found.time),
                found.tensor_bytes_per_second() / 1e9,
                algorithm_name(found),
                found.sent_by_host,
                found.messages,
                if found.folded { "one host for all" } else { "every rank" }
            ));
        }
        if let Some((model, timing, step)) = &self.step {
            lines.push(format!(
                "{}: {}, {:.1} MB; forward {:.1} ms, backward {:.1} ms",
                model.name,
                format_counted_noun(model.layers.len() as u64, "tensor"),
                to_megabytes(model.gradient_bytes()),
                to_milliseconds(timing.forward),
                to_milliseconds(timing.backward)
            ));
            if *timing == model.timing {
                lines.push(format!("  {}", model.source));
            }
            lines.push(format!(
                "  step {:.1} ms, {:.1} ms of allreduces ({} in {}), efficiency {:.1} %",
                to_milliseconds(step.time),
                to_milliseconds(step.reduction_time),
                step.operations,
                format_counted_noun(step.lists as u64, "list"),
                step.scaling_efficiency() * 100.0
            ));
            let published = PUBLISHED_EFFICIENCIES.map(|published| {
                format!(
                    "{} {:.0} % at {}",
                    published.model,
                    published.efficiency * 100.0,
                    published.ranks
                )
            });
            lines.push(format!("  published for Horovod: {}", published.join(", ")));
        }
        lines
    }

    fn to_json(&self) -> Value {
        let Self { cluster, forming, control, .. } = self;
        let seconds = |time: Duration| time.as_secs_f64();
        let allreduces: Vec<Value> = self
            .allreduces
            .iter()
            .map(|found| {
                json!({
                    "bytes": found.bytes, "seconds": seconds(found.time), "algorithm": algorithm_name(found),
                    "sent_by_host": found.sent_by_host, "messages": found.messages, "folded": found.folded,
                })
            })
            .collect();
        let step = self.step.as_ref().map(|(model, timing, step)| {
            json!({
                "model": model.name, "bytes": model.gradient_bytes(), "forward_seconds": seconds(timing.forward),
                "backward_seconds": seconds(timing.backward), "seconds": seconds(step.time),
                "allreduce_seconds": seconds(step.reduction_time), "operations": step.operations, "lists": step.lists,
                "efficiency": step.scaling_efficiency(),
            })
        });
        json!({
            "ranks": cluster.ranks, "hosts": cluster.hosts, "bandwidth_gbits": cluster.bandwidth * 8.0 / 1e9,
            "latency_seconds": seconds(cluster.latency), "interfaces": cluster.interfaces, "mtu": cluster.mtu,
            "loss": cluster.loss, "stragglers": cluster.stragglers, "slowdown": cluster.slowdown,
            "forming": {
                "seconds": seconds(forming.time), "registered_seconds": seconds(forming.registered),
                "assigned_seconds": seconds(forming.assigned), "met_seconds": seconds(forming.addresses_exchanged),
                "calls": forming.calls, "connections": forming.connections, "links": forming.links,
            },
            "negotiation": {
                "up_seconds": seconds(control.announce_time), "down_seconds": seconds(control.distribute_time),
                "busiest": control.busiest_rank_messages, "messages": control.messages,
            },
            "allreduces": allreduces, "step": step,
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "one digit behind the point")]
fn to_megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments;

    fn read(line: &str) -> Result<ArgMatches, clap::Error> {
        let words: Vec<String> =
            format!("farandole simulate {line}").split(' ').map(str::to_owned).collect();
        arguments::parse_arguments(&words, false).map(|(_, matches)| matches)
    }

    #[test]
    fn arguments_become_a_cluster() {
        let line = "--ranks 16 --hosts 4 --bandwidth 100 --latency 5 --interfaces 2 --loss 0.01 \
                    --stragglers 1";
        let found = cluster_from_arguments(&read(line).unwrap()).unwrap();
        assert_eq!((found.ranks, found.hosts, found.interfaces, found.stragglers), (16, 4, 2, 1));
        assert_eq!((found.bandwidth, found.latency), (12.5e9, Duration::from_micros(5)));
        assert_eq!((found.loss, found.slowdown), (0.01, 1.5));
        let alike = cluster_from_arguments(&read("--ranks 2 --hosts 2").unwrap()).unwrap();
        assert_eq!(alike.slowdown, 1.0, "nobody is slow");
    }

    #[test]
    fn an_invalid_argument_is_refused_by_name() {
        let error_text =
            |line: &str| cluster_from_arguments(&read(line).unwrap()).unwrap_err().to_string();
        assert_eq!(
            error_text("--ranks 8 --hosts 3"),
            "the number of hosts must be a divisor of the number of ranks: 3"
        );
        assert_eq!(
            error_text("--ranks 8 --hosts 4 --bandwidth 0"),
            "the bandwidth must be at least 1000 bytes per second: 0"
        );
        assert_eq!(error_text("--ranks 8 --hosts 4 --latency=-1"), "--latency");
        assert!(read("--ranks 8").is_err());
        assert!(read("--ranks 8 --hosts 4 --forward 5").is_err(), "a pass of no model");
        assert!(read("--ranks 8 --hosts 4 --model lenet").is_err());
    }

    #[test]
    fn a_report_is_the_same_in_words_and_in_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("schedule.goal");
        let line = "--ranks 512 --hosts 64 --bandwidth 25 --latency 20 --model resnet50 --bytes \
                    4,1M,64M --goal";
        let report =
            simulate_cluster(&read(&format!("{line} {}", path.display())).unwrap()).unwrap();
        let (lines, json) = (report.text_lines(), report.to_json());
        println!("{}", lines.join("\n"));
        assert_eq!(lines[0], "512 ranks on 64 hosts, 25 Gbit/s, 20 us");
        assert!(lines.iter().any(|line| line.contains("halving") && line.contains("67108864")));
        assert_eq!(json["allreduces"][0]["algorithm"], "doubling");
        assert_eq!(json["allreduces"][2]["algorithm"], "halving");
        let efficiency = json["step"]["efficiency"].as_f64().unwrap() * 100.0;
        assert!(
            lines.iter().any(|line| line.contains(&format!("efficiency {efficiency:.1} %"))),
            "{lines:?}"
        );
        let schedule = std::fs::read_to_string(&path).unwrap();
        assert!(schedule.starts_with("num_ranks 512\n\nrank 0 {\nl0: "), "{}", &schedule[..80]);

        let line = "--ranks 4096 --hosts 512 --bandwidth 25 --latency 20 --bytes 1G --goal";
        let error =
            simulate_cluster(&read(&format!("{line} {}", path.display())).unwrap()).err().unwrap();
        assert!(error.to_string().contains("messages"), "{error}");
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            schedule,
            "a failure leaves the file as it was"
        );
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }
}
