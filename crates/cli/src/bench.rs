// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `farandole bench`: measures one collective on several processes of this host.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use farandole::config::{Config, environment_variable};
use farandole::launcher::StaticJob;
use farandole::telemetry::{OutputStream, RecordSink, WorkerRecord};
use farandole::world::format_counted_noun;

use crate::embedding_interpreter::EmbeddingInterpreter;

/// The module that a rank runs.
const WORKER_ARGUMENTS: [&str; 2] = ["-m", "farandole.runner.bench"];
/// Beginning of the line that rank 0 prints for each size; the times in seconds follow.
const ROW_PREFIX: &str = "bench-row ";

const BENCH_OPERATIONS: [&str; 5] =
    ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"];
const BENCH_DTYPES: [&str; 10] = [
    "uint8",
    "int8",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
];
const DEFAULT_SIZES: &str = "4,1K,64K,256K,4M,64M";

/// Returns the command line.
pub(crate) fn build_command() -> Command {
    Command::new("bench")
        .about(
            "Measures a collective on several processes of this host; `-np N` is the same as \
                `--num-proc N`.",
        )
        .override_usage("farandole bench <OPERATION> -np <N> [OPTIONS]")
        .arg(
            Arg::new("operation")
                .required(true)
                .value_parser(BENCH_OPERATIONS)
                .help("What to time"),
        )
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
            Arg::new("sizes")
                .long("sizes")
                .default_value(DEFAULT_SIZES)
                .value_delimiter(',')
                .value_parser(parse_bytes)
                .help(
                    "Bytes of the whole tensor, such as 4,1K,4M: what every rank ends with, or for \
                     reducescatter and alltoall begins with",
                ),
        )
        .arg(
            Arg::new("dtype")
                .long("dtype")
                .default_value("float32")
                .value_parser(BENCH_DTYPES)
                .help("Type of the elements"),
        )
        .arg(
            Arg::new("iterations")
                .long("iterations")
                .default_value("0")
                .value_parser(value_parser!(u32))
                .help("Operations of each size; 0 takes as many as fit into a second"),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print one JSON object per line instead of a table"),
        )
        .arg(Arg::new("write").long("write").value_name("FILE").help(
            "Time all algorithms of allreduces, and write rules for worlds of this shape to FILE, \
             which may have rules for others; FARANDOLE_ALLREDUCE_ALGORITHM=@FILE reads them",
        ))
}

/// Runs the command; returns the exit status of the first failure.
pub(crate) fn run_bench(
    matches: &ArgMatches,
    surroundings: &dyn EmbeddingInterpreter,
) -> Result<i32> {
    let text = |name: &str| matches.get_one::<String>(name).cloned().unwrap_or_default();
    let num_proc = matches.get_one("num_proc").copied().unwrap_or_default();
    let iterations: u32 = matches.get_one("iterations").copied().unwrap_or_default();
    let sizes = matches.get_many::<u64>("sizes").unwrap_or_default();
    let mut command = vec![surroundings.installation().executable];
    command.extend(WORKER_ARGUMENTS.map(str::to_owned));
    command.extend([text("operation"), text("dtype"), iterations.to_string()]);
    command.extend(sizes.map(u64::to_string));
    if let Some(file) = matches.get_one::<String>("write") {
        if text("operation") != "allreduce" {
            bail!(
                "--write is for allreduce: the algorithm of other operations is not chosen by rules"
            );
        }
        command.extend(["--write".to_owned(), file.clone()]);
    }
    let config = Config::read(environment_variable, &BTreeMap::new())?;
    let job = StaticJob::job_on_this_host(num_proc, command, BTreeMap::new(), config);
    let table = Arc::new(BenchTable {
        operation: text("operation"),
        dtype: text("dtype"),
        ranks: num_proc,
        json: matches.get_flag("json"),
        rows: AtomicUsize::new(0),
    });
    table.print_header();
    let sink: Arc<dyn RecordSink> = Arc::clone(&table) as Arc<dyn RecordSink>;
    let report = job.run(&sink, &|| surroundings.requested_stop_level())?;
    if let Some(reason) = report.job_failure_reason() {
        bail!("{reason}");
    }
    // All ranks may end with status 0 before the first measurement.
    if table.rows.load(Ordering::Relaxed) == 0 {
        bail!("rank 0 measured nothing");
    }
    Ok(report.exit_code())
}

/// Parses a number of bytes, with `K`, `M` or `G` for powers of 1024.
pub(crate) fn parse_bytes(text: &str) -> Result<u64> {
    let text = text.trim();
    let upper = text.to_ascii_uppercase();
    let (digits, shift) = [("K", 10), ("M", 20), ("G", 30)]
        .iter()
        .find_map(|(unit, shift)| upper.strip_suffix(unit).map(|digits| (digits, *shift)))
        .unwrap_or((&upper, 0));
    let number: u64 = digits.parse().with_context(|| format!("not a size: {text}"))?;
    number
        .checked_mul(1 << shift)
        // An operation without bytes measures nothing.
        .filter(|bytes| *bytes > 0)
        .with_context(|| format!("not a size: {text}"))
}

/// Rank 0's measurement at one size.
#[derive(Debug, PartialEq)]
struct BenchMeasurement {
    bytes: u64,
    iterations: u64,
    /// Median and 90th percentile, in seconds.
    p50: f64,
    p90: f64,
}

impl BenchMeasurement {
    fn parse_line(line: &str) -> Option<Self> {
        let mut fields = line.strip_prefix(ROW_PREFIX)?.split(' ');
        Some(Self {
            bytes: fields.next()?.parse().ok()?,
            iterations: fields.next()?.parse().ok()?,
            p50: fields.next()?.parse().ok()?,
            p90: fields.next()?.parse().ok()?,
        })
    }
}

/// Prints rows as they arrive, and the errors of ranks.
struct BenchTable {
    operation: String,
    dtype: String,
    ranks: u32,
    json: bool,
    rows: AtomicUsize,
}

impl BenchTable {
    fn print_header(&self) {
        if !self.json {
            print_line(&format!(
                "{} of {} on {}",
                self.operation,
                self.dtype,
                format_counted_noun(self.ranks.into(), "process")
            ));
            print_line(&format!(
                "{:>12} {:>7} {:>12} {:>12} {:>10} {:>10}",
                "bytes", "calls", "median us", "p90 us", "alg GB/s", "bus GB/s"
            ));
        }
    }

    /// Returns the bytes on each rank's slowest link, per byte of the tensor.
    fn bus_factor(&self) -> f64 {
        let ranks = f64::from(self.ranks);
        match self.operation.as_str() {
            // A ring has two passes, and each moves (n - 1) / n of the tensor.
            "allreduce" => 2.0 * (ranks - 1.0) / ranks,
            "broadcast" => 1.0,
            _ => (ranks - 1.0) / ranks,
        }
    }

    fn print_row(&self, row: &BenchMeasurement) {
        #[expect(clippy::cast_precision_loss, reason = "a bandwidth of three digits")]
        // A median of 0 must not give an infinite rate.
        let speed = row.bytes as f64 / row.p50.max(1e-12) / 1e9;
        let (p50, p90, bus) = (row.p50 * 1e6, row.p90 * 1e6, speed * self.bus_factor());
        let BenchMeasurement { bytes, iterations, .. } = row;
        print_line(&if self.json {
            let Self { operation, dtype, ranks, .. } = self;
            format!(
                "{{\"operation\": \"{operation}\", \"dtype\": \"{dtype}\", \"ranks\": \
                 {ranks}, \"bytes\": {bytes}, \"iterations\": {iterations}, \"p50_us\": \
                 {p50:.3}, \"p90_us\": {p90:.3}, \"alg_gbps\": {speed:.4}, \"bus_gbps\": {bus:.4}}}"
            )
        } else {
            format!("{bytes:>12} {iterations:>7} {p50:>12.1} {p90:>12.1} {speed:>10.2} {bus:>10.2}")
        });
    }
}

impl RecordSink for BenchTable {
    fn accept_record(&self, record: WorkerRecord) {
        let WorkerRecord::Log(line) = record else { return };
        match BenchMeasurement::parse_line(&line.text)
            // Rank 0 prints its rows to stdout only.
            .filter(|_| line.stream == OutputStream::Stdout)
        {
            Some(row) => {
                // Relaxed: the count is read after the job has ended.
                self.rows.fetch_add(1, Ordering::Relaxed);
                self.print_row(&row);
            }
            // Stdout is for results, which programs may parse.
            None => drop(writeln!(std::io::stderr(), "{}", line.text)),
        }
    }
}

fn print_line(line: &str) {
    // A closed stdout (`| head`) does not end the measurement.
    drop(writeln!(std::io::stdout(), "{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(operation: &str, ranks: u32) -> BenchTable {
        let (operation, dtype) = (operation.to_owned(), "float32".to_owned());
        BenchTable { operation, dtype, ranks, json: false, rows: AtomicUsize::new(0) }
    }

    #[test]
    fn sizes_have_units_of_1024() {
        assert_eq!(
            ["4", "1K", "4m", "2G"].map(|text| parse_bytes(text).unwrap()),
            [4, 1024, 4 << 20, 2 << 30]
        );
        for wrong in ["", "K", "0", "-4", "1T", "99999999999999999999", "18446744073709551615K"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_rank_zeros_own_line_is_a_row() {
        let row = BenchMeasurement { bytes: 4, iterations: 7, p50: 0.5, p90: 1.5 };
        assert_eq!(BenchMeasurement::parse_line("bench-row 4 7 0.5 1.5"), Some(row));
        assert_eq!(BenchMeasurement::parse_line("bench-row 4 7 0.5"), None);
        assert_eq!(BenchMeasurement::parse_line("4 7 0.5 1.5"), None);
    }

    #[test]
    fn bus_bandwidth_is_what_links_carry() {
        assert!((table("allreduce", 4).bus_factor() - 1.5).abs() < 1e-9);
        assert!((table("alltoall", 4).bus_factor() - 0.75).abs() < 1e-9);
        assert!((table("broadcast", 4).bus_factor() - 1.0).abs() < 1e-9);
    }
}
