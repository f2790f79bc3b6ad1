// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use serde_json::json;

use super::*;

fn rank(number: u32, step: f64, data: f64, reduce: f64) -> Value {
    json!({"rank": number, "host": format!("h{number}"), "step_seconds": step, "data_seconds": data, "reduce_seconds": reduce})
}

fn of(record: Value) -> RunExplanation {
    let Value::Object(record) = record else { panic!("an object") };
    explain_record(&record, &RunFiles::new())
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
        "a step takes 100.0 ms on average over 2 ranks: 64 % waits for data, 10 % waits for the \
         reduction, 26 % computes"
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

/// A rank that waits for the reduction of these gradients for half of a step of 0.2 s.
fn reducing(number: u32, host: &str, tensors: u64, bytes: u64) -> Value {
    let mut rank = rank(number, 0.2, 0.0, 0.1);
    rank["host"] = json!(host);
    rank["reduced_tensors"] = json!(tensors);
    rank["reduced_bytes"] = json!(bytes);
    rank
}

#[test]
fn a_reduction_of_many_small_gradients_is_named() {
    let told =
        of(json!({"ranks": [reducing(0, "a", 400, 4_800_000), reducing(1, "b", 400, 4_800_000)]}));
    assert_eq!(
        told.verdict,
        "small tensors: 50 % of a step waits for the reduction of 400 gradients, of 12.0 KB on \
         average"
    );
    assert!(told.why.contains("50 % waits for the reduction"), "{}", told.why);
    assert!(told.next.contains("FARANDOLE_AUTOTUNE=1"), "{}", told.next);
}

#[test]
fn a_slow_link_between_hosts_is_named_with_its_speed() {
    let told =
        of(json!({"ranks": [reducing(0, "a", 40, 4_000_000), reducing(1, "b", 40, 4_000_000)]}));
    assert_eq!(
        told.verdict,
        "slow link: 50 % of a step waits for the reduction of 4.0 MB of gradients, which 2 hosts \
         exchange at no more than 40.0 MB/s"
    );
    assert!(
        told.next.starts_with("measure the link with farandole bench allreduce"),
        "{}",
        told.next
    );
    // One host has no such link, and this one is fast enough.
    let told =
        of(json!({"ranks": [reducing(0, "a", 40, 4_000_000), reducing(1, "a", 40, 4_000_000)]}));
    assert!(told.verdict.starts_with("reduction-bound"), "{}", told.verdict);
    let told =
        of(json!({"ranks": [reducing(0, "a", 40, 40_000_000), reducing(1, "b", 40, 40_000_000)]}));
    assert!(told.verdict.starts_with("reduction-bound"), "{}", told.verdict);
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
fn a_share_that_is_not_measured_is_no_zero() {
    let ranks = |data: f64| {
        json!({"ranks": [
            {"rank": 0, "host": "a", "step_seconds": 0.2, "data_seconds": data},
            {"rank": 1, "host": "b", "step_seconds": 0.2, "data_seconds": data},
        ]})
    };
    let told = of(ranks(0.01));
    assert_eq!(told.verdict, "not input-bound: 95 % of a step does not wait for data");
    assert_eq!(
        told.why,
        "a step takes 200.0 ms on average over 2 ranks: 5 % waits for data; what waits for the \
         reduction is not measured"
    );
    assert!(told.next.contains("fit(timeline=True)"), "{}", told.next);
    assert_eq!(of(ranks(0.1)).verdict, "input-bound: 50 % of a step waits for data");
    let told =
        of(json!({"ranks": [{"rank": 0, "step_seconds": 0.2}, {"rank": 1, "step_seconds": 0.2}]}));
    assert_eq!(told.verdict, "unknown: this run does not measure what a step waits for");
    assert_eq!(told.why, "a step takes 200.0 ms on average over 2 ranks");
    assert!(told.next.contains("fit(timeline=True)"), "{}", told.next);
}

#[test]
fn without_the_time_of_the_reduction_no_rank_is_a_straggler() {
    let told = of(json!({"ranks": [
        {"rank": 0, "host": "a", "step_seconds": 0.2, "data_seconds": 0.0},
        {"rank": 1, "host": "b", "step_seconds": 0.1, "data_seconds": 0.0},
        {"rank": 2, "host": "c", "step_seconds": 0.1, "data_seconds": 0.0},
    ]}));
    assert!(told.verdict.starts_with("not input-bound"), "{}", told.verdict);
}

#[test]
fn a_rank_with_slow_data_is_named_before_the_shares() {
    let ranks = [rank(0, 0.2, 0.01, 0.09), rank(1, 0.2, 0.01, 0.09), rank(2, 0.2, 0.09, 0.01)];
    let told = of(json!({ "ranks": ranks }));
    assert_eq!(
        told.verdict,
        "slow data: rank 2 on h2 waits 90.0 ms of a step for data, the median is 10.0 ms"
    );
    assert!(
        told.why.starts_with("a step takes 200.0 ms there, 45 % of it waits for data"),
        "{}",
        told.why
    );
    assert!(told.next.contains("h2"), "{}", told.next);
    // Also where the reduction is not measured.
    let told = of(json!({"ranks": [
        {"rank": 0, "host": "a", "step_seconds": 0.2, "data_seconds": 0.0},
        {"rank": 1, "host": "b", "step_seconds": 0.2, "data_seconds": 0.1},
    ]}));
    assert!(told.verdict.starts_with("slow data: rank 1 on b waits 100.0 ms"), "{}", told.verdict);
}

#[test]
fn a_small_difference_in_data_is_no_slow_data() {
    // Three times the median, but less than 10 % of a step more.
    let told = of(
        json!({"ranks": [rank(0, 0.2, 0.005, 0.1), rank(1, 0.2, 0.005, 0.1), rank(2, 0.2, 0.015, 0.1)]}),
    );
    assert!(told.verdict.starts_with("reduction-bound"), "{}", told.verdict);
    // More than 10 % of a step, but less than 1.3 times the median.
    let told = of(
        json!({"ranks": [rank(0, 0.2, 0.1, 0.05), rank(1, 0.2, 0.1, 0.05), rank(2, 0.2, 0.125, 0.025)]}),
    );
    assert!(told.verdict.starts_with("input-bound"), "{}", told.verdict);
}

#[test]
fn a_function_is_not_told_to_train_for_longer() {
    let told = of(json!({"what": "run", "ranks": [{"rank": 0, "host": "a", "pid": 10}]}));
    assert_eq!(told.verdict, "unknown: only fits of estimators measure the time of their steps");
    assert!(told.next.contains("--timeline FILE"), "{}", told.next);
}

#[test]
fn the_failure_of_a_function_leads_to_the_output_of_its_rank() {
    let record = json!({"what": "run", "state": "failed", "reason": "rank 1 on b was ended by \
                                                                     signal SIGKILL"});
    let Value::Object(record) = record else { panic!("an object") };
    let next = |files: &[&str]| {
        let files = files.iter().map(|file| ((*file).to_owned(), (1, None))).collect();
        explain_record(&record, &files).next
    };
    assert_eq!(
        next(&["output/rank.1/stderr"]),
        "read what the rank has printed: output/rank.1/stderr and output/rank.1/stdout in the \
         directory of the run"
    );
    assert!(next(&["output/rank.0/stderr"]).contains("output/rank.N/stderr"));
    assert!(next(&[]).contains("not in the directory of the run"));
}
