// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Comments have at most 100 columns. `rustfmt` checks code only, and `ruff` checks all of Python.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::source_files::tracked_files;

const MAX_COLUMNS: usize = 100;

/// Fails if a line of a `//` comment of a tracked file is too long, except in fences, tables and
/// generated files.
pub(crate) fn check_comment_width(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    for path in tracked_files(root)? {
        let name = path.to_string_lossy().into_owned();
        let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
        let has_comments =
            ["rs", "proto", "java", "js", "c", "cpp", "h", "cu"].contains(&extension);
        if !has_comments || name.contains("generated") {
            continue;
        }
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        for line in long_comment_lines(&text) {
            wrong.push(format!("{name}:{line}: a comment of more than {MAX_COLUMNS} columns"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("width:\n  {}", wrong.join("\n  ")) }
}

fn long_comment_lines(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (at, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            fenced = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim();
        if comment.starts_with("```") {
            fenced = !fenced;
        }
        let can_be_wrapped = !fenced && !comment.starts_with('|') && comment.contains(' ');
        if can_be_wrapped && line.chars().count() > MAX_COLUMNS {
            found.push(at + 1);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::long_comment_lines;

    #[test]
    fn a_long_comment_is_found_and_a_drawing_is_not() {
        let words = "word ".repeat(20);
        let text = format!(
            "//! Short.\n/// {words}\n//! ```text\n//! {words}\n//! ```\n// {words}\n// | \
             {words}\nlet x = 1;"
        );
        assert_eq!(long_comment_lines(&text), [2, 6]);
    }
}
