// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The summary of a merged timeline in numbers.

use std::collections::HashSet;

use serde::Serialize;

use super::clocks::HostClocks;
use super::lateness::{RankArrivals, RankLateness};
use super::read::RankTrace;

/// A rank is a straggler if the others wait for it alone for at least this share of the traced
/// time.
const MIN_STRAGGLER_SHARE: f64 = 0.05;

/// One rank.
#[derive(Clone, Debug, Serialize)]
pub struct TimelineRankSummary {
    /// Its number.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Operations that it shares with other ranks.
    pub operations: u64,
    /// Operations to which it came last.
    pub last: u64,
    /// Milliseconds for which all others waited for it alone.
    pub waited_for_ms: f64,
    /// Milliseconds for which it waited for others, summed over operations.
    pub waited_ms: f64,
    /// Microseconds that were added to its clock; absent if nothing was measured.
    pub clock_shift_us: Option<f64>,
    /// Largest error of that.
    pub clock_error_us: Option<f64>,
}

/// The rank that the others wait for.
#[derive(Clone, Debug, Serialize)]
pub struct StragglerShare {
    /// Its number.
    pub rank: u32,
    /// Share of the traced time in which all others wait for it alone.
    pub share: f64,
}

/// The result of [`merge`](super::merge).
#[derive(Clone, Debug, Serialize)]
pub struct TimelineSummary {
    /// By rank.
    pub ranks: Vec<TimelineRankSummary>,
    /// The rank that the others wait for, if there is one.
    pub straggler: Option<StragglerShare>,
    /// Seconds from the first shared operation to the last.
    pub seconds: f64,
    /// Ranks whose files are missing or incomplete.
    pub incomplete: Vec<u32>,
}

impl TimelineSummary {
    pub(super) fn from_traces(
        traces: &[RankTrace],
        clocks: &HostClocks,
        lateness: &RankLateness,
    ) -> Self {
        let row = |trace: &RankTrace| {
            let arrivals = lateness.ranks.get(&trace.rank).copied().unwrap_or_default();
            let shift = clocks.first_clock_correction(trace.rank);
            TimelineRankSummary {
                rank: trace.rank,
                host: trace.host.clone(),
                operations: arrivals.operations,
                last: arrivals.arrived_last,
                waited_for_ms: arrivals.waited_for_alone as f64 / 1e3,
                waited_ms: arrivals.waited as f64 / 1e3,
                clock_shift_us: shift.map(|(shift, _)| shift),
                clock_error_us: shift.map(|(_, error)| error),
            }
        };
        // Without operations, the span is 0, and shares are divided by it.
        let span = lateness.until.saturating_sub(lateness.from).max(1) as f64;
        let latest = lateness.ranks.iter().max_by_key(|(_, arrivals)| arrivals.waited_for_alone);
        let straggler = latest.and_then(|(rank, RankArrivals { waited_for_alone: alone, .. })| {
            let share = *alone as f64 / span;
            (share >= MIN_STRAGGLER_SHARE).then_some(StragglerShare { rank: *rank, share })
        });
        let ranks = traces.iter().map(row).collect();
        let size = traces.iter().map(|trace| trace.size).max().unwrap_or_default();
        let known: HashSet<u32> = traces.iter().map(|trace| trace.rank).collect();
        let incomplete = (0..size).filter(|rank| !known.contains(rank)).collect();
        Self { ranks, straggler, seconds: span / 1e6, incomplete }
    }

    /// Returns all of it as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the same for a terminal.
    pub fn summary_lines(&self) -> Vec<String> {
        let mut lines = vec![format!(
            "{:>5} {:>10} {:>10} {:>14}  clock",
            "rank", "operations", "came last", "waited for"
        )];
        for row in &self.ranks {
            let clock = match (row.clock_shift_us, row.clock_error_us) {
                (Some(shift), Some(error)) => {
                    format!("{shift:+.0} us, error at most {error:.0} us")
                }
                _ => "not measured: no operation is shared with the first rank's host".to_owned(),
            };
            lines.push(format!(
                "{:>5} {:>10} {:>10} {:>11.1} ms  {clock}",
                row.rank, row.operations, row.last, row.waited_for_ms
            ));
        }
        lines.push(match &self.straggler {
            Some(straggler) => format!(
                "rank {} is a straggler: for {:.0} % of {:.2} s all other ranks waited for it",
                straggler.rank,
                100.0 * straggler.share,
                self.seconds
            ),
            None => format!("no straggler in {:.2} s", self.seconds),
        });
        if !self.incomplete.is_empty() {
            let ranks: Vec<String> = self.incomplete.iter().map(ToString::to_string).collect();
            lines.push(format!(
                "the timelines of these ranks are missing or incomplete: {}",
                ranks.join(", ")
            ));
        }
        lines
    }
}
