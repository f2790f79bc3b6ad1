// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Members of a hierarchy that are polled one by one.

use super::super::polled;
use super::*;

#[test]
fn an_allreduce_among_many_hosts_begins_at_once() {
    // The first one makes the routes.
    polled::assert_starts_promptly(1 << 20, HierarchicalAllreduceJob::new, |peers, job| {
        assert_eq!((job.routes.len(), job.near.len()), (7 + 63, 7));
        peers.scratch.store = job.store;
    });
}

/// The own part of a chunk can come before other parts. It is then reduced before the later parts
/// have arrived, and the other host may already have sent partials of the next chunk.
#[test]
fn members_that_are_polled_in_any_order_add_only_what_has_arrived() {
    let worlds: [&[u32]; 5] =
        [&[0, 0, 1, 1], &[0, 0, 0, 1, 2, 2], &[0, 1, 1, 1, 1], &[0, 0, 1], &[0, 0, 1, 1, 2, 2]];
    polled::assert_sums_in_any_order(&worlds, HierarchicalAllreduceJob::new);
}
