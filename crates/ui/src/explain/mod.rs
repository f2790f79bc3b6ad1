// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finds the limit of a run's speed in the times that its ranks have measured.

use std::collections::BTreeSet;

use farandole_world::format_counted_noun;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::source::RunFiles;

/// A rank is a straggler, or its data is slow, if it takes this many times the median.
const STRAGGLER_RATIO: f64 = 1.3;
/// A share of the step that limits the run.
const LIMITING_SHARE: f64 = 0.25;
/// Share of a step below which no rank's data is slow.
const MIN_SLOW_DATA_SHARE: f64 = 0.1;
/// Mean bytes of a gradient below which the time of a reduction depends on their number.
const SMALL_TENSOR_BYTES: f64 = 65_536.0;
/// Bytes per second below which a link between hosts limits a reduction: a network of 1 Gbit/s.
const SLOW_LINK_BYTES_PER_SECOND: f64 = 125e6;
/// The advice if the measured times do not show which rank is slow.
const TRACE_ADVICE: &str = "fit(timeline=True) records what each rank does and when, and names a rank for \
                     which the others wait";

/// Three lines about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunExplanation {
    /// The limit of the run, with the number that shows it.
    pub verdict: String,
    /// The numbers that the verdict is based on.
    pub why: String,
    /// The next thing to try.
    pub next: String,
}

/// Mean seconds of one rank's steps.
#[derive(Clone, Debug, PartialEq)]
struct RankStepTimes {
    rank: u64,
    host: String,
    step: f64,
    /// The time that a step waits for data; `None` if the rank does not measure it.
    data: Option<f64>,
    /// The time that a step waits for the reduction; `None` if the rank does not measure it.
    reduce: Option<f64>,
    /// The number of gradients that a step reduces, and the bytes of all of them; `None` if the
    /// rank does not say them.
    reduced: Option<(f64, f64)>,
}

impl RankStepTimes {
    fn from_record(rank: &Value) -> Option<Self> {
        let number = |name: &str| rank.get(name).and_then(Value::as_f64);
        Some(Self {
            rank: rank.get("rank")?.as_u64()?,
            host: rank.get("host").and_then(Value::as_str).unwrap_or_default().to_owned(),
            // Shares are divided by this time.
            step: number("step_seconds").filter(|seconds| *seconds > 0.0)?,
            data: number("data_seconds"),
            reduce: number("reduce_seconds"),
            reduced: number("reduced_tensors")
                .zip(number("reduced_bytes"))
                .filter(|(tensors, bytes)| *tensors > 0.0 && *bytes > 0.0),
        })
    }

    /// Returns the seconds in which the rank does not wait; `None` if it does not measure its
    /// waits.
    fn own_work_seconds(&self) -> Option<f64> {
        Some(self.step - self.data? - self.reduce?)
    }
}

/// Explains the run of a record, in whose directory these files are.
pub(crate) fn explain_record(record: &Map<String, Value>, files: &RunFiles) -> RunExplanation {
    if record.get("state").and_then(Value::as_str) == Some("failed") {
        return explain_failure(record, files);
    }
    let ranks: Vec<RankStepTimes> = record
        .get("ranks")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(RankStepTimes::from_record)
        .collect();
    if ranks.is_empty() {
        return explain_unmeasured(record);
    }
    // Stragglers come first: the others wait for them in the reduction, which looks slow then.
    explain_straggler(&ranks)
        .or_else(|| explain_slow_data(&ranks))
        .unwrap_or_else(|| explain_by_largest_step_part(record, &ranks))
}

/// Returns whether the run is one of a function or a script, not of an estimator: its steps are not
/// measured.
fn is_not_estimator_run(record: &Map<String, Value>) -> bool {
    matches!(record.get("what").and_then(Value::as_str), Some("run" | "run_elastic"))
}

fn explain_failure(record: &Map<String, Value>, files: &RunFiles) -> RunExplanation {
    let reason = record.get("reason").and_then(Value::as_str).unwrap_or("no reason is recorded");
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    let events = record.get("events").and_then(Value::as_array);
    let last =
        events.and_then(|events| events.last()).and_then(|event| event.get("what")?.as_str());
    RunExplanation {
        verdict: format!("failed: {}", first(reason)),
        why: last.map_or_else(
            || "no event was recorded before the failure".to_owned(),
            |what| format!("the last event was: {}", first(what)),
        ),
        next: if is_not_estimator_run(record) {
            rank_output_hint(reason, files)
        } else {
            "fit with the same run_id continues from the last checkpoint; on_failure=\"restart\" \
             does so by itself"
                .to_owned()
        },
    }
}

/// Returns a hint to the output of the rank of a failure.
fn rank_output_hint(reason: &str, files: &RunFiles) -> String {
    // Reasons begin with the rank: `rank 1 on a failed: ..`.
    let rank =
        reason.strip_prefix("rank ").and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    let of_rank = rank.map(|rank| format!("output/rank.{rank}/"));
    let kept = |folder: &str| files.keys().any(|file| file.starts_with(folder));
    match of_rank {
        Some(folder) if kept(&folder) => {
            format!(
                "read what the rank has printed: {folder}stderr and {folder}stdout in the \
                     directory of the run"
            )
        }
        _ if kept("output/") => {
            "read what the ranks have printed: output/rank.N/stderr and stdout in the directory of \
             the run"
                .to_owned()
        }
        _ => "read what the ranks have printed: it is not in the directory of the run, but in the \
              output of the job"
            .to_owned(),
    }
}

fn explain_unmeasured(record: &Map<String, Value>) -> RunExplanation {
    if is_not_estimator_run(record) {
        return RunExplanation {
            verdict: "unknown: only fits of estimators measure the time of their steps".to_owned(),
            why: "this is a run of a function or a script".to_owned(),
            next: "run it with timeline=FILE, or farandole run --timeline FILE: the summary names \
                   a rank for which the others wait"
                .to_owned(),
        };
    }
    RunExplanation {
        verdict: "unknown: the run has no times of its ranks".to_owned(),
        why: "ranks report the time of their steps every two seconds, and none has".to_owned(),
        next: "explain a run that trains for longer, or one that was recorded by this version"
            .to_owned(),
    }
}

/// Returns a rank whose own work takes far longer than the median.
fn explain_straggler(ranks: &[RankStepTimes]) -> Option<RunExplanation> {
    let (slow, own, usual) = slowest_rank(ranks, RankStepTimes::own_work_seconds)?;
    let times = own / usual;
    (usual > 0.0 && times > STRAGGLER_RATIO).then(|| RunExplanation {
        verdict: format!(
            "straggler: rank {} on {} computes {times:.1} times as long as the median",
            slow.rank, slow.host
        ),
        why: format!(
            "its own work takes {:.1} ms of a step, the median is {:.1} ms; the others wait for it \
             in the reduction",
            own * 1e3,
            usual * 1e3
        ),
        next: format!(
            "look for other load, a slower processor or a throttled GPU on {}",
            slow.host
        ),
    })
}

/// Returns a rank that waits for its data far longer than the median, so that the others wait for
/// it.
fn explain_slow_data(ranks: &[RankStepTimes]) -> Option<RunExplanation> {
    let (slow, data, usual) = slowest_rank(ranks, |rank| rank.data)?;
    // Without the first condition, a ratio of two tiny times would name a rank.
    (data - usual > MIN_SLOW_DATA_SHARE * slow.step && data > STRAGGLER_RATIO * usual).then(|| RunExplanation {
        verdict: format!(
            "slow data: rank {} on {} waits {:.1} ms of a step for data, the median is {:.1} ms",
            slow.rank,
            slow.host,
            data * 1e3,
            usual * 1e3
        ),
        why: format!(
            "a step takes {:.1} ms there, {} of it waits for data; the others wait for that rank \
             in the reduction",
            slow.step * 1e3,
            format_percent(data / slow.step)
        ),
        next: format!(
            "look for a slow disk, a slow link to the store or other load on {}, and for larger \
             rows in the data of that rank",
            slow.host
        ),
    })
}

/// Returns the rank with the largest value, that value and the median; `None` if there is one rank,
/// or one without a value.
fn slowest_rank(
    ranks: &[RankStepTimes],
    of: impl Fn(&RankStepTimes) -> Option<f64>,
) -> Option<(&RankStepTimes, f64, f64)> {
    let mut values =
        ranks.iter().map(of).collect::<Option<Vec<f64>>>().filter(|values| values.len() > 1)?;
    let (at, most) = values.iter().copied().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let median = if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    };
    Some((ranks.get(at)?, most, median))
}

/// Returns the largest part of a step on average.
fn explain_by_largest_step_part(
    record: &Map<String, Value>,
    ranks: &[RankStepTimes],
) -> RunExplanation {
    let step = mean_over_ranks(ranks, |rank| Some(rank.step)).unwrap_or_default();
    let takes = format!(
        "a step takes {:.1} ms on average over {}",
        step * 1e3,
        format_counted_noun(ranks.len() as u64, "rank")
    );
    let share = |of: fn(&RankStepTimes) -> Option<f64>| {
        mean_over_ranks(ranks, of).map(|seconds| seconds / step)
    };
    let parameter =
        |name: &str| record.get("parameters").and_then(|all| all.get(name)).map(Value::to_string);
    let now =
        |name: &str| parameter(name).map_or_else(String::new, |value| format!(" (now {value})"));
    let reduce = share(|rank| rank.reduce);
    let Some(data) = share(|rank| rank.data) else {
        return RunExplanation {
            verdict: "unknown: this run does not measure what a step waits for".to_owned(),
            why: takes,
            next: TRACE_ADVICE.to_owned(),
        };
    };
    let why = reduce.map_or_else(
        || {
            format!(
                "{takes}: {} waits for data; what waits for the reduction is not measured",
                format_percent(data)
            )
        },
        |reduce| {
            let computes = format_percent(1.0 - data - reduce);
            let (data, reduce) = (format_percent(data), format_percent(reduce));
            format!(
                "{takes}: {data} waits for data, {reduce} waits for the reduction, {computes} \
                     computes"
            )
        },
    );
    // Data comes first: a rank that waits for data makes the others wait in the reduction.
    let (verdict, next) = match reduce {
        _ if data >= LIMITING_SHARE => (
            format!("input-bound: {} of a step waits for data", format_percent(data)),
            format!(
                "try a larger train_reader_num_workers{}, inmemory_cache_all=True if the rows fit \
                 into memory, or a cheaper transformation_fn",
                now("train_reader_num_workers")
            ),
        ),
        None => (
            format!(
                "not input-bound: {} of a step does not wait for data",
                format_percent(1.0 - data)
            ),
            TRACE_ADVICE.to_owned(),
        ),
        Some(reduce) if reduce >= LIMITING_SHARE => {
            if let Some(limited) = explain_by_gradients(ranks, reduce, reduce * step, &why) {
                return limited;
            }
            (
                format!(
                    "reduction-bound: {} of a step waits for the reduction of gradients",
                    format_percent(reduce)
                ),
                format!(
                    "try a larger batch_size{}, gradient_compression or \
                 backward_passes_per_step{}; farandole bench allreduce measures the links",
                    now("batch_size"),
                    now("backward_passes_per_step")
                ),
            )
        }
        Some(reduce) => (
            format!("compute-bound: {} of a step computes", format_percent(1.0 - data - reduce)),
            format!(
                "more ranks or faster processors shorten an epoch; try precision=\"bf16\" or a \
                 larger batch_size{}",
                now("batch_size")
            ),
        ),
    };
    RunExplanation { verdict, why, next }
}

/// Returns what makes reductions slow, if the number and the size of the gradients show it.
fn explain_by_gradients(
    ranks: &[RankStepTimes],
    share: f64,
    waits: f64,
    why: &str,
) -> Option<RunExplanation> {
    let (tensors, bytes) = ranks.first()?.reduced?;
    let hosts: BTreeSet<&str> = ranks.iter().map(|rank| rank.host.as_str()).collect();
    let share = format_percent(share);
    // Many small reductions are slow on every link, so their bytes do not show the link's speed.
    if bytes / tensors < SMALL_TENSOR_BYTES {
        return Some(RunExplanation {
            verdict: format!(
                "small tensors: {share} of a step waits for the reduction of {tensors:.0} \
                 gradients, of {:.1} KB on average",
                bytes / tensors / 1e3
            ),
            why: why.to_owned(),
            next: "fewer and larger reductions cost less: try a larger batch_size or \
                   backward_passes_per_step, or let FARANDOLE_AUTOTUNE=1 find how reductions are \
                   combined"
                .to_owned(),
        });
    }
    // The wait is a part of the transfer, so the link is at most as fast as this.
    let speed = bytes / waits;
    (hosts.len() > 1 && speed < SLOW_LINK_BYTES_PER_SECOND).then(|| RunExplanation {
        verdict: format!(
            "slow link: {share} of a step waits for the reduction of {:.1} MB of gradients, which \
             {} exchange at no more than {:.1} MB/s",
            bytes / 1e6,
            format_counted_noun(hosts.len() as u64, "host"),
            speed / 1e6
        ),
        why: why.to_owned(),
        next: "measure the link with farandole bench allreduce on these hosts; try \
               gradient_compression or a larger backward_passes_per_step"
            .to_owned(),
    })
}

/// Returns the mean over all ranks; `None` if one has no value.
fn mean_over_ranks(
    ranks: &[RankStepTimes],
    of: impl Fn(&RankStepTimes) -> Option<f64>,
) -> Option<f64> {
    let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    Some(ranks.iter().map(of).sum::<Option<f64>>()? / f64::from(count))
}

fn format_percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

#[cfg(test)]
mod tests;
