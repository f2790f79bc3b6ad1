// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tasks of the workspace: `cargo xtask check` (all checks), `cargo xtask docs` (refreshes
//! generated pages), `cargo xtask proto` (refreshes generated code).
//!
//! ```text
//! check ── edges, config_docs, proto, files, openings, width ──> an error that names each file
//! docs ─── config_docs ──> docs/reference/configuration.md
//! proto ── proto ────────> crates/registrar/src/generated
//! ```

mod config_docs;
mod edges;
mod files;
mod openings;
mod proto;
mod width;

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let root = root()?;
    match env::args().nth(1).as_deref() {
        Some("check") => {
            edges::check(&root)?;
            config_docs::check(&root)?;
            proto::check(&root)?;
            files::check(&root)?;
            openings::check(&root)?;
            width::check(&root)
        }
        Some("deps") => edges::check(&root),
        Some("docs") => config_docs::write(&root),
        Some("proto") => proto::write(&root),
        other => bail!("usage: cargo xtask check|deps|docs|proto, not {other:?}"),
    }
}

fn root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .map(Path::to_path_buf)
        .context("xtask stands two folders below the root")
}
