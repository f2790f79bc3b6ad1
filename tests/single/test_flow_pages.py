# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The pages of flows name functions that exist, in an order in which they call each other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/farandole"
PAGES = ROOT / "docs/developer-guide"

MAX_HOPS = {
    "flow-of-a-fit": 20,
    "flow-of-an-allreduce": 25,
    "flow-of-a-run": 18,
    "flow-of-a-batch": 23,
}
"""Most hops of each page. A number only gets smaller; the goals are on the pages."""

CALLED_BY_LIBRARIES = {
    ("flow-of-a-fit", "FarandoleEstimator._fit"),  # pyspark's `fit`
    ("flow-of-a-fit", "main"),  # a new process
}
"""Functions whose caller is not in Farandole."""

NAMES_AT_CALLERS = {"convert_batch": "_convert"}
"""Functions that callers know by another name, because an attribute holds them."""


class FlowFunction(NamedTuple):
    """A function that a page names."""

    hop: int
    name: str
    file: str


@cache
def function_source(name: str, file: str) -> str:
    """Returns the source of a function; empty if the file does not define it."""
    path = next((base / file for base in (ROOT, PACKAGE) if (base / file).is_file()), None)
    assert path is not None, f"{file} does not exist"
    find = find_python_function if path.suffix == ".py" else find_rust_function
    return find(path.read_text(), re.split(r"::|\.", name))


def find_python_function(source: str, names: list[str]) -> str:
    """Returns the source of a function, which may be a method or inside of a function."""
    *classes, name = names
    tree = ast.parse(source)
    scopes: list[ast.AST] = [tree]
    if classes:
        scopes = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and [node.name] == classes
        ]
    for scope in scopes:
        nodes = ast.iter_child_nodes(scope) if classes else ast.walk(scope)
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return ast.get_source_segment(source, node) or ""
    return ""


def find_rust_function(source: str, names: list[str]) -> str:
    """Returns the source of a function; of a method, if a type is named."""
    *types, name = names
    scopes = [source]
    if types:
        head = rf"^impl\b[^{{;]*\b{types[0]}\b(?!::)[^{{;]*\{{"
        scopes = [
            enclosed_block(source, match.start())
            for match in re.finditer(head, source, re.MULTILINE)
        ]
    for scope in scopes:
        if match := re.search(rf"\bfn {name}\b", scope):
            return enclosed_block(scope, match.start())
    return ""


def enclosed_block(source: str, start: int) -> str:
    """Returns the source from `start` to the end of the first block after it."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(source, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return source[start : match.end()]
    return ""


def read_flow(page: str) -> tuple[list[FlowFunction], list[FlowFunction], str]:
    """Returns the hops of a page, its functions on the way, and its text."""
    text = (PAGES / f"{page}.md").read_text()
    hops, ways = [], []
    for line in re.findall(r"^\| \d+ \| .+ \|$", text, re.MULTILINE):
        number, *place, function, file = line.strip("| ").split(" | ")
        match = re.match(r"`([\w.:]+)` \w", function)
        assert match, f"a row must begin with a function: {line}"
        (hops if place else ways).append(FlowFunction(int(number), match[1], file.strip("`")))
    return hops, ways, text


@pytest.mark.parametrize("page", MAX_HOPS)
def test_functions_of_a_flow_are_in_their_files(page):
    hops, ways, _ = read_flow(page)
    assert [one.hop for one in hops] == list(range(1, len(hops) + 1))
    assert [one.hop for one in ways] == sorted(one.hop for one in ways)
    functions = [(one.name, one.file) for one in [*hops, *ways]]
    assert [one for one in functions if not function_source(*one)] == []


@pytest.mark.parametrize("page", MAX_HOPS)
def test_each_function_of_a_flow_is_called_by_one_that_is_not_later(page):
    hops, ways, _ = read_flow(page)
    functions = sorted([*ways, *hops], key=lambda one: one.hop)
    uncalled = []
    for function in functions[1:]:
        short = re.split(r"::|\.", function.name)[-1]
        if short.startswith("__") or (page, function.name) in CALLED_BY_LIBRARIES:
            continue
        called = rf"\b{NAMES_AT_CALLERS.get(short, short)}\b"
        callers = [one for one in functions if one.hop <= function.hop and one != function]
        # The first line has the caller's own name, which may be the same.
        bodies = (function_source(one.name, one.file).partition("\n")[2] for one in callers)
        if not any(re.search(called, body) for body in bodies):
            uncalled.append(function.name)
    assert uncalled == []


@pytest.mark.parametrize(("page", "most"), MAX_HOPS.items())
def test_a_flow_has_the_number_of_hops_that_its_page_states(page, most):
    hops, ways, text = read_flow(page)
    assert 10 < len(hops) <= most
    assert f"{len(hops)} hops, and {len(ways)} functions on the way." in text


@pytest.mark.parametrize("page", MAX_HOPS)
def test_methods_in_the_text_of_a_flow_exist(page):
    named = re.findall(r"`(\w+)(?:::|\.)(\w+)`", read_flow(page)[2])
    methods = {pair for pair in named if pair[0].lstrip("_")[:1].isupper()}
    assert methods
    types, functions = defined_names()
    assert [
        pair for pair in sorted(methods) if not (pair[0] in types and pair[1] in functions)
    ] == []


@cache
def defined_names() -> tuple[set[str], set[str]]:
    """Returns the types and the functions of all sources."""
    rust = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/src/*.rs")]
    sources = "\n".join(path.read_text() for path in [*rust, *PACKAGE.rglob("*.py")])
    return (
        set(re.findall(r"\b(?:class|enum|struct|trait) (\w+)", sources)),
        set(re.findall(r"\b(?:def|fn) (\w+)", sources)),
    )


def test_every_page_of_a_flow_is_checked():
    assert {path.stem for path in PAGES.glob("flow-of-*.md")} == MAX_HOPS.keys()


def test_the_modules_of_other_frameworks_in_the_flow_of_a_fit_exist():
    modules = re.findall(r"`(spark\.[\w.]+)`", (PAGES / "flow-of-a-fit.md").read_text())
    assert modules
    assert [one for one in modules if not (PACKAGE / f"{one.replace('.', '/')}.py").is_file()] == []


def test_a_function_is_found_only_in_its_own_type():
    rust = "impl One {\n fn run() { x() }\n}\nimpl Two for Other {\n fn walk() { y() }\n}\n"
    assert find_rust_function(rust, ["One", "run"]) == "fn run() { x() }"
    assert find_rust_function(rust, ["Other", "walk"]) == "fn walk() { y() }"
    assert find_rust_function(rust, ["One", "walk"]) == ""
    python = "class One:\n    def run(self): ...\n\ndef walk():\n    def run(): x()\n"
    assert find_python_function(python, ["One", "run"]) == "def run(self): ..."
    assert find_python_function(python, ["run"]) == "def run(self): ..."
    assert find_python_function(python, ["Two", "run"]) == ""
