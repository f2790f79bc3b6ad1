// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Doc comments and docstrings begin with a verb or a noun. A question word at the beginning makes
//! a noun clause, and the reader has to find its subject.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::source_files::tracked_files;

const FORBIDDEN_FIRST_WORDS: [&str; 14] = [
    "What", "Whatever", "Who", "Whoever", "Whom", "Whose", "How", "Which", "Where", "When", "Why",
    "Of", "That", "Those",
];

/// Fails if a doc comment or a docstring of a tracked file begins with a question word, or if that
/// of a function begins with `Whether`.
pub(crate) fn check_first_words(root: &Path) -> Result<()> {
    let mut wrong = Vec::new();
    for path in tracked_files(root)? {
        let find: fn(&[&str]) -> Vec<(usize, String)> =
            match path.extension().and_then(|end| end.to_str()) {
                Some("rs") => rust_doc_openings,
                Some("py" | "pyi") => python_doc_openings,
                _ => continue,
            };
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        let lines: Vec<&str> = text.lines().collect();
        for (line, word) in find(&lines) {
            let (path, line) = (path.display(), line + 1);
            wrong
                .push(format!("{path}:{line}: `{word}`: begin with a verb (a function) or a noun"));
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("first words of documentation:\n  {}", wrong.join("\n  "))
    }
}

fn rust_doc_openings(lines: &[&str]) -> Vec<(usize, String)> {
    let opens = |at: usize| {
        let marker =
            ["///", "//!"].into_iter().find(|marker| lines[at].trim_start().starts_with(marker))?;
        let first = at == 0 || !lines[at - 1].trim_start().starts_with(marker);
        first.then(|| &lines[at].trim_start()[marker.len()..])
    };
    let is_function = |at: usize| {
        let item = lines[at..]
            .iter()
            .map(|line| line.trim_start())
            .find(|line| !line.starts_with(['/', '#']));
        item.is_some_and(|item| item.starts_with("fn ") || item.contains(" fn "))
    };
    forbidden_openings(lines, opens, is_function)
}

fn python_doc_openings(lines: &[&str]) -> Vec<(usize, String)> {
    let opens = |at: usize| lines[at].trim_start().trim_start_matches('r').strip_prefix("\"\"\"");
    let is_function = |at: usize| {
        if at == 0 || !lines[at - 1].trim_end().ends_with(':') {
            return false; // of an attribute
        }
        let definition =
            |line: &str| ["def ", "async def ", "class "].iter().any(|word| line.starts_with(word));
        let Some(start) = (0..at).rev().find(|line| definition(lines[*line].trim_start())) else {
            return false;
        };
        let is_property = start > 0 && lines[start - 1].contains("property");
        !is_property && !lines[start].trim_start().starts_with("class ")
    };
    forbidden_openings(lines, opens, is_function)
}

/// Returns the lines at which documentation begins with a forbidden word, and that word.
fn forbidden_openings<'a>(
    lines: &[&'a str],
    opens: impl Fn(usize) -> Option<&'a str>,
    is_function: impl Fn(usize) -> bool,
) -> Vec<(usize, String)> {
    let word =
        |at: usize| Some(opens(at)?.split_whitespace().next()?.trim_end_matches(['.', ',', ':']));
    let is_wrong = |at: usize, word: &str| {
        FORBIDDEN_FIRST_WORDS.contains(&word) || (word == "Whether" && is_function(at))
    };
    (0..lines.len())
        .filter_map(|at| {
            word(at).filter(|word| is_wrong(at, word)).map(|word| (at, word.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(find: fn(&[&str]) -> Vec<(usize, String)>, text: &str) -> Vec<usize> {
        find(&text.lines().collect::<Vec<_>>()).into_iter().map(|(line, _)| line).collect()
    }

    #[test]
    fn a_doc_comment_that_begins_with_a_question_word_is_found() {
        let text = "/// Bytes that are left.\n/// What else.\nconst A: u8 = 1;\n/// What is \
                    left.\nconst B: u8 = 1;\n";
        assert_eq!(places(rust_doc_openings, text), [3]);
    }

    #[test]
    fn whether_is_for_values_and_not_for_functions() {
        let text = "/// Whether it is open.\nopen: bool,\n/// Whether it is \
                    open.\n#[must_use]\npub fn is_open() {}\n";
        assert_eq!(places(rust_doc_openings, text), [2]);
        let text = "class A:\n    @property\n    def a(self):\n        \"\"\"Whether it is \
            open.\"\"\"\n\n    def b(self):\n        \"\"\"Whether it is open.\"\"\"\n    c = \
            True\n    \"\"\"Whether it is open.\"\"\"\n";
        assert_eq!(places(python_doc_openings, text), [6]);
    }

    #[test]
    fn a_docstring_that_begins_with_a_question_word_is_found() {
        let text =
            "\"\"\"Whose it is.\"\"\"\n\n\ndef a():\n    \"\"\"Returns what is left.\"\"\"\n";
        assert_eq!(places(python_doc_openings, text), [0]);
    }
}
