// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Members of a halving that are polled one by one.

use super::super::polled;
use super::*;

#[test]
fn an_allreduce_among_many_hosts_begins_at_once() {
    // The first one finds the links and takes memory.
    polled::assert_starts_promptly(128 << 20, HalvingAllreduceJob::new, |peers, job| {
        assert_eq!((job.halving_links.len(), job.near.len()), (7 + 6, 7));
        peers.scratch.store = job.spare;
    });
}

#[test]
fn members_that_are_polled_in_any_order_add_only_what_has_arrived() {
    let worlds: [&[u32]; 7] = [
        &[0, 0, 1, 1],
        &[0, 0, 0, 1, 2, 2],
        &[0, 1, 1, 1, 1],
        &[0, 0, 1],
        &[0, 0, 1, 1, 2, 2],
        &[0, 1, 2, 3, 4, 5, 6],
        &[0, 0, 0, 1, 2, 2, 3, 3, 4, 4],
    ];
    polled::assert_sums_in_any_order(&worlds, HalvingAllreduceJob::new);
}
