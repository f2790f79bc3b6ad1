// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Tasks of the workspace: `cargo xtask check` (all checks), `cargo xtask docs` (refreshes
//! generated pages), `cargo xtask proto` (refreshes generated code), `cargo xtask quiz SEED` (draws
//! names for a reader who does not know the code), `cargo xtask size` (lines of product code).
//!
//! ```text
//! check ── crate_dependencies, config_docs, proto, source_files, doc_openings, comment_width,
//!          naming, glossary ───────> an error that names each file
//! docs ─── config_docs ──> docs/reference/configuration.md, python/farandole/_variables.py
//! proto ── proto ────────> crates/registrar/src/generated
//! ```

mod comment_width;
mod config_docs;
mod crate_dependencies;
mod doc_openings;
mod file_circles;
mod glossary;
mod naming;
mod proto;
mod retired_words;
mod source_files;

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    let root = workspace_root()?;
    match env::args().nth(1).as_deref() {
        Some("check") => {
            crate_dependencies::check_dependencies(&root)?;
            config_docs::check_pages(&root)?;
            proto::check_generated(&root)?;
            source_files::check_files(&root)?;
            source_files::check_crate_sizes(&root)?;
            doc_openings::check_first_words(&root)?;
            comment_width::check_comment_width(&root)?;
            naming::check_names(&root)?;
            retired_words::check_retired_words(&root)?;
            glossary::check_glossary(&root)?;
            file_circles::check_circles(&root)
        }
        Some("circles") => file_circles::print_circles(&root),
        Some("deps") => crate_dependencies::check_dependencies(&root),
        Some("docs") => config_docs::write_pages(&root),
        Some("proto") => proto::write_generated(&root),
        Some("size") => source_files::print_sizes(&root),
        Some("names") => {
            naming::check_names(&root)?;
            retired_words::check_retired_words(&root)
        }
        Some("quiz") => {
            let seed = env::args().nth(2).and_then(|seed| seed.parse().ok());
            naming::print_quiz(&root, seed.context("usage: cargo xtask quiz SEED")?)
        }
        other => {
            bail!("usage: cargo xtask check|circles|deps|docs|names|proto|quiz|size, not {other:?}")
        }
    }
}

fn workspace_root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .map(Path::to_path_buf)
        .context("xtask stands two folders below the root")
}
