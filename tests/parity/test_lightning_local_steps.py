# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits of `LightningEstimator` with `sync_every` equal fits of `TorchEstimator` with it."""

from __future__ import annotations

import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

import farandole.torch as hvd
from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|isinstance|LeafSpec|_register_pytree|self.trainer).*"
)


class RegressionModule(lightning.LightningModule):
    """A module with its own step."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, _index):
        return functional.mse_loss(self(batch["x"]), batch["y"].reshape(-1, 1))

    def validation_step(self, batch, _index):
        loss = functional.mse_loss(self(batch["x"]), batch["y"].reshape(-1, 1))
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return momentum(self)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def write(folder, rows=37):
    x = np.random.default_rng(5).normal(size=(rows, 3)).astype("float32")
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), folder / "train.parquet")
    return str(folder / "train.parquet")


def fit(kind, model, gang, folder, path, **options):
    known = {"sync_every": 3, "epochs": 2, "batch_size": 4}
    return kind(
        model=model,
        feature_cols=["x"],
        label_cols=["y"],
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder),
        **known | options,
    ).fit_on_parquet(path=path, val_path=path)


def fit_plain(kind, gang, folder, path, **options):
    model = network()
    own = {"optimizer": momentum(model), "loss": nn.MSELoss()}
    return fit(kind, model, gang, folder, path, **own | options)


def assert_close(expected, found):
    for name, value in expected.state_dict().items():
        assert torch.allclose(value, found.state_dict()[name], rtol=1e-5, atol=1e-6), name


def test_local_steps_are_those_of_the_torch_estimator(gangs, tmp_path):
    path = write(tmp_path)
    wanted = fit_plain(TorchEstimator, gangs(2), tmp_path / "torch", path)
    plain = fit_plain(LightningEstimator, gangs(2), tmp_path / "plain", path)
    own = fit(LightningEstimator, RegressionModule(), gangs(2), tmp_path / "own", path)
    every = fit_plain(LightningEstimator, gangs(2), tmp_path / "every", path, sync_every=1)
    assert_close(wanted.getModel(), plain.getModel())
    assert_close(wanted.getModel(), own.getModel().model)
    first = every.getModel()[0].weight
    assert not torch.allclose(wanted.getModel()[0].weight, first, rtol=1e-3)
    for epoch in range(2):
        expected = wanted.getHistory()[epoch]["validation"]["loss"]
        for found in (plain, own):
            assert found.getHistory()[epoch]["validation"]["loss"] == pytest.approx(
                expected, rel=1e-5
            )


def test_a_resumed_run_of_local_steps_equals_an_uninterrupted_one(gangs, tmp_path):
    path = write(tmp_path)
    whole = fit_plain(LightningEstimator, gangs(2), tmp_path / "whole", path)
    options = {"run_id": "local"}
    fit_plain(LightningEstimator, gangs(2), tmp_path / "parts", path, epochs=1, **options)
    resumed = fit_plain(LightningEstimator, gangs(2), tmp_path / "parts", path, **options)
    assert_close(whole.getModel(), resumed.getModel())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"gradient_compression": hvd.Compression.fp16}, "gradient_compression"),
        ({"batch_size": None, "global_batch_size": 8}, "global_batch_size"),
        ({"trainer_args": {"strategy": "farandole"}}, "trainer_args"),
        ({"strategy": "fsdp"}, "is for TorchEstimator"),
    ],
)
def test_options_that_need_all_gradients_are_refused(options, words, gangs, tmp_path):
    options = {name: value for name, value in options.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        fit_plain(LightningEstimator, gangs(2), tmp_path, write(tmp_path), **options)
