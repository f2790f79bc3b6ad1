# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the start page and of guides, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.started import blocks

DOCS = Path(__file__).parents[2] / "docs"


def output_of(script):
    """What a rank prints while it runs a script."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(script, "page", "exec"), {})
    return said.getvalue()


@pytest.mark.parametrize(
    ("page", "number", "said"),
    [
        ("start/index.md", 0, "2 processes, loss 0.0000"),
        ("user-guide/jax.md", 0, "2 processes, loss 0.000000"),
        ("user-guide/jax.md", 1, "[0. 2. 4.] (3, 2)"),
        ("moving.md", 0, "2 ranks with DDP"),
    ],
)
def test_a_script_of_a_page_prints_what_it_should(pair, page, number, said):
    if page == "user-guide/jax.md":
        pytest.importorskip("jax")
    first, other = pair.run(output_of, blocks(DOCS / page, "python")[number])
    assert said in first
    assert other == ""


def output_in_a_world_of_its_own(script):
    """The same in a new world, because process sets may change only if `init` says so."""
    import farandole.torch as hvd

    hvd.shutdown()
    try:
        return output_of(script)
    finally:
        hvd.shutdown()
        hvd.init()


def test_the_script_about_operations_prints_what_it_should(pair):
    first, _ = pair.run(output_in_a_world_of_its_own, blocks(DOCS / "user-guide" / "operations.md", "python")[0])
    assert "2 ranks, sum [2.0, 2.0, 2.0], rows (3, 2)" in first
