# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `ema_decay`, next to a plain loop."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.lightning import LightningEstimator
from farandole.spark.torch import TorchEstimator

STEP_ROWS, EPOCHS, DECAY, RATE = 12, 3, 0.8, 0.06


def write(folder, rows=60):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 3)).astype("float32")
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), path)
    return str(path), torch.tensor(x), torch.tensor(x.sum(1))


def network(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)]
    return nn.Sequential(*layers[:1], *([nn.BatchNorm1d(6)] if norm else []), *layers[1:])


def fit(gang, folder, path, model, kind=TorchEstimator, val_path=None, **options):
    known = {"epochs": EPOCHS, "ema_decay": DECAY}
    return kind(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE / gang.num_processes()),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=STEP_ROWS // gang.num_processes(),
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder),
        **known | options,
    ).fit_on_parquet(path=path, val_path=val_path)


def train_plainly(x, y):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    average = None
    for _ in range(EPOCHS):
        for start in range(0, len(x), STEP_ROWS):
            rows = slice(start, start + STEP_ROWS)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows])[:, 0], y[rows]).backward()
            optimizer.step()
            present = [parameter.detach().clone() for parameter in model.parameters()]
            average = (
                present
                if average is None
                else [DECAY * a + (1 - DECAY) * p for a, p in zip(average, present, strict=True)]
            )
    return average, present


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_fitted_model_has_the_averaged_weights(size, gangs, tmp_path):
    path, x, y = write(tmp_path)
    average, last = train_plainly(x, y)
    fitted = fit(gangs(size), tmp_path / "store", path, network()).getModel()
    for mine, wanted, unaveraged in zip(fitted.parameters(), average, last, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(mine, unaveraged, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_validation_judges_the_returned_model(norm, gangs, tmp_path):
    path, x, y = write(tmp_path)
    fitted = fit(gangs(2), tmp_path / "store", path, network(norm), val_path=path)
    with torch.no_grad():
        wanted = nn.functional.mse_loss(fitted.getModel().eval()(x)[:, 0], y).item()
    assert fitted.getHistory()[-1]["validation"]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_resumed_run_continues_the_average(gangs, tmp_path):
    path, _, _ = write(tmp_path)
    whole = fit(gangs(2), tmp_path / "whole", path, network()).getModel()
    fit(gangs(2), tmp_path / "parts", path, network(), run_id="parts", epochs=1)
    rest = fit(gangs(2), tmp_path / "parts", path, network(), run_id="parts").getModel()
    for name, value in rest.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema_decay": 1.0}, "below 1"),
        ({"ema_decay": 0}, "above 0"),
        ({"sync_every": 2}, "sync_every"),
        ({"train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
        ({"kind": LightningEstimator}, "WeightAveraging"),
    ],
)
def test_what_cannot_be_averaged_is_refused(options, words, gangs, tmp_path):
    path, _, _ = write(tmp_path)
    with pytest.raises(ValueError, match=words):
        fit(gangs(2), tmp_path / "store", path, network(), **options)
