# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs whose workers are killed, and which continue from their checkpoints: the model is that of
an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import cloudpickle
import lightning
import numpy as np
import pytest
import torch
from tests.single.training import fit, line, linear, weights, write

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch.callbacks import Callback

pytestmark = pytest.mark.timeout(300)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def data(tmp_path):
    x, y = line()
    write(tmp_path / "intermediate_train_data", x=x, y=y)
    return tmp_path


def die_once(marker, rank):
    """Ends the second of two ranks, if it still runs."""
    if rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Dies(Callback):
    """Takes its process along in the third epoch."""

    def __init__(self, marker):
        self.marker = str(marker)

    def on_epoch_begin(self, state):
        if state.epoch == 2:
            die_once(self.marker, state.rank)


def momentum(data, run, **params):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return fit(
        data, model, optimizer=optimizer, epochs=4, backend=LocalBackend(2), run_id=run, **params
    )


def test_a_killed_worker_of_pytorch_costs_the_epochs_after_its_checkpoint(data, capfd):
    whole = momentum(data, "whole")
    again = momentum(
        data, "again", on_failure="restart", callbacks=[Dies(data / "killed")], verbose=1
    )
    assert (data / "killed").exists()
    told = capfd.readouterr().err
    assert "ended by signal SIGKILL" in told
    assert "starting again from the last checkpoint, restarts left: 2" in told
    assert [one["epoch"] for one in again.getHistory()] == [0, 1, 2, 3]
    assert torch.allclose(weights(again), weights(whole), atol=1e-6)
    with pytest.raises(FarandoleJobError, match="SIGKILL"):
        momentum(data, "alone", callbacks=[Dies(data / "once more")])


class Line(lightning.LightningModule):
    """Learns y from x with a momentum, which a checkpoint has to keep."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, _index):
        return torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Falls(lightning.Callback):
    """Takes its process along in the third epoch."""

    def __init__(self, marker):
        self.marker = str(marker)

    def on_train_epoch_start(self, trainer, _module):
        if trainer.current_epoch == 2:
            die_once(self.marker, trainer.global_rank)


def lightning_fit(data, **params):
    known = {
        "model": Line(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 4,
        "verbose": 0,
        "random_seed": 1,
        "store": LocalStore(str(data)),
        "backend": LocalBackend(2),
    }
    return LightningEstimator(**known | params).fit_on_parquet()


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
def test_a_killed_worker_of_lightning_costs_the_epochs_after_its_checkpoint(data):
    whole = lightning_fit(data, run_id="whole")
    again = lightning_fit(
        data, run_id="again", on_failure="restart", callbacks=[Falls(data / "killed")]
    )
    assert (data / "killed").exists()
    assert [one["epoch"] for one in again.getHistory()] == [0, 1, 2, 3]
    assert torch.allclose(weights(again), weights(whole), atol=1e-6)


class Rows(lightning.LightningDataModule):
    """Batches of one's own, made with the arguments of Horovod's data modules."""

    def __init__(self, train_dir, schema_fields, train_batch_size, cur_shard, shard_count, **rest):
        super().__init__()
        assert rest["has_val"] is False
        self.told = (train_dir, schema_fields, train_batch_size, cur_shard, shard_count)

    def train_dataloader(self):
        from farandole.data import ParquetLoader

        url, columns, batch_size, rank, size = self.told
        loader = ParquetLoader(
            url, batch_size, columns=columns, rank=rank, size=size, framework="torch", shuffle=False
        )
        return torch.utils.data.DataLoader(loader.as_torch_dataset(), batch_size=None)


class Halves(lightning.LightningDataModule):
    """Batches of one's own, made by the user."""

    def train_dataloader(self):
        x, y = line()
        mine = slice(self.trainer.global_rank, None, self.trainer.world_size)
        rows = torch.utils.data.TensorDataset(
            torch.from_numpy(x[mine]), torch.from_numpy(np.asarray(y[mine]))
        )
        return torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=_named)


def _named(rows):
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}


@pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree).*"
)
def test_a_data_module_of_lightning_gives_the_batches(data):
    native = lightning_fit(data, shuffle=False)
    of_class = lightning_fit(data, data_module=Rows)
    of_object = lightning_fit(data, data_module=Halves())
    assert torch.allclose(weights(of_class), weights(native), atol=1e-6)
    assert torch.allclose(weights(of_object), weights(native), atol=1e-6)
    assert [one["rows"] for one in of_object.getHistory()] == [96] * 4
