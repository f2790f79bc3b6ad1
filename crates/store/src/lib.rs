// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Access to stores: a store is a URL, and files have paths relative to it.
//!
//! Owns the parsing of URLs, the names of runs and data below a prefix, and all reads and writes of
//! the data plane. It does not interpret the content of files.
//!
//! ```text
//! url --[parse]--> Location --> object_store backend + prefix --> Store: read, ranges, write, list, upload
//! ```
//!
//! Callers are synchronous, and their processes fork (Spark's daemon). The local and the memory
//! backend work on the calling thread. The first use of a store over the network starts a runtime
//! of two threads, and again in a fork.
//!
//! Invariants:
//! - `ST-1`: a file is visible completely or not at all: writes go to a temporary name and are
//!   renamed.
//! - `ST-2`: every error names the whole path.
//! - `ST-5`: a directory of prepared data has either one writer or any number of readers, on all
//!   hosts together.
//! - `ST-4`: no option's value appears in an error or in debug output.
//! - `ST-3`: `localized(full(path)) == path` for absolute paths; characters are never escaped.

#![forbid(unsafe_code)]

mod backend;
mod error;
mod hadoop;
mod layout;
mod lease;
mod local;
mod location;
mod mark;
mod options;
mod remote;
mod store;
mod sweep;
mod upload;
mod wait;

pub use error::{Error, Fault, Result};
pub use layout::{Layout, Places};
pub use lease::{clear, is_free, renew, settle, share, take};
pub use location::{full, localized};
pub use options::{Options, configure};
pub use remote::options_of;
pub use store::{Entry, Item, Store};
pub use sweep::{Limits, Swept, stale, sweep};
pub use upload::Upload;
