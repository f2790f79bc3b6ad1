// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! House rules about files that no linter knows: SPDX lines and sizes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const MAX_RUST_LINES: usize = 700;
const MAX_PYTHON_LINES: usize = 700;
const SPDX_LINE: &str = "SPDX-License-Identifier: Apache-2.0";

/// Fails when a tracked source file lacks its SPDX line or is longer than the house allows.
pub(crate) fn check_files(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    for path in tracked_files(root)? {
        let name = path.to_string_lossy().into_owned();
        let most = match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => MAX_RUST_LINES,
            Some("py" | "pyi") => MAX_PYTHON_LINES,
            _ => continue,
        };
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        if !text.is_empty() && !text.lines().take(3).any(|line| line.contains(SPDX_LINE)) {
            wrong.push(format!("{name}: the first lines lack `{SPDX_LINE}`"));
        }
        let lines = text.lines().count();
        let exempt = name.contains("tests") || name.contains("generated");
        if lines > most && !exempt {
            wrong.push(format!("{name}: {lines} lines, the house allows {most}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("files:\n  {}", wrong.join("\n  ")) }
}

/// Returns the paths of all files that git tracks.
pub(crate) fn tracked_files(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files"])
        .current_dir(root)
        .output()
        .context("run git ls-files")?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())
}
