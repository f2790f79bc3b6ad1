# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The page about moving from Horovod lists the projects that `make test-clients` runs, their
versions, and each change of them with its reason.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
PAGE = (ROOT / "docs" / "user-guide" / "moving-from-horovod.md").read_text()
SECTION = PAGE.partition("\n## Projects that were tried\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]


def listed_patches():
    """The patches of clients, by name."""
    path = CLIENTS / "patched" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("client_patches", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PATCHES


def test_the_page_has_the_versions_that_the_tests_install():
    listed = {name.strip("`"): version for name, version, *rest in ROWS if rest}
    pins = {}
    for path in (CLIENTS / "requirements").glob("*.txt"):
        found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.MULTILINE))
        names = {name: found[name] for name in listed if name in found}
        assert names, f"the page has no project of {path.name}"
        pins |= names
    assert listed == pins


def test_the_page_has_each_change_with_its_reason():
    patches = {name: patch.reason for name, patch in listed_patches().items()}
    reasons = {
        name: row[1] for row in ROWS if len(row) == 2 for name in re.findall(r"`([\w-]+)`", row[0])
    }
    assert reasons == patches
    changed = [name for row in ROWS if len(row) > 2 for name in re.findall(r"`([\w-]+)`", row[3])]
    assert sorted(changed) == sorted(patches)
