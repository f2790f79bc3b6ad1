# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Directories that all users of a host share: while data is loaded, fitted and transformed, other
users can neither read nor enter anything that lies there.

The programs run with a umask of 0, so a file or directory that only the umask would protect is
found. A thread looks at the shared directories all the time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.programs import program_path

pytestmark = pytest.mark.timeout(600)
USES = [
    "frame_loader",
    "frame_loader of Spark",
    "cached loader with processes",
    "fit in local workers",
    "fit and transform on Spark",
    "query that spills",
]


@pytest.mark.parametrize("name", USES)
def test_nothing_in_a_shared_place_is_open_to_other_users(tmp_path, name, monkeypatch):
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o1777)
    home.mkdir(mode=0o700)
    program = program_path(__file__, "watch_shared_places")
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    done = subprocess.run(
        [sys.executable, program, shared, home, name],
        capture_output=True, text=True, check=False, timeout=150, cwd=Path.cwd(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("OPEN")] == []
    (seen,) = [line for line in lines if line.startswith("SEEN")]
    assert int(seen.split()[1]) > 0, "something was there to be looked at"
