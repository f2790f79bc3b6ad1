// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! House rules about files and crates that no linter knows: SPDX lines and sizes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const MAX_RUST_LINES: usize = 700;
const MAX_PYTHON_LINES: usize = 700;
/// Limit of the product code of a crate. A larger crate has several responsibilities.
const MAX_CRATE_LINES: usize = 8000;
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

/// Fails when a crate has more product code than the house allows. Tests, simulations and generated
/// code do not count.
pub(crate) fn check_crate_sizes(root: &Path) -> Result<()> {
    let mut crate_lines: BTreeMap<String, usize> = BTreeMap::new();
    for path in tracked_files(root)? {
        let name = path.to_string_lossy().into_owned();
        let Some((member, file)) = name.split_once("/src/") else { continue };
        let exempt = ["tests", "simulation", "generated"].iter().any(|part| file.contains(part));
        if exempt || path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        *crate_lines.entry(member.to_owned()).or_default() += product_lines(&text);
    }
    let wrong: Vec<String> = crate_lines
        .into_iter()
        .filter(|(_, lines)| *lines > MAX_CRATE_LINES)
        .map(|(member, lines)| {
            format!(
                "{member}: {lines} lines of product code, the house allows {MAX_CRATE_LINES}: move \
                 a responsibility to a crate of its own"
            )
        })
        .collect();
    if wrong.is_empty() { Ok(()) } else { bail!("crates:\n  {}", wrong.join("\n  ")) }
}

/// Returns the number of lines before the tests at the end of a file.
fn product_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begins_tests = |at: usize| {
        lines[at] == "#[cfg(test)]"
            && lines[at + 1..]
                .iter()
                .find(|line| !line.starts_with("#["))
                .is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
    };
    (0..lines.len()).find(|at| begins_tests(*at)).unwrap_or(lines.len())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_at_the_end_of_a_file_are_no_product_code() {
        let text = "fn a() {}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
        assert_eq!(product_lines(text), 2);
        let expected = "fn a() {}\n#[cfg(test)]\n#[expect(dead_code)]\nmod tests {\n}\n";
        assert_eq!(product_lines(expected), 1);
    }

    #[test]
    fn a_module_in_another_file_does_not_end_the_product_code() {
        assert_eq!(product_lines("#[cfg(test)]\nmod tests;\n\nfn a() {}\n"), 4);
    }
}
