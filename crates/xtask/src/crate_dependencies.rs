// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! The table of allowed dependencies between rooms, and the check that manifests keep to it.
//! `docs/developer-guide/architecture.md` explains it; an edge not in this table is a mistake.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Room, and the rooms it may use. The facade and what stands on it are written out, too: the table
/// is the truth.
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("world", &[]),
    ("config", &[]),
    ("telemetry", &["config"]),
    ("door", &[]),
    ("shm", &["world"]),
    ("transport", &["world", "config", "shm"]),
    ("kernels", &["world", "shm"]),
    ("collectives", &["world", "shm", "transport", "kernels"]),
    ("cuda", &["world", "shm", "kernels", "collectives"]),
    ("negotiation", &["world", "kernels"]),
    (
        "engine",
        &["world", "config", "telemetry", "transport", "kernels", "collectives", "negotiation"],
    ),
    ("membership", &["world"]),
    ("registrar", &["world", "config", "telemetry", "membership"]),
    ("launcher", &["world", "config", "telemetry", "registrar"]),
    (
        "session",
        &["world", "config", "registrar", "transport", "kernels", "collectives", "engine", "cuda"],
    ),
    ("store", &["config"]),
    ("dataset", &["world"]),
    ("prepare", &["store", "dataset"]),
    ("reader", &["world", "shm", "store", "dataset"]),
    ("images", &[]),
    ("ui", &["world", "telemetry", "store"]),
    (
        "facade",
        &[
            "world",
            "config",
            "telemetry",
            "shm",
            "transport",
            "kernels",
            "collectives",
            "cuda",
            "negotiation",
            "engine",
            "membership",
            "registrar",
            "launcher",
            "session",
            "store",
            "dataset",
            "prepare",
            "reader",
            "images",
            "ui",
        ],
    ),
    // The command `simulate` alone uses the simulator, so it is not in the facade.
    (
        "simulator",
        &["world", "config", "registrar", "transport", "collectives", "engine", "session"],
    ),
    ("cli", &["facade", "simulator"]),
    ("ffi", &["door", "facade"]),
    ("tensorflow", &["door"]),
    ("python", &["facade", "cli", "ffi"]),
    // Development only: testkit may use the crates that it imitates, xtask the crates that it
    // generates from.
    ("testkit", &["world", "config", "shm", "transport", "kernels", "collectives", "engine"]),
    ("xtask", &["config"]),
    ("fuzz", &["config"]),
];

/// Fails on the first edge that the table does not have. Dev-dependencies are free, except on
/// xtask.
pub(crate) fn check_dependencies(root: &Path) -> Result<()> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().context("packages")? {
        let from = crate_label(package["name"].as_str().unwrap_or_default()).unwrap_or_default();
        let Some((_, allowed)) = ALLOWED_DEPENDENCIES.iter().find(|(name, _)| *name == from) else {
            wrong.push(format!("{from} has no row in the table"));
            continue;
        };
        for dependency in package["dependencies"].as_array().context("dependencies")? {
            let Some(to) = crate_label(dependency["name"].as_str().unwrap_or_default()) else {
                continue;
            };
            if dependency["kind"].is_null() && !allowed.contains(&to) {
                wrong.push(format!("{from} may not use {to}"));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("edges between rooms:\n  {}", wrong.join("\n  ")) }
}

fn crate_label(package: &str) -> Option<&str> {
    match package {
        "farandole" => Some("facade"),
        other => other.strip_prefix("farandole-"),
    }
}
