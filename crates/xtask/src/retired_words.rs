// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Words that names once had and must not get again, because only their authors understood them.
//!
//! [`check_retired_words`] reads every identifier of the product code in Rust: items, fields,
//! variants, parameters, locals and aliases. It fails if one of the words between underscores or
//! capitals is retired. Names of the wire and of files are strings in `#[serde(rename = "...")]`,
//! so they do not count. Tests and generated code do not count.

use std::path::Path;

use anyhow::{Result, bail};

use crate::source_files::product_files;

const RETIRED_WORDS: [&str; 31] = [
    "told",
    "tell",
    "tells",
    "wish",
    "wishes",
    "papers",
    "desk",
    "card",
    "cards",
    "crew",
    "zeal",
    "limbo",
    "recipe",
    "recipes",
    "beats",
    "asker",
    "asks",
    "door",
    "doors",
    "heard",
    "hears",
    "spot",
    "spots",
    "patience",
    "came",
    "happens",
    "news",
    "meetings",
    "course",
    "elsewhere",
    "why",
];

/// A name that stays although one of its words is retired.
struct NameException {
    /// Start of the paths in which the name is allowed.
    path: &'static str,
    name: &'static str,
}

const NAME_EXCEPTIONS: [NameException; 7] = [
    // The capsule `farandole.door` has a public name, and its crate is called like it.
    NameException { path: "crates/", name: "farandole_door" },
    NameException { path: "python/src/", name: "door" },
    NameException { path: "python/src/", name: "engine_table_capsule" },
    // A message of the registrar's protocol, in generated code.
    NameException { path: "crates/registrar/src/server/formation.rs", name: "Elsewhere" },
    NameException { path: "crates/registrar/src/client/formation.rs", name: "Elsewhere" },
    // A key in the output of `farandole explain --json`.
    NameException { path: "crates/ui/src/explain/", name: "why" },
    NameException { path: "crates/cli/src/explain.rs", name: "why" },
];

/// Fails if an identifier of the Rust code contains a retired word.
pub(crate) fn check_retired_words(root: &Path) -> Result<()> {
    let mut problems = Vec::new();
    for (path, text) in product_files(root)? {
        if !path.ends_with(".rs") {
            continue;
        }
        for (line, name) in code_identifiers(&text) {
            let is_allowed = NAME_EXCEPTIONS
                .iter()
                .any(|exception| exception.name == name && path.starts_with(exception.path));
            if let Some(word) = find_retired_word(name).filter(|_| !is_allowed) {
                problems.push(format!("{path}:{line}: `{name}` has the retired word `{word}`"));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { bail!("retired words:\n  {}", problems.join("\n  ")) }
}

fn find_retired_word(name: &str) -> Option<&'static str> {
    let words = name_words(name);
    RETIRED_WORDS.into_iter().find(|retired| words.iter().any(|word| word == retired))
}

/// Returns the words of a name in lower case. A capital begins a word unless it follows another
/// capital.
fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut follows_capital = true;
    for letter in name.chars() {
        let is_capital = letter.is_ascii_uppercase();
        if letter == '_' || (is_capital && !follows_capital) {
            words.push(String::new());
        }
        follows_capital = is_capital;
        if let Some(word) = words.last_mut().filter(|_| letter.is_ascii_alphabetic()) {
            word.push(letter.to_ascii_lowercase());
        }
    }
    words
}

/// Returns the identifiers of Rust code with their lines. Comments and strings are left out.
fn code_identifiers(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut line, mut rest) = (1, text);
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = raw_string_length(rest) {
            length
        } else if first == '"' {
            quoted_length(rest, '"')
        } else if first == '\'' {
            // A lifetime has no closing quote after its first letter.
            if rest.starts_with("'\\") || rest.chars().nth(2) == Some('\'') {
                quoted_length(rest, '\'')
            } else {
                1
            }
        } else if first.is_alphanumeric() || first == '_' {
            let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            let name = &rest[..end.unwrap_or(rest.len())];
            if !first.is_numeric() {
                found.push((line, name));
            }
            name.len()
        } else {
            first.len_utf8()
        };
        let (passed, remaining) = rest.split_at(length);
        line += passed.matches('\n').count();
        rest = remaining;
    }
    found
}

/// Returns the length of a string or a character, from its opening quote to its closing one.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        if letter == quote && !is_escaped {
            return at + letter.len_utf8();
        }
        is_escaped = letter == '\\' && !is_escaped;
    }
    text.len()
}

/// Returns the length of the raw string with which the text begins, if it begins with one.
fn raw_string_length(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let inside = hashes.trim_start_matches('#');
    let (count, body) = (hashes.len() - inside.len(), inside.strip_prefix('"')?);
    let closing = format!("\"{}", "#".repeat(count));
    let end = body.find(&closing).map_or(body.len(), |end| end + closing.len());
    Some(text.len() - body.len() + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_counts_in_every_form_of_name() {
        for (name, word) in [
            ("told", Some("told")),
            ("told_broken", Some("told")),
            ("ExchangingCards", Some("cards")),
            ("MAX_PATIENCE", Some("patience")),
            ("HTTPNews", None),
            ("discard", None),
            ("came_last", Some("came")),
        ] {
            assert_eq!(find_retired_word(name), word, "{name}");
        }
    }

    #[test]
    fn identifiers_are_read_without_comments_strings_and_characters() {
        let text = "let a = \"told \\\" b\"; // told\n/* told\n */ c('\\'', 'x', r#\"told\"#, br\"d\");\nfn e<'f>() {}";
        let names: Vec<(usize, &str)> = code_identifiers(text);
        let expected = [(1, "let"), (1, "a"), (3, "c"), (4, "fn"), (4, "e"), (4, "f")];
        assert_eq!(names, expected);
    }
}
