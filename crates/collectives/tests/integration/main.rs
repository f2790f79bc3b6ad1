// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All integration tests of this crate, in one binary: each binary costs a link.

mod adasum;
mod exchange;
mod failures;
mod grid;
mod hosts;
mod in_place;
mod in_place_leaks;
mod many_hosts;
mod on_demand;
mod operations;
mod traffic;
