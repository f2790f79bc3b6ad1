// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Access to stores: a store is a URL, and files have paths relative to it.
//!
//! Owns the parsing of URLs, the names of runs and data below a prefix, and all reads and writes of
//! the data plane. It does not interpret the content of files.
//!
//! ```text
//! url --[parse]--> StoreLocation --> object_store backend + prefix --> Store: read, ranges, write, list, upload
//! ```
//!
//! Callers are synchronous, and their processes fork (Spark's daemon). The local and the memory
//! backend work on the calling thread. The first use of a store over the network starts a runtime
//! of two threads; a forked child starts another one.
//!
//! Invariants:
//! - `ST-1`: a file is visible completely or not at all: writes go to a temporary name and are
//!   renamed.
//! - `ST-2`: every error names the whole path.
//! - `ST-5`: a directory of prepared data has either one writer or any number of readers, on all
//!   hosts together.
//! - `ST-4`: no option's value appears in an error or in debug output.
//! - `ST-6`: a transfer over the network ends by its progress, not by its size: a file is read and
//!   written in parts, and each part is repeated for `FARANDOLE_STORE_TIMEOUT`.
//! - `ST-7`: recursive operations on local directories do not follow symbolic links.
//! - `ST-8`: only ENOENT and ENOTDIR mean that a local file does not exist.
//! - `ST-9`: prepared data is deleted only if a preparation has named every file of it.
//! - `ST-10`: every request over HTTP is signed by the credential that is current when it is sent.
//! - `ST-3`: `localized_path(full_path(path)) == path` for absolute paths; characters are never
//!   escaped.

#![forbid(unsafe_code)]

mod backend;
mod backend_wait;
mod credentials;
mod data_sweep;
mod error;
mod file_entry;
mod fork_reset_value;
mod hdfs_failures;
mod hdfs_retry;
mod hdfs_upload;
mod http_client;
mod http_deadlines;
mod layout;
mod lease;
mod local_files;
mod local_tree;
mod location;
mod mark_names;
mod opened_file;
mod options;
mod prepared_files;
mod ranged_reads;
mod remote;
mod retry_pauses;
mod store;
mod store_operation;

pub use credentials::{CredentialValues, register_credential_function, set_environment_guard};
pub use data_sweep::{
    SkippedDirectory, StaleData, SweepLimits, SweptDirectory, find_stale_data, sweep_stale_data,
};
pub use error::{Error, Fault, Result};
pub use file_entry::FileEntry;
pub use layout::{LayoutOverrides, StoreLayout};
pub use lease::{
    acquire_lease, check_lease, delete_content_and_lease, delete_content_keep_lease,
    downgrade_lease, is_free, mark_in_use, renew_mark,
};
pub use location::{full_path, localized_path};
pub use opened_file::OpenedFile;
pub use options::{BackendOptions, configure_options, configured_options};
pub use prepared_files::{find_foreign_file, is_prepared_part_name};
pub use remote::object_store_options;
pub use store::{DirectoryItem, Store, StoreUpload, reread_if_replaced};
pub use store_operation::failed_store_attempts;
