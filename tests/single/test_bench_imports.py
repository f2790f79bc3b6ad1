# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Each measurement in `bench/` starts, and prints its help, with the packages of pyproject.toml."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHES = sorted((ROOT / "bench").glob("*.py"))
OURS = {"farandole", "tests", *(path.stem for path in BENCHES)}


def declared_distributions() -> set[str]:
    """The distributions that pyproject.toml names, normalised."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = (re.match(r"[\w.-]+", requirement) for some in lists for requirement in some)
    return {_normalise(name[0]) for name in names if name}


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imports_at_the_top(text: str) -> set[str]:
    """The packages that are imported when the module is."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_bench_imports_only_declared_packages_at_its_top(path):
    providers = importlib.metadata.packages_distributions()
    declared = declared_distributions()
    undeclared = {
        name
        for name in imports_at_the_top(path.read_text()) - OURS
        if not declared & {_normalise(one) for one in providers.get(name, [name])}
    }
    assert not undeclared, f"import {', '.join(undeclared)} where it is used"


BOTH_RUNS = """
import runpy, sys
sys.modules["torchvision"] = None  # an import of it fails
sys.path.insert(0, sys.argv[1])
for arguments in (["--help"], []):
    sys.argv = ["images.py", *arguments]
    try:
        runpy.run_path("images.py", run_name="__main__")
    except SystemExit as ended:
        print("ended with", ended.code)
"""


def test_the_help_of_images_needs_no_torchvision_and_a_run_asks_for_it():
    folder = ROOT / "bench"
    ran = subprocess.run(
        [sys.executable, "-c", BOTH_RUNS, folder],
        capture_output=True, text=True, timeout=120, check=True, cwd=folder,
    )  # fmt: skip
    help_text, _, rest = ran.stdout.partition("ended with 0\n")
    assert "--images" in help_text
    assert rest == "ended with 2\n"
    assert "pip install torchvision" in ran.stderr
