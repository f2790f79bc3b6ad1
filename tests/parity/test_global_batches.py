# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `global_batch_size` train the same on any number of processes, also if that number does
not divide the batch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.spark.common import LocalBackend
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator
from farandole.spark.torch.callbacks import Callback

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # processes cannot import tests
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|self.trainer).*"
)
GLOBAL_BATCH_SIZE = 10
ROWS = 37
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


def fit(gang, folder, path, kind=TorchEstimator, **options):
    model = options.pop("model", None) or network()
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
    return model


def assert_close(fitted, wanted):
    for name, value in fitted.getModel().state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=1e-5, atol=1e-6), name


OPTIONS = {
    "plain": {},
    "limited rows": {"batch_size": 2},
    "two passes": {"backward_passes_per_step": 2},
    "sharded": {"shard_optimizer": True, "batch_size": 3},
    "in memory": {"inmemory_cache_all": True},
}
SHORT_CELLS = {(4, "plain"), (4, "limited rows"), (1, "limited rows"), (2, "two passes")}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(
            size,
            options,
            id=f"{size}, {name}",
            marks=() if (size, name) in SHORT_CELLS else pytest.mark.slow,
        )
        for name, options in OPTIONS.items()
        for size in (1, 2, 4)
    ],
)
def test_a_step_is_the_same_on_any_number_of_processes(size, options, gangs, tmp_path):
    path, x, y = write(tmp_path)
    fitted = fit(gangs(size), tmp_path, path, **options)
    assert_close(fitted, train_plainly(x, y).state_dict())
    steps = -(-ROWS // GLOBAL_BATCH_SIZE)
    assert [(one["rows"], one["steps"]) for one in fitted.getHistory()] == [(ROWS, steps)] * EPOCHS


def test_shuffled_rows_and_a_resumed_run_do_not_depend_on_the_number_either(gangs, tmp_path):
    path, _, _ = write(tmp_path)
    options = {"shuffle": True, "random_seed": 3}
    whole = fit(gangs(1), tmp_path / "whole", path, **options)
    options |= {"run_id": "parts", "store": str(tmp_path / "parts")}
    fit(gangs(4), tmp_path, path, **options, epochs=1)
    rest = fit(gangs(2), tmp_path, path, **options)
    assert len(rest.getHistory()) == EPOCHS
    assert_close(rest, whole.getModel().state_dict())


@pytest.mark.parametrize(
    ("size", "passes"),
    [(4, 1), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, 1), (1, 2), (4, 2)))],
)
def test_steps_of_lightning_are_the_same_on_any_number_of_processes(size, passes, gangs, tmp_path):
    path, x, y = write(tmp_path)
    options = {"kind": LightningEstimator, "backward_passes_per_step": passes}
    fitted = fit(gangs(size), tmp_path, path, **options)
    assert_close(fitted, train_plainly(x, y).state_dict())


class LostRanks:
    """Ends half of the ranks once, in the middle of an epoch, and slows training down while they
    are replaced.
    """

    def __init__(self, folder):
        self.folder = str(folder)

    def end_batch(self, epoch, step):
        size = hvd.size()
        (Path(self.folder) / f"size-{size}").touch()
        marker = Path(self.folder) / f"killed-{hvd.rank()}"
        if (epoch, step, size) == (1, 3, 4) and hvd.rank() >= 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05 if size < 4 else 0)


class TorchLoss(Callback):
    def __init__(self, folder):
        self.ranks = LostRanks(folder)

    def on_batch_end(self, state):
        self.ranks.end_batch(state.epoch, state.step)


class LightningLoss(lightning.Callback):
    def __init__(self, folder):
        self.ranks = LostRanks(folder)

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, index):
        self.ranks.end_batch(trainer.current_epoch, index + 1)


@pytest.mark.parametrize(
    ("kind", "callback", "options"),
    [
        (TorchEstimator, TorchLoss, {"batch_size": 3}),
        pytest.param(LightningEstimator, LightningLoss, {}, marks=pytest.mark.slow),
    ],
    ids=["torch", "lightning"],
)
def test_the_loss_of_half_of_the_ranks_changes_nothing(kind, callback, options, tmp_path):
    path, x, y = write(tmp_path, 8 * ROWS)
    fitted = fit(
        LocalBackend(4, min_num_proc=1),
        tmp_path,
        path,
        kind,
        callbacks=[callback(tmp_path)],
        **options,
    )
    assert {one.name for one in tmp_path.glob("killed-*")} == {"killed-2", "killed-3"}
    assert {one.name for one in tmp_path.glob("size-*")} & {"size-2", "size-3"}
    assert_close(fitted, train_plainly(x, y).state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 3}, "fewer rows than there are processes: 4 processes"),
        ({"backward_passes_per_step": 3}, "a multiple of backward_passes_per_step=3"),
        ({"sync_every": 2}, "cannot be combined with sync_every=2"),
        ({"batch_size": 2, "backward_passes_per_step": 2}, "backward_passes_per_step=2"),
        ({"batch_size": 2, "train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
        ({"data_module": dict}, "data_module"),
        ({"kind": LightningEstimator, "batch_size": 2}, "batch_size=2"),
        (
            {"kind": LightningEstimator, "trainer_args": {"accumulate_grad_batches": 2}},
            "accumulate_grad_batches",
        ),
    ],
)
def test_options_that_divide_rows_otherwise_are_refused(options, words, gangs, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(gangs(4), tmp_path, write(tmp_path)[0], **options)
