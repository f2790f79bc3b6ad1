// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Shows runs: the run viewer, a page on loopback, and the [`timeline`] of all ranks.
//!
//! Owns the viewer's server, its addresses and its answers. The viewer reads the files that
//! estimators write into the directory of a run, and writes nothing.
//!
//! ```text
//! _record.json, logs/history.jsonl, logs/steps.jsonl --[store]--> catalog, curves --[thin]--> JSON --> page
//! ```
//!
//! Invariants:
//! - `UI-1`: the server listens on loopback only, and answers only addresses that have the token.
//! - `UI-2`: a request reads no file outside the directories of runs that a listing of the store
//!   found.
//! - `UI-3`: an answer has at most four points for each pixel of a curve; the lowest and the
//!   highest value of a pixel are among them.
//! - `UI-4`: the page may load scripts and styles from this server only, and values arrive as JSON
//!   or plain text, never as HTML.
//! - `UI-5`: all addresses in the page are relative, so that it works behind proxies that add a
//!   prefix.
//! - `UI-6`: connections on which no request had the token end after five seconds, and are closed
//!   for newer ones.

#![forbid(unsafe_code)]

mod answer;
mod catalog;
mod connection_slots;
mod csv_table;
mod curves;
mod downsampling;
mod error;
mod explain;
mod explained_location;
mod record;
mod reply;
mod run_metrics;
mod series;
mod server;
mod source;
pub mod timeline;

pub use error::{Error, Fault, Result};
pub use explain::RunExplanation;
pub use explained_location::{LocationExplanation, RunIdentity, explain_location};
pub use server::{RunViewer, ViewerSettings};
