# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the start page and of guides run on two ranks."""

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
    # One after the other in one job: `init` does nothing after the first, which allows process sets to change.
    scripts = [
        blocks(DOCS / "user-guide" / "operations.md", "python")[0],
        blocks(DOCS / "start" / "index.md", "python")[0],
        *blocks(DOCS / "user-guide" / "jax.md", "python"),
        blocks(DOCS / "moving.md", "python")[0],
    ]
    (tmp_path / "train.py").write_text("\n".join(scripts))
    run = launch("-np", "2", sys.executable, tmp_path / "train.py", env={"OMP_NUM_THREADS": "1"})
    assert run.wait() == 0, run.err.read_text()
    said = run.out.read_text()
    assert "2 ranks, sum [2.0, 2.0, 2.0], rows (3, 2)" in said
    assert "2 processes, loss 0.0000" in said
    assert "2 processes, loss 0.000000" in said
    assert "[0. 2. 4.] (3, 2)" in said
    assert "2 ranks with DDP" in said
