// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tensors that only some ranks have submitted for too long, at the coordinator.

use std::sync::Arc;
use std::time::Instant;

use farandole_negotiation::FastHashMap;

/// A tensor that has waited too long.
pub(super) struct StallCase {
    /// Earliest known submission by any rank.
    pub(super) since: Instant,
    pub(super) submitters: Vec<u32>,
    /// Name of the operation in reports.
    pub(super) operation: String,
    /// Whether the operation moves no data, so that its submitters only wait for it.
    pub(super) moves_no_data: bool,
}

#[derive(Default)]
pub(super) struct StallCases {
    /// Cases for which reports of other nodes are collected until a time.
    collecting: FastHashMap<Arc<str>, (Instant, StallCase)>,
    /// Cases with the submitters of all nodes, for the stall report.
    confirmed: FastHashMap<Arc<str>, StallCase>,
}

impl StallCases {
    /// Forgets a tensor that is complete.
    pub(super) fn forget_tensor(&mut self, name: &str) {
        // Almost always empty: most tensors need no lookup.
        if !self.collecting.is_empty() {
            self.collecting.remove(name);
        }
        if !self.confirmed.is_empty() {
            self.confirmed.remove(name);
        }
    }

    /// Adds a node's report. Other nodes may report the same tensor until `due`.
    pub(super) fn add_report(&mut self, name: Arc<str>, report: StallCase, due: Instant) {
        let StallCase { since, submitters, operation, moves_no_data } = report;
        let new = || StallCase { since, submitters: Vec::new(), operation, moves_no_data };
        let (_, case) = self.collecting.entry(name).or_insert_with(|| (due, new()));
        case.since = case.since.min(since);
        case.submitters.extend(submitters);
    }

    /// Takes the cases whose reports are complete.
    pub(super) fn take_due_cases(&mut self, now: Instant) -> Vec<(Arc<str>, StallCase)> {
        let due = self.collecting.extract_if(|_, (due, _)| *due <= now);
        due.map(|(name, (_, case))| (name, case)).collect()
    }

    pub(super) fn confirm_case(&mut self, name: Arc<str>, case: StallCase) {
        self.confirmed.insert(name, case);
    }

    /// Returns the cases for the stall report.
    pub(super) fn confirmed_cases(&self) -> &FastHashMap<Arc<str>, StallCase> {
        &self.confirmed
    }
}
