# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An elastic job that loses half of its ranks trains what one process trains on global batches."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.launcher.conftest import until
from tests.launcher.elastic import own
from tests.programs import program_path

from farandole.data import GlobalBatchLoader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.launcher.conftest import Launch

    Start = Callable[..., Launch]

PATIENCE = 150
ROWS, STEP_ROWS, EPOCHS = 203, 9, 2
PROGRAM = program_path(__file__, "train_global_batches")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, 3)).astype("float32")
    folder = tmp_path / "rows"
    folder.mkdir()
    y = draw.normal(size=ROWS).astype("float32")  # so that steps do not end in one solution
    pq.write_table(pa.table({"x": list(x), "y": y}), folder / "part.parquet")
    return folder


def train_plainly(data: Path) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    loader = GlobalBatchLoader(str(data), STEP_ROWS, framework="torch", seed=3, rank=0, size=1)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]).backward()
            optimizer.step()
    return [value for one in model.parameters() for value in one.flatten().tolist()]


@pytest.mark.timeout(300)
def test_the_loss_of_half_of_the_ranks_changes_nothing(launch: Start, data: Path) -> None:
    flags = ("-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 1, 1)
    arguments = (data, STEP_ROWS, EPOCHS)
    run = launch(*flags, sys.executable, PROGRAM, *arguments, env={"OMP_NUM_THREADS": "1"})
    until(lambda: run.process.poll() is not None, "its end", PATIENCE)
    assert run.wait() == 0, run.err.read_text()
    assert "was ended by SIGKILL" in own(run)
    assert [one.name for one in data.parent.glob("rows-lost-*")] == ["rows-lost-1"]
    results = [
        json.loads(line.partition(":result ")[2]) for line in run.lines() if ":result " in line
    ]
    wanted = train_plainly(data)
    assert results
    for weights, sizes in results:
        assert weights == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert 1 in sizes, "some steps were taken by fewer ranks"
