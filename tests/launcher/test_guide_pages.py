# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the guides run on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.started import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.launcher.conftest import Launch

DOCS = Path(__file__).parents[2] / "docs"


def test_the_scripts_of_the_start_page_and_of_guides_run(launch: Callable[..., Launch], tmp_path: Path) -> None:
    jax, numpy = blocks(DOCS / "user-guide" / "jax.md", "python")
    scripts = {
        "operations": blocks(DOCS / "user-guide" / "operations.md", "python")[0],
        "arrays": jax + numpy,
        "ddp": blocks(DOCS / "moving.md", "python")[0],
        "start": blocks(DOCS / "start" / "index.md", "python")[0],
    }
    said = {
        "operations": ["2 ranks, sum [2.0, 2.0, 2.0], rows (3, 2)"],
        "arrays": ["2 processes, loss 0.0", "[0. 2. 4.] (3, 2)"],
        "ddp": ["2 ranks with DDP"],
        "start": ["2 processes, loss 0.0"],
    }
    runs = {}
    for name, script in scripts.items():
        (tmp_path / f"{name}.py").write_text(script)
        runs[name] = launch("-np", "2", sys.executable, tmp_path / f"{name}.py", env={"OMP_NUM_THREADS": "1"})
    for name, run in runs.items():
        assert run.wait() == 0, run.err.read_text()
        assert all(line in run.out.read_text() for line in said[name]), run.out.read_text()
