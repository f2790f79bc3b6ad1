// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Names state their meaning, and comments are read once (`docs/developer-guide/writing.md`).
//!
//! [`check_names`] counts, for each crate and each Python package, the types, functions and
//! constants whose names have one word, and the phrases in comments at which readers stop. It fails
//! above the limits, and if three types of the workspace have the same name. [`print_quiz`] draws
//! names for a reader who has never seen the code.
//!
//! These names do not count, because another party has chosen them:
//!
//! - methods of an `impl Trait for Type` block: the trait names them, and a trait of ours counts
//!   where it is declared;
//! - Python names in an `__all__` and in Horovod's surface (`tests/surface/facts.json`), which
//!   users call, and dunder methods;
//! - the [`FAMOUS_NOUNS`] of the project, which the glossary explains;
//! - `BF16Compressor`, because every framework has Horovod's compressors under the same names.
//!
//! Tests, generated code and `testkit` do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::source_files::{package_of_path, product_files};

const MAX_PERCENT_ONE_WORD_TYPES: usize = 25;
const MAX_PERCENT_ONE_WORD_FUNCTIONS: usize = 40;
const MAX_PERCENT_ONE_WORD_CONSTANTS: usize = 15;
const MAX_RIDDLES_PER_1000_LINES: usize = 3;
const MAX_TYPES_OF_ONE_NAME: usize = 2;
/// Fewer names have no meaningful share: two of five are 40 %.
const MIN_NAMES_FOR_SHARE: usize = 8;
/// Fewer comment lines have no meaningful rate: one phrase in 200 lines is a rate of 5.
const MIN_LINES_FOR_RATE: usize = 300;
const QUIZ_QUESTIONS: usize = 60;
const MIRRORED_TYPE: &str = "BF16Compressor";
const FAMOUS_NOUNS: [&str; 10] =
    ["Rank", "World", "Generation", "Engine", "Mesh", "Link", "Store", "Reader", "Batch", "Error"];

/// Phrases at which readers stop, because the noun is missing.
const RIDDLES: [&str; 27] = [
    "what it",
    "what they",
    "what is",
    "what was",
    "what its",
    "what the",
    "what a",
    "that of",
    "those of",
    "those that",
    "of which",
    "as far as",
    "told",
    "tells",
    "nobody",
    "whoever",
    "somebody",
    "hear of",
    "hears of",
    "heard of",
    "of its own",
    "anew",
    "does so",
    "has put",
    "at times",
    "for good",
    "such a one",
];

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum DefinitionKind {
    Type,
    Function,
    Constant,
}

impl DefinitionKind {
    const ALL: [Self; 3] = [Self::Type, Self::Function, Self::Constant];

    const fn max_percent(self) -> usize {
        match self {
            Self::Type => MAX_PERCENT_ONE_WORD_TYPES,
            Self::Function => MAX_PERCENT_ONE_WORD_FUNCTIONS,
            Self::Constant => MAX_PERCENT_ONE_WORD_CONSTANTS,
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
struct Definition {
    kind: DefinitionKind,
    name: String,
}

/// The definitions and comments of a crate or a Python package.
#[derive(Default)]
struct NamingStatistics {
    definitions: Vec<Definition>,
    comment_lines: usize,
    riddles: Vec<String>,
}

/// Fails if a crate or a Python package has too many names of one word or too many riddles, or if
/// three types have the same name.
pub(crate) fn check_names(root: &Path) -> Result<()> {
    let public_names = public_python_names(root)?;
    let mut packages: BTreeMap<String, NamingStatistics> = BTreeMap::new();
    let mut type_files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in product_files(root)? {
        let package = packages.entry(package_of_path(&path)).or_default();
        let definitions = definitions_in(&path, &text, &public_names);
        for definition in &definitions {
            if definition.kind == DefinitionKind::Type
                && !public_names.contains(&definition.name)
                && !FAMOUS_NOUNS.contains(&definition.name.as_str())
                && definition.name != MIRRORED_TYPE
            {
                type_files.entry(definition.name.clone()).or_default().push(path.clone());
            }
        }
        package.definitions.extend(definitions);
        for (line, comment) in comment_lines(&path, &text) {
            package.comment_lines += 1;
            for riddle in find_riddles(comment) {
                package.riddles.push(format!("{path}:{line}: `{riddle}`"));
            }
        }
    }
    let mut problems: Vec<String> =
        packages.iter().flat_map(|(name, package)| package_problems(name, package)).collect();
    for (name, paths) in type_files {
        if paths.len() > MAX_TYPES_OF_ONE_NAME {
            problems.push(format!("{} types are called {name}: {}", paths.len(), paths.join(", ")));
        }
    }
    if problems.is_empty() { Ok(()) } else { bail!("names:\n  {}", problems.join("\n  ")) }
}

/// Prints `QUIZ_QUESTIONS` paths and names of types and functions, drawn by a seed. A method has
/// its type before it, because no reader meets it without.
pub(crate) fn print_quiz(root: &Path, seed: u64) -> Result<()> {
    let mut questions = Vec::new();
    for (path, text) in product_files(root)? {
        let (definitions, separator) = if path.ends_with(".rs") {
            (rust_definitions(&text), "::")
        } else {
            (python_definitions(&text), ".")
        };
        for (kind, name, owner) in definitions {
            if kind != DefinitionKind::Constant && name.len() > 3 {
                let owner = owner.map_or_else(String::new, |owner| format!("{owner}{separator}"));
                questions.push(format!("{path}  {owner}{name}"));
            }
        }
    }
    let mut state = seed;
    for number in 1..=QUIZ_QUESTIONS.min(questions.len()) {
        let drawn = next_random(&mut state) % questions.len() as u64;
        println!("{number:2}  {}", questions.swap_remove(usize::try_from(drawn)?));
    }
    Ok(())
}

/// Returns the next number of SplitMix64 (Steele, Lea and Flood, 2014).
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) >> 1
}

fn package_problems(name: &str, package: &NamingStatistics) -> Vec<String> {
    let mut problems = Vec::new();
    for kind in DefinitionKind::ALL {
        let names: Vec<&str> = package
            .definitions
            .iter()
            .filter(|definition| definition.kind == kind)
            .map(|definition| definition.name.as_str())
            .filter(|name| !FAMOUS_NOUNS.contains(name))
            .collect();
        let one_word: BTreeSet<&str> =
            names.iter().copied().filter(|name| word_count(name) == 1).collect();
        let count = names.iter().filter(|name| word_count(name) == 1).count();
        if names.len() >= MIN_NAMES_FOR_SHARE && count * 100 > names.len() * kind.max_percent() {
            let (total, limit) = (names.len(), kind.max_percent());
            let examples = one_word.into_iter().take(12).collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "{name}: {count} of {total} names of a {kind:?} have one word, the limit is \
                 {limit} %: {examples}"
            ));
        }
    }
    let (riddles, lines) = (package.riddles.len(), package.comment_lines);
    if riddles * 1000 > lines.max(MIN_LINES_FOR_RATE) * MAX_RIDDLES_PER_1000_LINES {
        problems.push(format!(
            "{name}: {riddles} phrases without a noun in {lines} comment lines, the limit is \
             {MAX_RIDDLES_PER_1000_LINES} of 1000:\n    {}",
            package.riddles.join("\n    ")
        ));
    }
    problems
}

/// Returns the Python names that users call: those in an `__all__`, and Horovod's.
fn public_python_names(root: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for (path, text) in product_files(root)? {
        if path.ends_with(".py") {
            for list in text.split("\n__all__ = [").skip(1) {
                let list = list.split(']').next().unwrap_or_default();
                names.extend(list.split('"').skip(1).step_by(2).map(str::to_owned));
            }
        }
    }
    let facts = fs::read_to_string(root.join("tests/surface/facts.json"))?;
    names.extend(facts.split('"').skip(1).step_by(2).map(str::to_owned));
    Ok(names)
}

fn definitions_in(path: &str, text: &str, public_names: &BTreeSet<String>) -> Vec<Definition> {
    let found =
        if path.ends_with(".rs") { rust_definitions(text) } else { python_definitions(text) };
    let is_chosen_by_others = |name: &str| {
        path.ends_with(".py") && (name.starts_with("__") || public_names.contains(name))
    };
    found
        .into_iter()
        .filter(|(_, name, _)| !is_chosen_by_others(name))
        .map(|(kind, name, _)| Definition { kind, name: name.to_owned() })
        .collect()
}

/// Returns kind and name of each definition, and for a method the name of its type.
fn rust_definitions(text: &str) -> Vec<(DefinitionKind, &str, Option<&str>)> {
    let mut found = Vec::new();
    let mut trait_block_indent = None;
    let mut owner: Option<(usize, &str)> = None;
    for line in text.lines() {
        let (indent, code) = (line.len() - line.trim_start().len(), line.trim_start());
        if trait_block_indent == Some(indent) && code.starts_with('}') {
            trait_block_indent = None;
        }
        if code.starts_with('}') && owner.is_some_and(|(start, _)| start == indent) {
            owner = None;
        }
        if code.trim_start_matches("unsafe ").starts_with("impl")
            && code.contains(" for ")
            && !code.ends_with('}')
        {
            trait_block_indent = Some(indent);
        }
        let item = without_visibility(code);
        if let Some(name) = block_owner(item)
            && !code.ends_with('}')
        {
            owner = Some((indent, name));
        }
        let method_owner = owner.filter(|(start, _)| *start < indent).map(|(_, name)| name);
        let function = ["const ", "async ", "unsafe ", "extern \"C\" "]
            .iter()
            .fold(item, |item, word| item.trim_start_matches(word));
        if let Some(name) = first_identifier(function, &["fn "]) {
            if trait_block_indent.is_none() {
                found.push((DefinitionKind::Function, name, method_owner));
            }
        } else if let Some(name) =
            first_identifier(item, &["struct ", "enum ", "trait ", "unsafe trait ", "union "])
        {
            found.push((DefinitionKind::Type, name, None));
        } else if let Some(name) = first_identifier(item, &["const ", "static "])
            && trait_block_indent.is_none()
            && name.starts_with(|letter: char| letter.is_ascii_uppercase())
        {
            found.push((DefinitionKind::Constant, name, None));
        }
    }
    found
}

/// Like [`rust_definitions`].
fn python_definitions(text: &str) -> Vec<(DefinitionKind, &str, Option<&str>)> {
    let mut found = Vec::new();
    let mut owners: Vec<(usize, &str)> = Vec::new();
    let mut is_in_string = false;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let code = line.trim_start();
        let was_in_string = is_in_string;
        is_in_string ^= line.matches("\"\"\"").count() % 2 == 1;
        if was_in_string {
            continue;
        }
        let indent = line.len() - code.len();
        if !code.starts_with(')') {
            owners.retain(|(start, _)| *start < indent);
        }
        if let Some(name) = first_identifier(code, &["class "]) {
            found.push((DefinitionKind::Type, name, None));
            owners.push((indent, name));
        } else if let Some(name) = first_identifier(code, &["def ", "async def "]) {
            found.push((DefinitionKind::Function, name, owners.last().map(|(_, name)| *name)));
        } else if let Some(name) = first_identifier(line, &[""])
            && name.len() > 1
            && name.trim_start_matches('_').starts_with(|letter: char| letter.is_ascii_uppercase())
            && !name.contains(|letter: char| letter.is_ascii_lowercase())
            && line[name.len()..].trim_start().starts_with(['=', ':'])
        {
            found.push((DefinitionKind::Constant, name, None));
        }
    }
    found
}

/// Returns the type of an `impl` block or the trait whose block begins here.
fn block_owner(item: &str) -> Option<&str> {
    let Some(rest) = item.strip_prefix("impl<") else {
        return first_identifier(item, &["impl ", "trait ", "unsafe trait "]);
    };
    let mut depth = 1;
    let end = rest.find(|letter: char| {
        depth += i32::from(letter == '<') - i32::from(letter == '>');
        depth == 0
    })?;
    first_identifier(rest[end + 1..].trim_start(), &[""])
}

/// Returns the code after `pub` and its scope.
fn without_visibility(code: &str) -> &str {
    match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(code, |(_, item)| item),
        Some(rest) => rest.trim_start(),
        None => code,
    }
}

/// Returns the identifier after one of the words, if the code begins with that word.
fn first_identifier<'a>(code: &'a str, words: &[&str]) -> Option<&'a str> {
    let rest = words.iter().find_map(|word| code.strip_prefix(word))?;
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    let name = &rest[..end.unwrap_or(rest.len())];
    (!name.is_empty() && !name.starts_with(|letter: char| letter.is_numeric())).then_some(name)
}

/// Returns the number of words of a name in any of the three usual forms.
fn word_count(name: &str) -> usize {
    let mut count = 0;
    let letters: Vec<char> = name.chars().collect();
    for (index, letter) in letters.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| letters[before]);
        let starts_word = letter.is_alphanumeric()
            && match before {
                None | Some('_') => true,
                Some(before) => {
                    let next_is_lower =
                        letters.get(index + 1).is_some_and(|next| next.is_ascii_lowercase());
                    letter.is_ascii_uppercase() && (!before.is_ascii_uppercase() || next_is_lower)
                }
            };
        count += usize::from(starts_word);
    }
    count
}

/// Returns number and text of the comments and the lines of docstrings. The name of an
/// argument before its description is code and left out.
fn comment_lines<'a>(path: &str, text: &'a str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    // Whether the current string of several lines is a docstring.
    let mut open_string = None;
    for (index, line) in text.lines().enumerate() {
        let code = line.trim_start();
        let comment = if path.ends_with(".rs") {
            if code.starts_with("//") { Some(code) } else { trailing_comment(code) }
        } else {
            let is_docstring = open_string.unwrap_or_else(|| code.starts_with("\"\"\""));
            if line.matches("\"\"\"").count() % 2 == 1 {
                open_string = if open_string.is_some() { None } else { Some(is_docstring) };
            }
            let is_comment = open_string.is_none() && code.starts_with('#');
            (is_docstring || is_comment).then(|| without_argument(code))
        };
        found.extend(comment.map(|comment| (index + 1, comment)));
    }
    found
}

/// Returns the comment after the Rust code of a line. Two slashes after an odd number of quotes are
/// in a string.
fn trailing_comment(code: &str) -> Option<&str> {
    let (before, comment) = code.split_once(" // ")?;
    before.matches('"').count().is_multiple_of(2).then_some(comment)
}

fn without_argument(comment: &str) -> &str {
    match comment.split_once(": ") {
        Some((name, description)) if !name.contains(' ') => description,
        _ => comment,
    }
}

fn find_riddles(comment: &str) -> Vec<&'static str> {
    let words: Vec<String> = comment
        .split(|letter: char| !letter.is_alphanumeric() && letter != '_' && letter != '`')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let has_phrase = |phrase: &str| {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        words.windows(phrase.len()).any(|window| window == phrase.as_slice())
    };
    RIDDLES.into_iter().filter(|phrase| has_phrase(phrase)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_in_all_three_forms() {
        for (name, words) in [
            ("Told", 1),
            ("_told", 1),
            ("MOST", 1),
            ("OutputTail", 2),
            ("evict_expired_leases", 3),
            ("MAX_ADDRESSES", 2),
            ("HTTPServer", 2),
            ("Float8", 1),
        ] {
            assert_eq!(word_count(name), words, "{name}");
        }
    }

    #[test]
    fn methods_that_a_trait_names_do_not_count() {
        let text = "impl Drop for A {\n    fn drop(&mut self) {\n    }\n}\nimpl A {\n    pub(crate) \
                    const fn take(&self) {\n    }\n}\npub static MOST: u8 = 1;\nstruct A;\n";
        let expected = [
            (DefinitionKind::Function, "take", Some("A")),
            (DefinitionKind::Constant, "MOST", None),
            (DefinitionKind::Type, "A", None),
        ];
        assert_eq!(rust_definitions(text), expected);
    }

    #[test]
    fn python_definitions_are_found_at_every_depth() {
        let text = "\"\"\"An example:\n\nclass Example:\n\"\"\"\n_MOST = 3\nclass Told:\n    def \
                    take(self):\n        pass\n";
        let expected = [
            (DefinitionKind::Constant, "_MOST", None),
            (DefinitionKind::Type, "Told", None),
            (DefinitionKind::Function, "take", Some("Told")),
        ];
        assert_eq!(python_definitions(text), expected);
    }

    #[test]
    fn a_package_above_a_limit_is_named() {
        let definitions = (0..8)
            .map(|_| Definition { kind: DefinitionKind::Type, name: "Told".to_owned() })
            .collect();
        let riddles = vec!["a.rs:1: `told`".to_owned(); 2];
        let package = NamingStatistics { definitions, comment_lines: 500, riddles };
        let problems = package_problems("crates/a", &package);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("8 of 8") && problems[1].contains("a.rs:1"));
    }

    #[test]
    fn riddles_are_whole_words_of_comments() {
        assert_eq!(find_riddles("/// Returns what is left, and tells `it`."), ["what is", "tells"]);
        assert!(find_riddles("/// Retells whatever.").is_empty());
        let text =
            "x = 1  # told\ndef a():\n    \"\"\"Says.\n\n    told: B.\n    \"\"\"\n    b = 2\n";
        let comments: Vec<&str> =
            comment_lines("a.py", text).into_iter().map(|(_, comment)| comment).collect();
        assert_eq!(comments, ["\"\"\"Says.", "", "B.", "\"\"\""]);
        let text = "let a = 1; // told\nlet b = \"a // told\";\n";
        assert_eq!(comment_lines("a.rs", text), [(1, "told")]);
        let text = "PAGE = \"\"\"\ntold\n\"\"\"\ndef a(told):\n    return told\n";
        assert!(comment_lines("a.py", text).is_empty());
    }
}
