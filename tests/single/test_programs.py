# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs that tests start are files, which the linter checks; few texts of tests are programs."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
MAX_PROGRAM_LINES: Final = 11
"""Lines of a program that may stand in a string."""
TEXTS: Final = {
    "single/test_timing_marks.py": "the test of a rule parses them and runs none",
    "launcher/elastic.py": "tests replace a line of it",
    "parallel/test_notebook.py": "cells of a notebook",
    "single/test_data_pages.py": "lines around the blocks of a page",
    "single/test_run_fingerprint.py": "the digest depends on the text",
    "spark/test_keras_registered.py": "the same lines are a script, and a module beside one",
}
"""Reasons why a file has longer ones."""


def is_program(text: str) -> bool:
    """Returns whether a text is Python with an import or a function."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def long_texts(source: str) -> list[str]:
    """Returns the strings of more than `MAX_PROGRAM_LINES` lines, with a name for each value that
    is formatted into them.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "value"
                for part in node.values
            ]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text for text in found if len(text.strip().splitlines()) > MAX_PROGRAM_LINES]


def test_long_programs_of_tests_are_files() -> None:
    found = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if any(map(is_program, long_texts(path.read_text())))
    }
    assert found == TEXTS.keys(), "move it to `programs` beside the test, see tests/programs.py"


def test_each_program_is_used_and_hides_no_module() -> None:
    for folder in TESTS.glob("*/programs"):
        names = {path.stem for path in folder.glob("*.py")}
        texts = [path.read_text() for path in (*folder.parent.glob("*.py"), *folder.glob("*.py"))]
        unused = {
            name
            for name in names
            if not any(f'"{name}"' in text or f"from {name} import" in text for text in texts)
        }
        assert not unused, folder
        # The folder of a program comes first in its `sys.path`.
        assert not [name for name in names if importlib.util.find_spec(name)], folder
