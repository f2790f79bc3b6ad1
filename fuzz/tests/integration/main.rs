// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! All integration tests of this crate, in one binary: each binary costs a link.

mod frames;
mod hostile_parquet;
mod images;
mod manifests;
mod operations;
mod parquet;
mod peer_addresses;
mod reading;
mod registrar;
mod relayed;
mod strangers;
