// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Finds the rank that the others wait for.

use std::collections::BTreeMap;

use super::clocks::HostClocks;
use super::operation::{OperationPart, PartsByOperation};

/// Waits that are shorter, in microseconds, have no span of their own.
const MIN_WAIT_SPAN_US: i64 = 500;

/// Arrivals of a rank at operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankArrivals {
    /// Operations that it took part in.
    pub(super) operations: u64,
    /// Operations to which it came last.
    pub(super) arrived_last: u64,
    /// Microseconds for which all others waited for it alone.
    pub(super) waited_for_alone: i64,
    /// Microseconds for which it waited for others.
    pub(super) waited: i64,
}

/// A time in which all other ranks wait for one.
#[derive(Clone, Debug)]
pub(super) struct StragglerWait {
    pub(super) rank: u32,
    pub(super) from: i64,
    pub(super) until: i64,
    pub(super) tensor: String,
}

/// The result from arrivals.
#[derive(Default)]
pub(super) struct RankLateness {
    pub(super) ranks: BTreeMap<u32, RankArrivals>,
    /// In order, and apart from each other.
    pub(super) waits: Vec<StragglerWait>,
    /// Start of the first shared operation, and of the last one.
    pub(super) from: i64,
    pub(super) until: i64,
}

impl RankLateness {
    /// Returns the result of operations that began at `known` or later, in a job of `ranks` ranks.
    pub(super) fn from_operations(
        operations: &PartsByOperation,
        clocks: &HostClocks,
        known: i64,
        ranks: usize,
    ) -> Self {
        let mut lateness = Self { from: i64::MAX, until: i64::MIN, ..Self::default() };
        let mut waits = Vec::new();
        for ((tensor, _), parts) in operations {
            let mut ordered: Vec<(i64, u32)> =
                parts.iter().map(|part| (arrival_time(part, clocks), part.rank)).collect();
            ordered.sort_unstable();
            // Without a second rank, no rank waits.
            let [.., (second, _), (last, latest)] = ordered[..] else {
                continue;
            };
            if ordered.first().is_some_and(|(first, _)| *first < known) {
                continue;
            }
            lateness.until = lateness.until.max(last);
            for (at, rank) in &ordered {
                lateness.from = lateness.from.min(*at);
                let arrivals = lateness.ranks.entry(*rank).or_default();
                arrivals.operations += 1;
                // A damaged file may have any times, and their sum over many operations may
                // overflow.
                arrivals.waited = arrivals.waited.saturating_add(last - at);
            }
            let arrivals = lateness.ranks.entry(latest).or_default();
            arrivals.arrived_last += 1;
            // Ranks outside of the operation's process set do not wait, and if a rank's part is
            // missing, it is unknown whether it waited.
            if parts.len() == ranks && last - second >= MIN_WAIT_SPAN_US {
                // From the last but one arrival to the last one, all others wait for one rank.
                waits.push(StragglerWait {
                    rank: latest,
                    from: second,
                    until: last,
                    tensor: tensor.clone(),
                });
            }
        }
        lateness.waits = merge_overlapping_waits(waits);
        // Tensors that wait at the same time for the same rank cost that time once.
        for wait in &lateness.waits {
            lateness.ranks.entry(wait.rank).or_default().waited_for_alone += wait.until - wait.from;
        }
        lateness
    }
}

fn arrival_time(part: &OperationPart, clocks: &HostClocks) -> i64 {
    clocks.corrected_time(part.rank, part.begun)
}

/// Waits that do not overlap: what overlaps the wait before it begins at its end.
fn merge_overlapping_waits(mut waits: Vec<StragglerWait>) -> Vec<StragglerWait> {
    waits.sort_by_key(|wait| (wait.from, wait.until));
    let mut kept: Vec<StragglerWait> = Vec::new();
    for mut wait in waits {
        if let Some(before) = kept.last_mut()
            && wait.from < before.until
        {
            if wait.rank == before.rank {
                before.until = before.until.max(wait.until);
                continue;
            }
            wait.from = before.until;
        }
        if wait.until - wait.from >= MIN_WAIT_SPAN_US {
            kept.push(wait);
        }
    }
    kept
}
