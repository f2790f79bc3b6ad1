// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! House rules about files and crates that no linter knows: SPDX lines and sizes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

const MAX_RUST_LINES: usize = 700;
const MAX_PYTHON_LINES: usize = 700;
/// Limit of a file of tests. It is larger, because splitting a file of cases that share their
/// fixtures would only move them.
const MAX_TEST_LINES: usize = 750;
/// Limit of the product code of a crate. A larger crate has several responsibilities.
const MAX_CRATE_LINES: usize = 8000;
/// Folders and files whose code is no product code.
const FOLDERS_OF_OTHERS: [&str; 9] = [
    "tests",
    "testkit",
    "benches",
    "examples",
    "generated",
    "simulation",
    "load_test",
    "horovod-compat",
    "petastorm-compat",
];
/// Generated names of variables.
pub(crate) const PYTHON_NAMES: &str = "python/farandole/_variables.py";
const SPDX_LINE: &str = "SPDX-License-Identifier: Apache-2.0";

/// Fails when a tracked source file lacks its SPDX line or is longer than the house allows.
pub(crate) fn check_files(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    for path in tracked_files(root)? {
        let name = path.to_string_lossy().into_owned();
        let max_product_lines = match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => MAX_RUST_LINES,
            Some("py" | "pyi") => MAX_PYTHON_LINES,
            _ => continue,
        };
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        if !text.is_empty() && !text.lines().take(3).any(|line| line.contains(SPDX_LINE)) {
            wrong.push(format!("{name}: the first lines lack `{SPDX_LINE}`"));
        }
        let lines = text.lines().count();
        let is_test = name.split(['/', '.']).any(|part| part == "tests");
        let max_lines = if is_test { MAX_TEST_LINES } else { max_product_lines };
        if lines > max_lines && !name.contains("generated") {
            wrong.push(format!("{name}: {lines} lines, the house allows {max_lines}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("files:\n  {}", wrong.join("\n  ")) }
}

/// Fails when a crate has more product code than the house allows.
pub(crate) fn check_crate_sizes(root: &Path) -> Result<()> {
    let wrong: Vec<String> = package_lines(root)?
        .into_iter()
        .filter(|(package, lines)| package.starts_with("crates/") && *lines > MAX_CRATE_LINES)
        .map(|(member, lines)| {
            format!(
                "{member}: {lines} lines of product code, the house allows {MAX_CRATE_LINES}: move \
                 a responsibility to a crate of its own"
            )
        })
        .collect();
    if wrong.is_empty() { Ok(()) } else { bail!("crates:\n  {}", wrong.join("\n  ")) }
}

/// Prints the lines of product code: of each crate and each Python package, and of all.
pub(crate) fn print_sizes(root: &Path) -> Result<()> {
    let mut sizes: Vec<_> = package_lines(root)?.into_iter().collect();
    sizes.sort_by_key(|(package, lines)| (Reverse(*lines), package.clone()));
    for (package, lines) in &sizes {
        println!("{lines:>7}  {package}");
    }
    println!("{:>7}  all", sizes.iter().map(|(_, lines)| lines).sum::<usize>());
    Ok(())
}

/// Returns the lines of product code, without comments on decisions, of each crate and each Python
/// package that ships.
fn package_lines(root: &Path) -> Result<BTreeMap<String, usize>> {
    let mut sizes = BTreeMap::new();
    for (path, text) in product_files(root)? {
        let package = package_of_path(&path);
        if package != "crates/xtask" {
            *sizes.entry(package).or_default() +=
                text.lines().filter(|line| !is_plain_comment(line)).count();
        }
    }
    Ok(sizes)
}

/// Returns whether a line is a comment that explains a decision. A limit must not be a reason to
/// leave it out.
fn is_plain_comment(line: &str) -> bool {
    let line = line.trim_start();
    let is_doc = line.starts_with("///") || line.starts_with("//!");
    (line.starts_with("//") && !is_doc) || line.starts_with("# ")
}

/// Returns path and text of each Rust and Python file without its tests. Files of tests and
/// generated files are left out.
pub(crate) fn product_files(root: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for path in tracked_files(root)? {
        let name = path.to_string_lossy().into_owned();
        let is_product = (name.starts_with("crates/") || name.starts_with("python/"))
            && [".rs", ".py"].iter().any(|end| name.ends_with(end))
            && !name.split(['/', '.']).any(|part| FOLDERS_OF_OTHERS.contains(&part))
            && name != PYTHON_NAMES;
        if let (true, Ok(text)) = (is_product, fs::read_to_string(root.join(&path))) {
            let product: Vec<&str> = text.lines().take(product_lines(&text)).collect();
            files.push((name, product.join("\n")));
        }
    }
    Ok(files)
}

/// Returns the crate, or the first folder below the Python package.
pub(crate) fn package_of_path(path: &str) -> String {
    let depth = if path.starts_with("python/farandole/") { 3 } else { 2 };
    let parts: Vec<&str> = path.split('/').collect();
    let end = depth.min(parts.len() - 1);
    parts[..end].join("/")
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
