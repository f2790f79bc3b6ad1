// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Rows of the glossary name the code that contains a concept. Renames and moves must not leave a
//! row behind.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const GLOSSARY_PAGE: &str = "docs/reference/glossary.md";
/// First word of the paragraph with the locations.
const LOCATIONS_START: &str = "  In `";
/// Keywords in front of the name in its definition.
const DEFINING_KEYWORDS: [&str; 10] =
    ["struct", "enum", "trait", "type", "fn", "const", "static", "mod", "class", "def"];

/// Fails if a row names a module that does not exist, or a name that the module does not define.
pub(crate) fn check_glossary(root: &Path) -> Result<()> {
    let page = fs::read_to_string(root.join(GLOSSARY_PAGE)).context(GLOSSARY_PAGE)?;
    let mut wrong = Vec::new();
    for paragraph in page.split("\n\n").filter(|text| text.starts_with(LOCATIONS_START)) {
        for (module, names) in parse_locations(paragraph) {
            let Some(text) = read_module(root, &module) else {
                wrong.push(format!("no module `{module}`"));
                continue;
            };
            let missing = names.iter().filter(|name| !defines(&text, name));
            wrong.extend(missing.map(|name| format!("`{module}` does not define `{name}`")));
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!("{GLOSSARY_PAGE}:\n  {}", wrong.join("\n  ")) }
}

/// Returns each module of a paragraph with the names that should be in it.
fn parse_locations(paragraph: &str) -> Vec<(String, Vec<String>)> {
    let text = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let quoted = |part: &str| part.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    text.split("; ")
        .filter_map(|part| {
            let mut words: Vec<String> = quoted(part);
            (!words.is_empty()).then(|| (words.remove(0), words))
        })
        .collect()
}

/// Returns the text of a module of a crate (`transport::link`) or of the package
/// (`farandole.runner.gang`).
fn read_module(root: &Path, module: &str) -> Option<String> {
    let (folder, is_python) = match module.split_once("::") {
        _ if module.starts_with("farandole.") => {
            (root.join("python").join(module.replace('.', "/")), true)
        }
        Some((package, rest)) => {
            (root.join("crates").join(package).join("src").join(rest.replace("::", "/")), false)
        }
        None => (root.join("crates").join(module).join("src"), false),
    };
    let inside: &[&str] =
        if is_python { &["__init__.py"] } else { &["mod.rs", "lib.rs", "main.rs"] };
    let file = folder.with_extension(if is_python { "py" } else { "rs" });
    let files: Vec<PathBuf> =
        std::iter::once(file).chain(inside.iter().map(|name| folder.join(name))).collect();
    files.iter().find_map(|path| fs::read_to_string(path).ok())
}

/// Returns whether a module defines a name.
fn defines(text: &str, name: &str) -> bool {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (text.get(..at).unwrap_or(""), text.get(at + name.len()..));
        let ends = after.is_some_and(|after| !after.starts_with(is_word));
        let keyword = before.split_whitespace().next_back().unwrap_or("");
        let is_assigned = before.ends_with('\n')
            && after.is_some_and(|after| after.starts_with(" = ") || after.starts_with(": "));
        let is_defined = before.ends_with(' ') && DEFINING_KEYWORDS.contains(&keyword);
        ends && (is_defined || is_assigned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_modules_with_names() {
        let text =
            "  In `launcher::job`; `world::ids`: `Rank`,\n  `Generation`; `farandole.x`: `y`.";
        let parts = parse_locations(text);
        let modules: Vec<&str> = parts.iter().map(|(module, _)| module.as_str()).collect();
        assert_eq!(modules, ["launcher::job", "world::ids", "farandole.x"]);
        assert_eq!(parts[1].1, ["Rank", "Generation"]);
    }

    #[test]
    fn a_use_is_no_definition() {
        assert!(!defines("use super::Rank;\nfn rank(rank: Rank) {}\n", "Rank"));
        assert!(defines("pub struct Rank(u32);\n", "Rank"));
        assert!(!defines("pub struct RankList;\n", "Rank"));
        assert!(defines("LIMIT: Final = 3\n", "LIMIT"));
    }
}
