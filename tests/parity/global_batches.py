# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Rows and fits with `global_batch_size`, next to a plain loop over the same batches."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import farandole.torch as hvd

GLOBAL_BATCH_SIZE = 9
"""Rows that two processes cannot share equally."""
ROWS = 37
"""The last step of an epoch has one row."""
EPOCHS = 2
LEARNING_RATE = 0.05


def write(folder, rows=ROWS):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 3)).astype("float32")
    y = draw.integers(0, 3, rows)
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": y}), path)
    return str(path), torch.tensor(x), torch.tensor(y)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(kind, gang, folder, path, **options):
    model = network()
    known = {
        "optimizer": torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-2),
        "loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5])),
        "epochs": EPOCHS,
        "shuffle": False,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "store": str(folder / f"store-{gang.num_processes()}"),
    }
    return kind(
        model=model,
        feature_cols=["x"],
        label_cols=["y"],
        verbose=0,
        backend=gang,
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
    return model.state_dict()


def assert_close(fitted, wanted):
    for name, value in fitted.getModel().state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=1e-5, atol=1e-6), name


class LostRanks:
    """Ends half of the ranks once, in the middle of an epoch, and slows training down while they
    are replaced.
    """

    def __init__(self, folder, size):
        self.folder, self.size = str(folder), size

    def end_batch(self, epoch, step):
        size = hvd.size()
        (Path(self.folder) / f"size-{size}").touch()
        marker = Path(self.folder) / f"killed-{hvd.rank()}"
        is_due = (epoch, step, size) == (1, 3, self.size) and hvd.rank() >= size // 2
        if is_due and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05 if size < self.size else 0)

    def check_losses(self):
        """Checks that half of the ranks were lost, and that the others trained without them."""
        folder = Path(self.folder)
        killed = {f"killed-{rank}" for rank in range(self.size // 2, self.size)}
        assert {one.name for one in folder.glob("killed-*")} == killed
        sizes = {int(one.name.split("-")[1]) for one in folder.glob("size-*")}
        assert max(sizes) == self.size
        assert min(sizes) < self.size
