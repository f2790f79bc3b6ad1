# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The scripts of the start page and of guides, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pages import blocks_of
from tests.started import blocks

DOCS = Path(__file__).parents[2] / "docs"


def output_of(script):
    """Returns the output of a rank that runs a script."""
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
        ("user-guide/torch-distributed.md", 0, "2 ranks, sum 3"),
        ("user-guide/operations.md", 1, "2 ranks, 20 steps"),
        ("user-guide/operations.md", 2, "16897 parameters, 20 steps"),
        ("user-guide/operations.md", 3, "states of 4 parameters after 20 steps"),
        ("user-guide/operations.md", 4, "2 ranks, loss 0.0"),
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
    first, _ = pair.run(
        output_in_a_world_of_its_own, blocks(DOCS / "user-guide" / "operations.md", "python")[0]
    )
    assert "2 ranks, sum [2.0, 2.0, 2.0], rows (3, 2)" in first


MODEL = (
    "import torch\nmodel = torch.nn.Linear(8, 1)\noptimizer = torch.optim.SGD(model.parameters(), "
    "lr=0.1)\n"
)


def step_of(script):
    """Runs a step in a script that begins training; returns whether the parameters of both ranks
    are then equal.
    """
    import torch

    import farandole.torch as hvd

    names = {}
    exec(compile(script, "page", "exec"), names)
    torch.manual_seed(hvd.rank())
    names["model"](torch.randn(4, 8)).mean().backward()
    names["optimizer"].step()
    weights = hvd.allgather(names["model"].weight.detach())
    return torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("page", "number"), [("README.md", 1), ("docs/user-guide/moving-from-horovod.md", 0)]
)
def test_the_lines_that_a_script_needs_make_its_ranks_train_one_model(shared_world, page, number):
    block = [block for block in blocks_of(page) if block.kind == "python"][number]
    # A world of their own: `import horovod` chooses the convention of gradients for its process.
    assert shared_world(2, "pages", {}).run(step_of, MODEL + block.text) == [True, True]


@pytest.mark.parametrize(
    ("page", "number", "before"),
    [
        ("logging.md", 0, ""),
        ("timeline.md", 1, "images, augment = [1], list\n"),
    ],
)
def test_a_piece_of_a_page_runs(pair, page, number, before):
    block = [block for block in blocks_of(f"docs/user-guide/{page}") if block.kind == "python"][
        number
    ]
    assert pair.run(output_of, before + block.text) == ["", ""]
