// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Autotune: finds the fusion threshold that moves the most bytes per microsecond.
//!
//! Rank 0 fuses, so the threshold is its alone: nothing has to be told to the other ranks. Horovod
//! tunes a cycle time too, and whether to cache and to go by hierarchies; here there are no cycles,
//! spinning adapts by itself with every wait, and algorithms come from a table. What is left is one
//! number whose effect is noisy, shallow and not smooth (a tensor more or less in an operation),
//! and so the search is successive halving over powers of two instead of Horovod's Gaussian
//! process: each pass measures every candidate that is left once more and drops the worse half. It
//! needs no model of the noise, compares candidates measured in the same minutes, and ends after
//! some fifteen samples.
//!
//! A *step* ends when its first tensor comes again; a *score* is bytes per microsecond over some
//! steps; a *sample* is the median of five scores.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Options of autotune.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tune {
    /// Samples at the beginning that do not count.
    pub warmup_samples: u32,
    /// Steps of a score.
    pub steps_per_score: u32,
    /// Samples after which the best so far stays.
    pub most_samples: u32,
    /// CSV file of samples; nothing: none.
    pub log: String,
}

/// Scores of a sample.
const SCORES: usize = 5;
/// Thresholds that are tried, in MiB.
const CANDIDATES: [u64; 7] = [1, 4, 16, 32, 64, 128, 256];
/// Horovod's columns; those in which there is nothing to choose here stay the same.
const HEADER: &str = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score";

#[derive(Debug)]
struct Candidate {
    threshold: u64,
    samples: Vec<f64>,
}

impl Candidate {
    fn score(&self) -> f64 {
        median(&self.samples)
    }
}

/// The search.
#[derive(Debug)]
pub(crate) struct Tuner {
    options: Tune,
    cached: bool,
    log: Option<File>,
    /// Candidates that are left; the one measured now is `at`.
    candidates: Vec<Candidate>,
    at: usize,
    warmups: u32,
    samples: u32,
    scores: Vec<f64>,
    /// The tensor that began the step.
    first: Option<Arc<str>>,
    steps: u32,
    since: Option<Instant>,
    bytes: u64,
}

impl Tuner {
    /// Begins with `threshold`; `cached` is for the log.
    pub(crate) fn new(options: Tune, threshold: u64, cached: bool) -> Self {
        let thresholds = CANDIDATES.map(|mebibytes| mebibytes << 20);
        let other = (!thresholds.contains(&threshold)).then_some(threshold);
        let candidates = other
            .into_iter()
            .chain(thresholds)
            .map(|threshold| Candidate { threshold, samples: Vec::new() })
            .collect();
        let mut log = if options.log.is_empty() { None } else { File::create(&options.log).ok() };
        if let Some(file) = &mut log {
            // Tuning matters more than its log.
            drop(writeln!(file, "{HEADER}"));
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

    /// The threshold to fuse with.
    pub(crate) fn threshold(&self) -> u64 {
        self.candidates.get(self.at).map_or(0, |candidate| candidate.threshold)
    }

    /// Returns whether the search is over.
    pub(crate) fn is_done(&self) -> bool {
        self.candidates.len() <= 1
    }

    /// An allreduce goes out.
    pub(crate) fn observe(&mut self, tensor: &Arc<str>, bytes: u64, now: Instant) {
        if self.is_done() {
            return;
        }
        if self.first.as_ref() == Some(tensor) {
            self.steps += 1;
            if self.steps >= self.options.steps_per_score.max(1) {
                self.score(now);
            }
        }
        if self.since.is_none() {
            self.since = Some(now);
            self.first = Some(Arc::clone(tensor));
        }
        self.bytes += bytes;
    }

    fn score(&mut self, now: Instant) {
        let Some(since) = self.since.replace(now) else { return };
        let micros = now.saturating_duration_since(since).as_secs_f64() * 1e6;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        self.scores.push(self.bytes as f64 / micros.max(1e-3));
        (self.bytes, self.steps) = (0, 0);
        if self.scores.len() == SCORES {
            let sample = median(&std::mem::take(&mut self.scores));
            self.sample(sample);
        }
    }

    fn sample(&mut self, sample: f64) {
        if self.warmups > 0 {
            self.warmups -= 1;
            return;
        }
        self.samples += 1;
        let threshold = self.threshold();
        self.row(threshold, sample);
        if let Some(candidate) = self.candidates.get_mut(self.at) {
            candidate.samples.push(sample);
        }
        self.at += 1;
        if self.samples >= self.options.most_samples {
            self.end();
        } else if self.at == self.candidates.len() {
            self.at = 0;
            self.rank();
            self.candidates.truncate(self.candidates.len() / 2);
            if self.is_done() {
                self.end();
            }
        }
        // What is in flight under the old threshold does not count for the new one.
        self.since = None;
        self.first = None;
    }

    /// The best first; those that were never measured last.
    fn rank(&mut self) {
        self.candidates.sort_by(|one, two| two.score().total_cmp(&one.score()));
    }

    fn end(&mut self) {
        self.rank();
        self.candidates.truncate(1);
        self.at = 0;
        if let Some(best) = self.candidates.first() {
            self.row(best.threshold, best.score());
        }
        self.log = None;
    }

    fn row(&mut self, threshold: u64, score: f64) {
        if let Some(log) = &mut self.log {
            drop(writeln!(log, "0,0,0,{},0,{threshold},{score}", u8::from(self.cached)));
        }
    }
}

/// The middle one; nothing at all is worse than anything.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn tune(log: &str) -> Tune {
        Tune { warmup_samples: 3, steps_per_score: 10, most_samples: 20, log: log.to_owned() }
    }

    /// Runs steps of two tensors whose time depends on the threshold; returns how many.
    fn run(tuner: &mut Tuner, micros: impl Fn(u64, u32) -> u64) -> u32 {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut now = Instant::now();
        for step in 0.. {
            if tuner.is_done() {
                return step;
            }
            assert!(step < 100_000);
            for name in &names {
                tuner.observe(name, 500, now);
            }
            now += Duration::from_micros(micros(tuner.threshold(), step));
        }
        0
    }

    #[test]
    fn the_quickest_threshold_wins_through_noise_and_stays() {
        // The best is 32 MiB; every third step takes half as long again, whatever the threshold.
        let cost = |threshold: u64| 100 + 10 * (threshold >> 20).abs_diff(32);
        let mut tuner = Tuner::new(tune(""), 128 << 20, true);
        let steps =
            run(
                &mut tuner,
                |threshold, step| {
                    if step % 3 == 0 { cost(threshold) * 3 / 2 } else { cost(threshold) }
                },
            );
        assert_eq!(tuner.threshold(), 32 << 20);
        // Three warm-up samples, then seven, three and one candidates.
        assert!(steps < (3 + 7 + 3 + 1) * 5 * 11, "{steps}");
        tuner.observe(&"a".into(), 1, Instant::now());
        assert_eq!(tuner.threshold(), 32 << 20);
    }

    #[test]
    fn the_number_of_samples_is_a_limit_and_what_was_never_measured_does_not_win() {
        let mut tuner = Tuner::new(Tune { most_samples: 2, ..tune("") }, 5 << 20, true);
        run(&mut tuner, |threshold, _| if threshold == 5 << 20 { 50 } else { 100 });
        assert_eq!(tuner.threshold(), 5 << 20);
    }

    #[test]
    fn the_log_has_horovods_columns_a_row_per_sample_and_the_best_last() {
        let path = std::env::temp_dir().join(format!("farandole-tune-{}.csv", std::process::id()));
        let mut tuner = Tuner::new(tune(path.to_str().unwrap()), 128 << 20, true);
        run(&mut tuner, |threshold, _| 100 + (threshold >> 20).abs_diff(64));
        let log = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let rows: Vec<&str> = log.lines().collect();
        assert_eq!(rows[0], HEADER);
        assert_eq!(rows.len(), 1 + 7 + 3 + 1);
        assert!(rows.last().unwrap().starts_with("0,0,0,1,0,67108864,10"), "{log}");
    }
}
