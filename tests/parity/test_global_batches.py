# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `global_batch_size` train the same on any number of processes, also if that number does
not divide the batch.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.torch import TorchEstimator

GLOBAL_BATCH_SIZE = 10
ROWS = 37
EPOCHS = 2
LEARNING_RATE = 0.05


def write(folder):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, 3)).astype("float32")
    y = draw.integers(0, 3, ROWS)
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": y}), path)
    return str(path), torch.tensor(x), torch.tensor(y)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(gang, folder, path, **options):
    model = options.pop("model", None) or network()
    known = {
        "optimizer": torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-2),
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5])),
        "epochs": EPOCHS,
        "shuffle": False,
        "global_batch_size": GLOBAL_BATCH_SIZE,
    }
    return TorchEstimator(
        model=model,
        feature_cols=["x"],
        label_cols=["y"],
        verbose=0,
        backend=gang,
        store=str(folder / f"store-{gang.num_processes()}"),
        **known | options,
    ).fit_on_parquet(path=path)


def train_plainly(x, y):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-2)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5]))
    for _ in range(EPOCHS):
        for rows in torch.arange(len(x)).split(GLOBAL_BATCH_SIZE):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


def assert_close(fitted, wanted):
    for name, value in fitted.getModel().state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2},
        {"backward_passes_per_step": 2},
        {"shard_optimizer": True, "batch_size": 3},
        {"inmemory_cache_all": True},
    ],
    ids=["plain", "limited rows", "two passes", "sharded", "in memory"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_is_the_same_on_any_number_of_processes(size, options, gangs, tmp_path):
    path, x, y = write(tmp_path)
    fitted = fit(gangs(size), tmp_path, path, **options)
    assert_close(fitted, train_plainly(x, y).state_dict())
    steps = -(-ROWS // GLOBAL_BATCH_SIZE)
    assert [(one["rows"], one["steps"]) for one in fitted.getHistory()] == [(ROWS, steps)] * EPOCHS
