// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

//! Circles of files: files of one crate that use each other in a loop can only be understood, and
//! changed, together. A file uses another one if it names an item that the other one defines. A
//! re-export alone is no use, and neither are tests.
//!
//! ```text
//! git ls-files ─> module tree of each crate ─> paths in its code ─> file that defines each ─> circles
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

use crate::source_files::tracked_files;

/// Limit of the re-exports on the way to a definition.
const MAX_REEXPORTS: usize = 16;

type ModuleId = usize;
type FileId = usize;

/// The names that a file takes from each other file.
type FileUses = BTreeMap<(FileId, FileId), BTreeSet<String>>;

#[derive(Default)]
struct SourceModule {
    file: FileId,
    parent: Option<ModuleId>,
    children: HashMap<String, ModuleId>,
    definitions: BTreeSet<String>,
    imports: Vec<ImportedName>,
    globs: Vec<Vec<String>>,
    /// Paths in the code outside of `use`.
    paths: BTreeSet<Vec<String>>,
}

struct ImportedName {
    name: String,
    target: Vec<String>,
    is_private: bool,
}

#[derive(Default)]
struct CrateTree {
    files: Vec<PathBuf>,
    modules: Vec<SourceModule>,
}

/// Prints every circle of files, and the names that tie it.
pub(crate) fn print_circles(root: &Path) -> Result<()> {
    let found = find_circles(root)?;
    println!("{} circles of files", found.len());
    found.iter().for_each(|circle| println!("{circle}"));
    Ok(())
}

/// Fails if files of a crate use each other in a loop.
pub(crate) fn check_circles(root: &Path) -> Result<()> {
    let found = find_circles(root)?;
    if found.is_empty() { Ok(()) } else { bail!("circles of files:\n{}", found.join("\n")) }
}

/// Returns the circles of all crates.
fn find_circles(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for path in tracked_files(root)? {
        let is_crate_root = path.ends_with("src/lib.rs")
            || (path.ends_with("src/main.rs") && !path.with_file_name("lib.rs").exists());
        if is_crate_root {
            found.extend(CrateTree::parse_crate(root, &path)?.describe_circles(root));
        }
    }
    Ok(found)
}

impl CrateTree {
    fn parse_crate(root: &Path, path: &Path) -> Result<Self> {
        let mut tree = Self::default();
        let path = root.join(path);
        let directory = path.parent().context("a source file has a directory")?.to_owned();
        tree.parse_file(&path, &directory, None)?;
        Ok(tree)
    }

    /// Parses a file whose child modules lie in `directory`.
    fn parse_file(
        &mut self,
        path: &Path,
        directory: &Path,
        parent: Option<ModuleId>,
    ) -> Result<ModuleId> {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("parse {}", path.display()))?;
        self.files.push(path.to_owned());
        self.add_module(self.files.len() - 1, parent, parsed.items, directory)
    }

    fn add_module(
        &mut self,
        file: FileId,
        parent: Option<ModuleId>,
        items: Vec<Item>,
        directory: &Path,
    ) -> Result<ModuleId> {
        let id = self.modules.len();
        self.modules.push(SourceModule { file, parent, ..SourceModule::default() });
        for item in items {
            if item_attributes(&item).iter().any(is_test_attribute) {
                continue;
            }
            match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let below = directory.join(&name);
                    let child = match module.content {
                        Some((_, items)) => self.add_module(file, Some(id), items, &below)?,
                        None => {
                            let flat = directory.join(format!("{name}.rs"));
                            let path = if flat.exists() { flat } else { below.join("mod.rs") };
                            self.parse_file(&path, &below, Some(id))?
                        }
                    };
                    self.modules[id].children.insert(name, child);
                }
                Item::Use(item) => {
                    let is_private = matches!(item.vis, Visibility::Inherited);
                    self.modules[id].add_imports(Vec::new(), &item.tree, is_private);
                }
                item => {
                    let module = &mut self.modules[id];
                    module.definitions.extend(defined_name(&item));
                    PathCollector(module).visit_item(&item);
                }
            }
        }
        Ok(id)
    }

    /// Returns the file that defines the item at a path, if this crate does.
    fn defining_file(&self, from: ModuleId, path: &[String], depth: usize) -> Option<FileId> {
        let (first, rest) = path.split_first()?;
        if depth > MAX_REEXPORTS {
            return None;
        }
        let module = &self.modules[from];
        match first.as_str() {
            "crate" => return self.defining_file(0, rest, depth),
            "self" => return self.defining_file(from, rest, depth),
            "super" => return self.defining_file(module.parent?, rest, depth),
            _ => {}
        }
        if module.definitions.contains(first) {
            return Some(module.file);
        }
        if let Some(child) = module.children.get(first) {
            return self.defining_file(*child, rest, depth);
        }
        if let Some(import) = module.imports.iter().find(|import| import.name == *first) {
            // `use name;` of another crate names itself.
            let target = [&import.target, rest].concat();
            return (import.target != [first.clone()])
                .then(|| self.defining_file(from, &target, depth + 1))?;
        }
        module.globs.iter().find_map(|glob| {
            let local = glob.first().is_some_and(|first| {
                ["crate", "self", "super"].contains(&first.as_str())
                    || module.children.contains_key(first)
            });
            local.then(|| self.defining_file(from, &[glob, path].concat(), depth + 1))?
        })
    }

    fn file_uses(&self) -> FileUses {
        let mut uses = FileUses::new();
        for (id, module) in self.modules.iter().enumerate() {
            let imported = module
                .imports
                .iter()
                .filter(|import| import.is_private)
                .map(|import| &import.target);
            for path in module.paths.iter().chain(imported) {
                if let Some(file) = self.defining_file(id, path, 0)
                    && file != module.file
                {
                    let name = path.last().cloned().unwrap_or_default();
                    uses.entry((module.file, file)).or_default().insert(name);
                }
            }
        }
        uses
    }

    fn describe_circles(&self, root: &Path) -> Vec<String> {
        let uses = self.file_uses();
        let graph: DiGraphMap<FileId, ()> = uses.keys().copied().collect();
        let name = |file: FileId| self.files[file].strip_prefix(root).unwrap_or(&self.files[file]);
        let circles = tarjan_scc(&graph).into_iter().filter(|circle| circle.len() > 1);
        circles
            .map(|circle| {
                let ties = uses
                    .iter()
                    .filter(|((from, to), _)| circle.contains(from) && circle.contains(to))
                    .map(|((from, to), names)| {
                        let names: Vec<&str> = names.iter().map(String::as_str).collect();
                        let (from, to) = (name(*from).display(), name(*to).display());
                        format!("    {from} -> {to}: {}", names.join(", "))
                    });
                let ties: Vec<String> = ties.collect();
                format!("  {} files:\n{}", circle.len(), ties.join("\n"))
            })
            .collect()
    }
}

impl SourceModule {
    fn add_imports(&mut self, mut prefix: Vec<String>, tree: &UseTree, is_private: bool) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.add_imports(prefix, &path.tree, is_private);
            }
            UseTree::Name(name) if name.ident == "self" => {
                let name = prefix.last().cloned().unwrap_or_default();
                self.imports.push(ImportedName { name, target: prefix, is_private });
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                prefix.push(name.clone());
                self.imports.push(ImportedName { name, target: prefix, is_private });
            }
            UseTree::Rename(renamed) => {
                if renamed.ident != "self" {
                    prefix.push(renamed.ident.to_string());
                }
                let name = renamed.rename.to_string();
                self.imports.push(ImportedName { name, target: prefix, is_private });
            }
            UseTree::Glob(_) => self.globs.push(prefix),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_imports(prefix.clone(), tree, is_private);
                }
            }
        }
    }
}

/// Adds the paths in an item to its module.
struct PathCollector<'a>(&'a mut SourceModule);

impl<'ast> Visit<'ast> for PathCollector<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|segment| segment.ident.to_string());
        self.0.paths.insert(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.0.add_imports(Vec::new(), &item.tree, true);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !item.attrs.iter().any(is_test_attribute) {
            visit::visit_impl_item_fn(self, item);
        }
    }
}

fn is_test_attribute(attribute: &Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && attribute.parse_args::<syn::Path>().is_ok_and(|argument| argument.is_ident("test"))
}

fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn defined_name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let tree = CrateTree::parse_crate(directory.path(), Path::new("lib.rs")).unwrap();
        tree.describe_circles(directory.path())
    }

    #[test]
    fn files_that_name_items_of_each_other_are_a_circle() {
        let found = circles_of(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::Second; pub struct First(Second);"),
            ("b.rs", "pub struct Second; fn first() -> Option<crate::a::First> { None }"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("a.rs -> b.rs: Second"), "{}", found[0]);
        assert!(found[0].contains("b.rs -> a.rs: First"), "{}", found[0]);
    }

    #[test]
    fn a_parent_and_a_child_are_a_circle_through_a_re_export_too() {
        let found = circles_of(&[
            ("lib.rs", "mod parent; pub use parent::Shared;"),
            ("parent/mod.rs", "mod child; pub struct Shared; fn run() { child::work() }"),
            ("parent/child.rs", "use crate::Shared; pub fn work() { drop(None::<Shared>) }"),
        ]);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn re_exports_tests_and_names_of_other_crates_are_no_uses() {
        let found = circles_of(&[
            ("lib.rs", "mod a; pub use a::{First, run}; pub struct Error; use std::fmt;"),
            (
                "a.rs",
                "use std::fmt; pub struct First(crate::Error); pub fn run() {}
                 #[cfg(test)] mod tests { fn all() { crate::b::check() } }",
            ),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }
}
