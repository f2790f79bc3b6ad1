// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All integration tests of this crate, in one binary: each binary costs a link.

mod contract;
mod mesh;
mod on_demand;
mod processes;
mod relay;
