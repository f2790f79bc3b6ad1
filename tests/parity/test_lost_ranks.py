# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A fit that loses a rank, and continues with fewer ranks, trains what one process trains."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest
import torch
from tests.parity import plain_loop, torch_cells
from tests.parity.plain_loop import EPOCHS, Network, cases_of, make_data, make_optimizer
from tests.parity.test_torch_parity import write_rows
from tests.parity.torch_cells import GLOBAL_BATCH_ROWS

from farandole.spark.common import LocalBackend
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.callbacks import Callback

for module in (plain_loop, torch_cells, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # processes cannot import tests

CELL = {"second": None, "weights": None, "validation": False, "scheduler": None, "clip": None}


class LostRank(Callback):
    """Ends the last rank in the middle of an epoch."""

    def __init__(self, epoch: int, size: int) -> None:
        self.epoch, self.size = epoch, size

    def on_batch_end(self, state):
        at_end = state.epoch == self.epoch and state.step == 2
        if at_end and state.size == self.size and state.rank == self.size - 1:
            os._exit(1)


def fit(cell, backend, size, folder, callback):
    cases = cases_of(cell)
    torch.manual_seed(0)
    network = Network(cases)
    fitted = TorchEstimator(
        model=network,
        optimizer=make_optimizer(cell["optimizer"], network.parameters(), 1 / size),
        loss=[one.make() for one in cases],
        feature_cols=["x"],
        label_cols=["y0"],
        batch_size=GLOBAL_BATCH_ROWS // size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        run_id="lost",
        callbacks=[callback],
        backend=backend,
        store=str(folder / "store"),
    ).fit_on_parquet(path=str(folder / "rows.parquet"))
    return torch.cat([one.detach().ravel() for one in fitted.getModel().parameters()])


@pytest.mark.parametrize(
    ("loss", "optimizer", "rows", "before", "after", "epoch"),
    [
        ("ce weight ignored smoothed", "adam", 29, 2, 1, 1),
        *(
            pytest.param(loss, optimizer, rows, before, after, epoch, marks=pytest.mark.slow)
            for loss in ("mse", "mse sum", "ce weight")
            for optimizer, rows in (("adam", 25), ("momentum", 35))
            for before, after in ((2, 1), (3, 2), (3, 1))
            for epoch in (0, 1)
        ),
    ],
)
def test_a_run_that_lost_a_rank_continues_with_fewer(
    loss, optimizer, rows, before, after, epoch, gangs, tmp_path
):
    cell = CELL | {"loss": loss, "optimizer": optimizer, "rows": rows}
    data = make_data(cell)
    write_rows(data, tmp_path / "rows.parquet")
    wanted = plain_loop.train_plainly(cell, data)["parameters"]
    callback = LostRank(epoch, before)
    with pytest.raises(RuntimeError, match=f"rank {before - 1}"):
        fit(cell, LocalBackend(before, verbose=0), before, tmp_path, callback)
    found = fit(cell, gangs(after), after, tmp_path, callback)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
