// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! What limits the speed of a run, from the times that its ranks have measured.

use farandole_store::Store;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::record;
use crate::source::{RECORD, Source};

/// A rank is a straggler if its own work takes this many times the median.
const SLOW: f64 = 1.3;
/// A share of the step that limits the run.
const LARGE: f64 = 0.25;

/// Three lines about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// What limits the run, with the number that says so.
    pub verdict: String,
    /// The numbers that the verdict is based on.
    pub why: String,
    /// What to try next.
    pub next: String,
}

/// Mean seconds of one rank's steps.
#[derive(Clone, Debug, PartialEq)]
struct Times {
    rank: u64,
    host: String,
    step: f64,
    data: f64,
    reduce: f64,
}

impl Times {
    fn of(rank: &Value) -> Option<Self> {
        let number = |name: &str| rank.get(name).and_then(Value::as_f64);
        Some(Self {
            rank: rank.get("rank")?.as_u64()?,
            host: rank.get("host").and_then(Value::as_str).unwrap_or_default().to_owned(),
            step: number("step_seconds").filter(|seconds| *seconds > 0.0)?,
            data: number("data_seconds").unwrap_or(0.0),
            reduce: number("reduce_seconds").unwrap_or(0.0),
        })
    }

    /// Seconds in which the rank does not wait.
    fn own(&self) -> f64 {
        self.step - self.data - self.reduce
    }
}

/// Explains the run in the directory `url`, such as `/data/store/runs/mine`.
///
/// # Errors
/// [`Error::Missing`] if there is no record of a run; a store that cannot be read.
pub fn explain(url: &str) -> Result<Explanation> {
    let directory = Store::open(url)?;
    let files = Source::list(&directory)?.remove("").filter(|files| files.contains_key(RECORD));
    let files = files.ok_or_else(|| Error::Missing { what: directory.name_of(RECORD) })?;
    Ok(judge(&record::read(&directory, &files)))
}

/// Explains the run of a record.
pub(crate) fn judge(record: &Map<String, Value>) -> Explanation {
    let ranks: Vec<Times> =
        record.get("ranks").and_then(Value::as_array).into_iter().flatten().filter_map(Times::of).collect();
    if record.get("state").and_then(Value::as_str) == Some("failed") {
        return failed(record);
    }
    if ranks.is_empty() {
        return unknown();
    }
    let (data, reduce) = (share(&ranks, |rank| rank.data), share(&ranks, |rank| rank.reduce));
    let step = mean(&ranks, |rank| rank.step);
    let why = format!(
        "a step takes {:.1} ms on average over {} ranks: {} waits for data, {} waits for the reduction, {} computes",
        step * 1e3,
        ranks.len(),
        percent(data),
        percent(reduce),
        percent(1.0 - data - reduce),
    );
    let parameter = |name: &str| record.get("parameters").and_then(|all| all.get(name)).map(Value::to_string);
    let now = |name: &str| parameter(name).map_or_else(String::new, |value| format!(" (now {value})"));
    if let Some((slow, times)) = straggler(&ranks) {
        return Explanation {
            verdict: format!(
                "straggler: rank {} on {} computes {times:.1} times as long as the median",
                slow.rank, slow.host
            ),
            why: format!(
                "its own work takes {:.1} ms of a step, the median is {:.1} ms; the others wait for it in the reduction",
                slow.own() * 1e3,
                slow.own() / times * 1e3
            ),
            next: format!("look for other load, a slower processor or a throttled GPU on {}", slow.host),
        };
    }
    if data >= LARGE {
        return Explanation {
            verdict: format!("input-bound: {} of a step waits for data", percent(data)),
            why,
            next: format!(
                "try a larger train_reader_num_workers{}, inmemory_cache_all=True if the rows fit into memory, or a \
                 cheaper transformation_fn",
                now("train_reader_num_workers")
            ),
        };
    }
    if reduce >= LARGE {
        return Explanation {
            verdict: format!(
                "reduction-bound: {} of a step waits for the reduction of gradients",
                percent(reduce)
            ),
            why,
            next: format!(
                "try a larger batch_size{}, gradient_compression or backward_passes_per_step{}; farandole bench \
                 allreduce measures the links",
                now("batch_size"),
                now("backward_passes_per_step")
            ),
        };
    }
    Explanation {
        verdict: format!("compute-bound: {} of a step computes", percent(1.0 - data - reduce)),
        why,
        next: format!(
            "more ranks or faster processors shorten an epoch; try precision=\"bf16\" or a larger batch_size{}",
            now("batch_size")
        ),
    }
}

fn failed(record: &Map<String, Value>) -> Explanation {
    let reason = record.get("reason").and_then(Value::as_str).unwrap_or("no reason is recorded");
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    let events = record.get("events").and_then(Value::as_array);
    let last = events.and_then(|events| events.last()).and_then(|event| event.get("what")?.as_str());
    Explanation {
        verdict: format!("failed: {}", first(reason)),
        why: last.map_or_else(
            || "no event was recorded before the failure".to_owned(),
            |what| format!("the last event was: {}", first(what)),
        ),
        next: "fit with the same run_id goes on from the last checkpoint; on_failure=\"restart\" does so by itself"
            .to_owned(),
    }
}

fn unknown() -> Explanation {
    Explanation {
        verdict: "unknown: the run has no times of its ranks".to_owned(),
        why: "ranks report the time of their steps every two seconds, and none has".to_owned(),
        next: "explain a run that trains for longer, or one that was recorded by this version".to_owned(),
    }
}

/// The slowest rank, and how many times the median its own work takes, if that is far more.
fn straggler(ranks: &[Times]) -> Option<(&Times, f64)> {
    let mut works: Vec<f64> = ranks.iter().map(Times::own).collect();
    works.sort_by(f64::total_cmp);
    let middle = works.len() / 2;
    let median = if works.len() % 2 == 1 { works[middle] } else { (works[middle - 1] + works[middle]) / 2.0 };
    let slow = ranks.iter().max_by(|a, b| a.own().total_cmp(&b.own()))?;
    let times = slow.own() / median;
    (ranks.len() > 1 && median > 0.0 && times > SLOW).then_some((slow, times))
}

fn mean(ranks: &[Times], of: impl Fn(&Times) -> f64) -> f64 {
    let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    ranks.iter().map(of).sum::<f64>() / f64::from(count)
}

fn share(ranks: &[Times], of: impl Fn(&Times) -> f64) -> f64 {
    mean(ranks, of) / mean(ranks, |rank| rank.step)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rank(number: u32, step: f64, data: f64, reduce: f64) -> Value {
        json!({"rank": number, "host": format!("h{number}"), "step_seconds": step, "data_seconds": data, "reduce_seconds": reduce})
    }

    fn of(record: Value) -> Explanation {
        let Value::Object(record) = record else { panic!("an object") };
        judge(&record)
    }

    #[test]
    fn waiting_for_data_is_input_bound() {
        let told = of(json!({
            "parameters": {"train_reader_num_workers": 2},
            "ranks": [rank(0, 0.1, 0.07, 0.01), rank(1, 0.1, 0.058, 0.01)],
        }));
        assert_eq!(told.verdict, "input-bound: 64 % of a step waits for data");
        assert_eq!(
            told.why,
            "a step takes 100.0 ms on average over 2 ranks: 64 % waits for data, 10 % waits for the reduction, 26 % computes"
        );
        assert!(told.next.contains("train_reader_num_workers (now 2)"));
    }

    #[test]
    fn a_slow_rank_is_named_before_anything_else() {
        let ranks = [rank(0, 0.2, 0.0, 0.1), rank(1, 0.2, 0.0, 0.1), rank(2, 0.2, 0.0, 0.01)];
        let told = of(json!({ "ranks": ranks }));
        assert_eq!(told.verdict, "straggler: rank 2 on h2 computes 1.9 times as long as the median");
        assert!(
            told.why.starts_with("its own work takes 190.0 ms of a step, the median is 100.0 ms"),
            "{}",
            told.why
        );
    }

    #[test]
    fn the_rest_is_reduction_or_compute() {
        let told = of(json!({"ranks": [rank(0, 0.2, 0.0, 0.1), rank(1, 0.2, 0.0, 0.1)]}));
        assert!(told.verdict.starts_with("reduction-bound: 50 %"), "{}", told.verdict);
        let told = of(json!({"ranks": [rank(0, 0.2, 0.01, 0.01)]}));
        assert_eq!(told.verdict, "compute-bound: 90 % of a step computes");
    }

    #[test]
    fn a_failed_run_and_one_without_times_say_so() {
        let told = of(
            json!({"state": "failed", "reason": "rank 1 was lost\nmore", "events": [{"what": "restart"}]}),
        );
        assert_eq!(
            (told.verdict.as_str(), told.why.as_str()),
            ("failed: rank 1 was lost", "the last event was: restart")
        );
        assert!(of(json!({"ranks": [{"rank": 0}]})).verdict.starts_with("unknown"));
        assert!(of(json!({"ranks": "none"})).verdict.starts_with("unknown"));
    }

    #[test]
    fn a_run_is_read_from_its_directory() {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_string_lossy().into_owned();
        assert!(matches!(explain(&url), Err(Error::Missing { .. })));
        std::fs::write(folder.path().join(RECORD), r#"{"state": "ended"}"#).unwrap();
        assert!(explain(&url).unwrap().verdict.starts_with("unknown"));
    }
}
