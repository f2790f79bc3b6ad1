# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Output of the ranks in the directory of a run, on Spark."""

from __future__ import annotations

import io

import pytest
import torch

import farandole.spark
from farandole.runner.event_handler import LAST_LINES_NOTE, LINES_IN_TASK_LOG_NOTE
from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator


def fit(spark, store):
    """A fit of two ranks, each of which writes to stderr and fails."""

    def fail(state):
        import sys

        print("of rank", state.rank, file=sys.stderr)
        raise RuntimeError("no more disk")

    model = torch.nn.Linear(1, 1)
    frame = spark.createDataFrame(
        [(float(number), float(number)) for number in range(64)], ["x", "y"]
    )
    TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], input_shapes=[[-1, 1]], store=LocalStore(str(store)),
        run_id="mine",
        batch_size=4, epochs=1, verbose=0, callbacks=[fail],
    ).fit(frame)  # fmt: skip


def test_a_fit_without_streams_keeps_the_last_lines_of_stderr_of_each_rank(spark, tmp_path):
    with pytest.raises(farandole.spark.FarandoleJobError, match="no more disk"):
        fit(spark, tmp_path)
    kept = [tmp_path / f"runs/mine/output/rank.{rank}" for rank in range(2)]
    told = {rank: (place / "stderr").read_text() for rank, place in enumerate(kept)}
    assert any(
        f"of rank {rank}" in text and "no more disk" in text for rank, text in told.items()
    ), told
    for rank, text in told.items():
        assert text.startswith(f"{LINES_IN_TASK_LOG_NOTE}\n{LAST_LINES_NOTE}\n"), (rank, text)
        assert (kept[rank] / "stdout").read_text() == f"{LINES_IN_TASK_LOG_NOTE}\n"


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("streams", [False, True], ids=["without streams", "with streams"])
def test_a_function_with_a_viewer_keeps_what_reaches_the_driver(spark, tmp_path, elastic, streams):
    def train():
        import sys

        import farandole.numpy as hvd

        hvd.init()
        print("out of", hvd.rank())
        print("err of", hvd.rank(), file=sys.stderr)

    run = farandole.spark.run_elastic if elastic else farandole.spark.run
    more = {"stdout": io.StringIO(), "stderr": io.StringIO()} if streams else {}
    run(train, num_proc=2, ui=tmp_path, verbose=0, **more)
    (directory,) = (tmp_path / "runs").iterdir()
    for rank in range(2):
        out, err = (
            (directory / f"output/rank.{rank}/{name}").read_text() for name in ("stdout", "stderr")
        )
        assert out == (f"out of {rank}\n" if streams else f"{LINES_IN_TASK_LOG_NOTE}\n")
        assert err.endswith(f"err of {rank}\n"), err
