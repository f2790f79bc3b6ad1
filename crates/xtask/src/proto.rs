// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! `crates/registrar/src/generated`, compiled from the `.proto` files without protoc.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const PROTO_DIRECTORY: &str = "crates/registrar/proto";
const PROTO_FILES: &[&str] = &["farandole/registrar/v1/registrar.proto"];
const GENERATED_DIRECTORY: &str = "crates/registrar/src/generated";
const GENERATED_MODULE: &str = "farandole.registrar.v1.rs";
const SPDX_HEADER: &str =
    "// SPDX-License-Identifier: Apache-2.0\n// SPDX-FileCopyrightText: the Farandole authors\n";

/// Fails if the checked-in code differs from the code that the `.proto` files generate.
pub(crate) fn check_generated(root: &Path) -> Result<()> {
    let found = fs::read_to_string(root.join(GENERATED_DIRECTORY).join(GENERATED_MODULE))
        .unwrap_or_default();
    if found != generate_code(root)? {
        bail!("{GENERATED_DIRECTORY} is out of date: run `cargo xtask proto`");
    }
    Ok(())
}

/// Refreshes the checked-in code.
pub(crate) fn write_generated(root: &Path) -> Result<()> {
    let path = root.join(GENERATED_DIRECTORY).join(GENERATED_MODULE);
    fs::write(&path, generate_code(root)?).with_context(|| format!("write {}", path.display()))
}

fn generate_code(root: &Path) -> Result<String> {
    let protos = root.join(PROTO_DIRECTORY);
    let files: Vec<PathBuf> = PROTO_FILES.iter().map(|file| protos.join(file)).collect();
    let descriptors = protox::compile(&files, [&protos]).context("compile the .proto files")?;
    let out = root.join("target").join("proto");
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::Codec")
        .out_dir(&out)
        .compile_fds(descriptors)
        .context("generate code from the descriptors")?;
    let code = fs::read_to_string(out.join(GENERATED_MODULE))
        .with_context(|| format!("read {GENERATED_MODULE}"))?;
    Ok(format!("{SPDX_HEADER}{code}"))
}
