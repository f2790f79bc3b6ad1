// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Autotune: finds the fusion threshold that moves the most bytes per microsecond.
//!
//! Only rank 0 fuses, so only rank 0 needs the threshold. Horovod also tunes a cycle time, caching
//! and hierarchical algorithms. Here there are no cycles, spinning adapts by itself with every
//! wait, and algorithms come from a table. The threshold is the only parameter left. Its effect is
//! noisy, small and not smooth, because one tensor more or less joins an operation. So the search
//! is successive halving over powers of two instead of Horovod's Gaussian process: each pass
//! measures every remaining candidate once more and drops the worse half. It needs no model of the
//! noise, compares candidates measured in the same minutes, and ends after about fifteen samples.
//!
//! A *step* ends when its first tensor is submitted again. A *score* is bytes per microsecond over
//! several steps. A *sample* is the median of five scores.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Options of autotune.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutotuneOptions {
    /// Number of first samples that are discarded.
    pub warmup_samples: u32,
    /// Number of steps in a score.
    pub steps_per_score: u32,
    /// Number of samples after which the search ends with the best candidate so far.
    pub max_samples: u32,
    /// Path of a CSV file of samples; empty for none.
    pub log: String,
}

/// Number of scores in a sample.
const SCORES_PER_SAMPLE: usize = 5;
/// Candidate thresholds in MiB.
const CANDIDATE_THRESHOLDS_MIB: [u64; 7] = [1, 4, 16, 32, 64, 128, 256];
/// Header with Horovod's columns; the columns that this search does not tune are constant.
const LOG_HEADER: &str = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score";

#[derive(Debug)]
struct ThresholdCandidate {
    threshold: u64,
    samples: Vec<f64>,
}

impl ThresholdCandidate {
    fn median_score(&self) -> f64 {
        median(&self.samples)
    }
}

/// The search for the fusion threshold.
#[derive(Debug)]
pub(crate) struct Autotuner {
    options: AutotuneOptions,
    cached: bool,
    log: Option<File>,
    /// Remaining candidates; `at` is the index of the one that is measured now.
    candidates: Vec<ThresholdCandidate>,
    at: usize,
    warmups: u32,
    samples: u32,
    scores: Vec<f64>,
    /// First tensor of the step.
    first: Option<Arc<str>>,
    steps: u32,
    since: Option<Instant>,
    bytes: u64,
}

impl Autotuner {
    /// Starts the search with `threshold`; `cached` only goes into the log.
    pub(crate) fn new(options: AutotuneOptions, threshold: u64, cached: bool) -> Self {
        let thresholds = CANDIDATE_THRESHOLDS_MIB.map(|mebibytes| mebibytes << 20);
        let other = (!thresholds.contains(&threshold)).then_some(threshold);
        let candidates = other
            .into_iter()
            .chain(thresholds)
            .map(|threshold| ThresholdCandidate { threshold, samples: Vec::new() })
            .collect();
        let mut log = if options.log.is_empty() { None } else { File::create(&options.log).ok() };
        if let Some(file) = &mut log {
            // An error of the log must not stop the search.
            drop(writeln!(file, "{LOG_HEADER}"));
        }
        let warmups = options.warmup_samples;
        Self {
            options,
            cached,
            log,
            candidates,
            at: 0,
            warmups,
            samples: 0,
            scores: Vec::new(),
            first: None,
            steps: 0,
            since: None,
            bytes: 0,
        }
    }

    /// Returns the threshold to fuse with now.
    pub(crate) fn current_threshold(&self) -> u64 {
        self.candidates.get(self.at).map_or(0, |candidate| candidate.threshold)
    }

    /// Returns whether the search is over.
    pub(crate) fn is_done(&self) -> bool {
        self.candidates.len() <= 1
    }

    /// Counts an allreduce that is put into a response list.
    pub(crate) fn observe_allreduce(&mut self, tensor: &Arc<str>, bytes: u64, now: Instant) {
        if self.is_done() {
            return;
        }
        if self.first.as_ref() == Some(tensor) {
            self.steps += 1;
            if self.steps >= self.options.steps_per_score.max(1) {
                self.finish_throughput_score(now);
            }
        }
        // A score begins with a tensor whose return marks the end of each step.
        if self.since.is_none() {
            self.since = Some(now);
            self.first = Some(Arc::clone(tensor));
        }
        self.bytes += bytes;
    }

    fn finish_throughput_score(&mut self, now: Instant) {
        let Some(since) = self.since.replace(now) else { return };
        let micros = now.saturating_duration_since(since).as_secs_f64() * 1e6;
        // Clocks may show no time between two steps.
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        self.scores.push(self.bytes as f64 / micros.max(1e-3));
        (self.bytes, self.steps) = (0, 0);
        if self.scores.len() == SCORES_PER_SAMPLE {
            let sample = median(&std::mem::take(&mut self.scores));
            self.record_sample(sample);
        }
    }

    fn record_sample(&mut self, sample: f64) {
        if self.warmups > 0 {
            self.warmups -= 1;
            return;
        }
        self.samples += 1;
        let threshold = self.current_threshold();
        self.write_log_row(threshold, sample);
        if let Some(candidate) = self.candidates.get_mut(self.at) {
            candidate.samples.push(sample);
        }
        self.at += 1;
        if self.samples >= self.options.max_samples {
            self.finish_search();
        } else if self.at == self.candidates.len() {
            // A pass measures all candidates in the same minutes, so that a slow minute hurts all
            // alike.
            self.at = 0;
            self.sort_candidates();
            self.candidates.truncate(self.candidates.len() / 2);
            if self.is_done() {
                self.finish_search();
            }
        }
        // Operations in progress under the old threshold must not count for the new one.
        self.since = None;
        self.first = None;
    }

    /// Sorts the candidates: the best first, unmeasured ones last.
    fn sort_candidates(&mut self) {
        self.candidates.sort_by(|one, two| two.median_score().total_cmp(&one.median_score()));
    }

    fn finish_search(&mut self) {
        self.sort_candidates();
        self.candidates.truncate(1);
        self.at = 0;
        if let Some(best) = self.candidates.first() {
            self.write_log_row(best.threshold, best.median_score());
        }
        self.log = None;
    }

    fn write_log_row(&mut self, threshold: u64, score: f64) {
        if let Some(log) = &mut self.log {
            drop(writeln!(log, "0,0,0,{},0,{threshold},{score}", u8::from(self.cached)));
        }
    }
}

/// Returns the median; negative infinity if there are no values, so that unmeasured candidates come
/// last.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn tune(log: &str) -> AutotuneOptions {
        AutotuneOptions {
            warmup_samples: 3,
            steps_per_score: 10,
            max_samples: 20,
            log: log.to_owned(),
        }
    }

    /// Runs steps of two tensors; the time of a step depends on the threshold. Returns the number
    /// of steps.
    fn run(tuner: &mut Autotuner, micros: impl Fn(u64, u32) -> u64) -> u32 {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut now = Instant::now();
        for step in 0.. {
            if tuner.is_done() {
                return step;
            }
            assert!(step < 100_000);
            for name in &names {
                tuner.observe_allreduce(name, 500, now);
            }
            now += Duration::from_micros(micros(tuner.current_threshold(), step));
        }
        0
    }

    #[test]
    fn the_quickest_threshold_wins_through_noise_and_stays() {
        // The best threshold is 32 MiB; every third step takes 1.5 times as long, whatever the
        // threshold.
        let cost = |threshold: u64| 100 + 10 * (threshold >> 20).abs_diff(32);
        let mut tuner = Autotuner::new(tune(""), 128 << 20, true);
        let steps =
            run(
                &mut tuner,
                |threshold, step| {
                    if step % 3 == 0 { cost(threshold) * 3 / 2 } else { cost(threshold) }
                },
            );
        assert_eq!(tuner.current_threshold(), 32 << 20);
        // Three warm-up samples, then seven, three and one candidates.
        assert!(steps < (3 + 7 + 3 + 1) * 5 * 11, "{steps}");
        tuner.observe_allreduce(&"a".into(), 1, Instant::now());
        assert_eq!(tuner.current_threshold(), 32 << 20);
    }

    #[test]
    fn the_number_of_samples_is_a_limit_and_what_was_never_measured_does_not_win() {
        let mut tuner =
            Autotuner::new(AutotuneOptions { max_samples: 2, ..tune("") }, 5 << 20, true);
        run(&mut tuner, |threshold, _| if threshold == 5 << 20 { 50 } else { 100 });
        assert_eq!(tuner.current_threshold(), 5 << 20);
    }

    #[test]
    fn the_log_has_horovods_columns_a_row_per_sample_and_the_best_last() {
        let path = std::env::temp_dir().join(format!("farandole-tune-{}.csv", std::process::id()));
        let mut tuner = Autotuner::new(tune(path.to_str().unwrap()), 128 << 20, true);
        run(&mut tuner, |threshold, _| 100 + (threshold >> 20).abs_diff(64));
        let log = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let rows: Vec<&str> = log.lines().collect();
        assert_eq!(rows[0], LOG_HEADER);
        assert_eq!(rows.len(), 1 + 7 + 3 + 1);
        assert!(rows.last().unwrap().starts_with("0,0,0,1,0,67108864,10"), "{log}");
    }
}
