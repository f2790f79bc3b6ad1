// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The engine as its callers see it: every rank a thread (or several), links over memory.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::panic, reason = "tests")]

mod cache;
mod calls;
mod cluster;
mod devices;
mod endings;
mod fabric;
mod joins;
mod mismatches;
mod rows;
mod schedules;
mod stalls;
mod threads;
mod tuning;
