// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The differences between the clocks of hosts, measured by the operations themselves.
//!
//! No rank has the result of an operation before every rank has asked for it. Let `c` be the offset
//! that converts the clock of host `h` to the clock of the reference host `r`. Each operation then
//! gives two bounds:
//!
//! ```text
//! ended on h + c >= begun on r      c >= last begun on r - first ended on h
//! ended on r     >= begun on h + c  c <= first ended on r - last begun on h
//! ```
//!
//! Many operations make the interval narrow. Ranks have the result of an operation at about the
//! same time, however late one of them was, so the median of `ended on r - ended on h` is taken,
//! within the interval. The error is at most the distance to its farther bound. Clocks drift, so
//! there is an interval for each minute, and times between two of them are interpolated.

use std::collections::{BTreeMap, HashMap};

use super::operation::PartsByOperation;

/// Microseconds that share an interval.
const CLOCK_WINDOW_US: i64 = 60_000_000;

/// The correction of a host's clock from some moment on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ClockCorrection {
    /// By the host's own clock.
    at: i64,
    shift: f64,
    error: f64,
}

/// The clocks of all ranks, against the one of the lowest rank's host.
pub(super) struct HostClocks {
    host_of: HashMap<u32, String>,
    corrections: HashMap<String, Vec<ClockCorrection>>,
    reference: String,
}

/// The bounds from the operations of a window.
struct ClockBounds {
    low: i64,
    high: i64,
    /// Between the ends on both hosts, for each operation.
    end_differences: Vec<i64>,
}

impl HostClocks {
    /// Measures the clocks of the hosts. `ranks` ascend, each with its host.
    pub(super) fn measure_clocks(ranks: &[(u32, &str)], operations: &PartsByOperation) -> Self {
        let host_of: HashMap<u32, String> =
            ranks.iter().map(|(rank, host)| (*rank, (*host).to_owned())).collect();
        let reference = ranks.first().map_or_else(String::new, |(_, host)| (*host).to_owned());
        let mut windows: HashMap<String, BTreeMap<i64, ClockBounds>> = HashMap::new();
        for parts in operations.values() {
            // By host: when its last rank had begun, when its first rank had ended.
            let mut hosts: HashMap<&str, (i64, i64)> = HashMap::new();
            for part in parts {
                let Some(host) = host_of.get(&part.rank) else { continue };
                let times = hosts.entry(host).or_insert((i64::MIN, i64::MAX));
                *times = (times.0.max(part.begun), times.1.min(part.ended));
            }
            let Some((begun, ended)) = hosts.remove(&*reference) else { continue };
            for (host, (there_begun, there_ended)) in hosts {
                let window = there_ended.div_euclid(CLOCK_WINDOW_US);
                let (low, high) = (begun - there_ended, ended - there_begun);
                let bounds = windows.entry(host.to_owned()).or_default().entry(window);
                let bounds =
                    bounds.or_insert(ClockBounds { low, high, end_differences: Vec::new() });
                bounds.low = bounds.low.max(low);
                bounds.high = bounds.high.min(high);
                bounds.end_differences.push(ended - there_ended);
            }
        }
        let shifts = windows
            .into_iter()
            .map(|(host, windows)| (host, corrections_by_window(windows)))
            .collect();
        Self { host_of, corrections: shifts, reference }
    }

    /// Returns a time of a rank by the reference clock.
    pub(super) fn corrected_time(&self, rank: u32, time: i64) -> i64 {
        let Some(points) = self.host_corrections(rank) else { return time };
        let after = points.partition_point(|point| point.at <= time);
        let shift =
            match (after.checked_sub(1).and_then(|before| points.get(before)), points.get(after)) {
                (Some(before), Some(next)) => {
                    let share = (time - before.at) as f64 / (next.at - before.at) as f64;
                    before.shift + share * (next.shift - before.shift)
                }
                (Some(only), None) | (None, Some(only)) => only.shift,
                (None, None) => 0.0,
            };
        #[expect(clippy::cast_possible_truncation, reason = "microseconds of a job")]
        let shift = shift.round() as i64;
        time + shift
    }

    /// Returns the first correction and its largest error, in microseconds; `None` if nothing was
    /// measured.
    pub(super) fn first_clock_correction(&self, rank: u32) -> Option<(f64, f64)> {
        if self.host_of.get(&rank)? == &self.reference {
            return Some((0.0, 0.0));
        }
        let points = self.host_corrections(rank)?;
        let error = points.iter().map(|point| point.error).fold(0.0, f64::max);
        points.first().map(|point| (point.shift, error))
    }

    fn host_corrections(&self, rank: u32) -> Option<&Vec<ClockCorrection>> {
        self.corrections.get(self.host_of.get(&rank)?)
    }
}

fn corrections_by_window(windows: BTreeMap<i64, ClockBounds>) -> Vec<ClockCorrection> {
    let point =
        |(window, ClockBounds { low, high, end_differences: mut ends }): (i64, ClockBounds)| {
            ends.sort_unstable();
            let median = ends.get(ends.len() / 2).copied().unwrap_or(low);
            // Where a clock was set within the window, the bounds cross.
            let (low, high) = (low.min(high), low.max(high));
            let shift = median.clamp(low, high);
            ClockCorrection {
                at: window * CLOCK_WINDOW_US + CLOCK_WINDOW_US / 2,
                shift: shift as f64,
                error: (high - shift).max(shift - low) as f64,
            }
        };
    windows.into_iter().map(point).collect()
}
