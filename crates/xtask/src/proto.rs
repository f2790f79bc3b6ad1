// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `crates/registrar/src/generated`, compiled from the `.proto` files without protoc.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const PROTOS: &str = "crates/registrar/proto";
const FILES: &[&str] = &["farandole/registrar/v1/registrar.proto"];
const GENERATED: &str = "crates/registrar/src/generated";
const MODULE: &str = "farandole.registrar.v1.rs";
const HEADER: &str =
    "// SPDX-License-Identifier: Apache-2.0\n// SPDX-FileCopyrightText: the Farandole authors\n";

/// Fails when the checked-in code is not what the `.proto` files say.
pub(crate) fn check(root: &Path) -> Result<()> {
    let found = fs::read_to_string(root.join(GENERATED).join(MODULE)).unwrap_or_default();
    if found != generate(root)? {
        bail!("{GENERATED} is out of date: run `cargo xtask proto`");
    }
    Ok(())
}

/// Refreshes the checked-in code.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(GENERATED).join(MODULE);
    fs::write(&path, generate(root)?).with_context(|| format!("write {}", path.display()))
}

fn generate(root: &Path) -> Result<String> {
    let protos = root.join(PROTOS);
    let files: Vec<PathBuf> = FILES.iter().map(|file| protos.join(file)).collect();
    let descriptors = protox::compile(&files, [&protos]).context("compile the .proto files")?;
    let out = root.join("target").join("proto");
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::Codec")
        .out_dir(&out)
        .compile_fds(descriptors)
        .context("generate code from the descriptors")?;
    let code = fs::read_to_string(out.join(MODULE)).with_context(|| format!("read {MODULE}"))?;
    Ok(format!("{HEADER}{code}"))
}
