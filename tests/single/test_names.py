# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Names and comments of the package have their noun: `docs/developer-guide/writing.md`.

`cargo xtask check` measures types, functions, constants and whole-line comments. These tests find
parameters, attributes, locals and trailing comments.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "python" / "farandole"

RETIRED_WORDS = frozenset(
    {
        "told", "said", "heard", "came", "kept", "left", "wish", "words",
        "news", "ending", "what", "how", "why", "way", "ways", "here",
        "there", "place", "spot", "reach", "apart", "ahead", "under_way", "course",
        "crew", "card", "door", "meeting", "desk", "mark", "marks", "most",
        "least", "patience", "one",
    }
)  # fmt: skip
"""Words that said nothing of the thing that they named. `one` may stand in a comprehension of one
line, where the noun is beside it.
"""
KEPT_NAMES = {
    "data/prepare.py": {"place": "a field of the public class PreparedData"},
    "data/statistics.py": {
        "least": "a field of the stored statistics",
        "most": "a field of the stored statistics",
    },
    "spark/common/data/batch_source.py": {"least": "named by a caller that is not converted yet"},
    "spark/lightning/elastic.py": {"place": "read by a module that is not converted yet"},
    "common/handles.py": {"door": "a module of the native extension"},
    "tensorflow/_native_ops.py": {"door": "a module of the native extension"},
    "torch/_reducer.py": {"door": "a module of the native extension"},
}
"""Names that stay, with the reason, by file."""
NOT_CONVERTED = re.compile(
    r"spark/common/((estimator|backend|params|remote\w*)\.py|(model|saving|runs)/)"
    r"|spark/(torch|keras|lightning)/((estimator|job|remote|predict|model)\.py|(training|saving)/)"
)
"""Files whose names are not converted yet."""

UNCLEAR_PHRASES = re.compile(
    r"\b(told|tells|nobody|somebody|everybody|whoever|anew|hears? of|heard of|such a one|for good"
    r"|asked for|as asked|said so|whatever|public door|of one house|of ours|in words|that of"
    r"|those of|what (it|they|is|was|its|the|a))\b",
    re.IGNORECASE,
)
NOUNLESS_ARGUMENT = re.compile(
    r"^\s+\*{0,2}\w+( \([^)]*\))?: (of|that|where|how|which|what|such)\b", re.IGNORECASE
)
"""An argument whose description does not begin with its noun: `name: Of the column.`"""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of every definition, parameter, local and attribute."""
    short = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        and node.lineno == node.end_lineno
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if name != "one" or id(node) not in short:
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name.removeprefix("_")
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name.removeprefix("_")
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=other):
                yield node.lineno, other or name


def package_files() -> list[tuple[str, str]]:
    """Returns the path and the text of the files of the package that are converted."""
    paths = [(path.relative_to(PACKAGE).as_posix(), path) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(name, path.read_text()) for name, path in paths if not NOT_CONVERTED.search(name)]


def retired_names(name: str, text: str) -> list[str]:
    """Describes the retired names of a file that are no exceptions."""
    return [
        f"{name}:{line}: {word}"
        for line, word in bound_names(ast.parse(text))
        if word in RETIRED_WORDS and word not in KEPT_NAMES.get(name, {})
    ]


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of comments, also of trailing ones, and of docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            lines = value.split("\n") if isinstance(value, str) else []
            yield from enumerate(lines, node.lineno)


def unclear_prose(name: str, text: str) -> list[str]:
    """Describes the comments of a file that a reader reads twice."""
    return [
        f"{name}:{line}: {words.strip()}"
        for line, words in prose_lines(text)
        if UNCLEAR_PHRASES.search(words) or NOUNLESS_ARGUMENT.search(words)
    ]


def test_parameters_attributes_and_locals_name_the_thing():
    files = package_files()
    assert len(files) > 250
    assert [found for name, text in files for found in retired_names(name, text)] == []


def test_exceptions_are_needed():
    texts = dict(package_files())
    for name, words in KEPT_NAMES.items():
        used = {word for _, word in bound_names(ast.parse(texts[name]))}
        assert words.keys() <= used, name


def test_comments_and_docstrings_have_their_nouns():
    found = [line for name, text in package_files() for line in unclear_prose(name, text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "def run(told): ...",
        "def run(*, told=1): ...",
        "told = 1",
        "for told in []: ...",
        "with open('x') as told: ...",
        "self.told = 1",
        "self._told = 1",
        "class A:\n    told: int = 1",
        "def told(): ...",
        "call = lambda told: 1",
        "x = [told for told in y]",
        "x = [\n    one for one in y]",
        "try: ...\nexcept OSError as told: ...",
        "from a import b as told",
        "if (told := 1): ...",
    ],
)
def test_a_retired_name_is_found(text):
    assert len(retired_names("new.py", text)) == 1


@pytest.mark.parametrize(
    "text", ["x = [one for one in y]", "x = told.y", "f(told=1)", "x = {'told': 1}"]
)
def test_other_uses_of_a_word_are_not_definitions(text):
    assert retired_names("new.py", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 1  # whatever it is",
        "# nobody waits",
        "'''Of the file.\n\n    name: Of the column.\n'''",
        "def f():\n    '''Sends a line.\n\n    Args:\n        store: where to.\n    '''",
    ],
)
def test_an_unclear_comment_is_found(text):
    assert len(unclear_prose("new.py", text)) == 1
