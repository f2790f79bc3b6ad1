// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All integration tests of this crate, in one binary: each binary costs a link.

mod allreduce;
mod crossover;
mod goal;
