# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `sync_every`, next to a plain loop that trains each process's rows and averages."""

from __future__ import annotations

import copy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.torch import TorchEstimator

BATCH_SIZE = 4
EPOCHS = 3
LOSSES = {
    "plain": nn.CrossEntropyLoss,
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.5])),
}


def write(folder, rows):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 3)).astype("float32")
    y = draw.integers(0, 3, rows)
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": y}), path)
    return str(path), torch.tensor(x), torch.tensor(y)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


def estimator(gang, folder, **options):
    model = network()
    known = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5),
        "loss": nn.CrossEntropyLoss(),
    }
    return TorchEstimator(
        model=model,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder / f"store-{gang.num_processes()}"),
        **{**known, "epochs": EPOCHS, **options},
    )


def train_apart(x, y, loss, processes, sync_every):
    """Trains a model per process on its part of each step's rows, and averages parameters."""
    models = [network() for _ in range(processes)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5) for m in models]
    step_rows = BATCH_SIZE * processes
    for _ in range(EPOCHS):
        for step, start in enumerate(range(0, len(x), step_rows), 1):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                rows = slice(start + rank, start + step_rows, processes)
                optimizer.zero_grad()
                loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            if step % sync_every == 0 or start + step_rows >= len(x):
                average([model.parameters() for model in models])
        for optimizer in optimizers:  # an epoch ends with the momentum of the first process
            optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    return models[0]


def average(parameters):
    with torch.no_grad():
        for same in zip(*parameters, strict=True):
            mean = torch.stack(list(same)).mean(0)
            for parameter in same:
                parameter.copy_(mean)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sync_every", [2, 3, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_step_apart_and_average(size, sync_every, loss, gangs, tmp_path):
    path, x, y = write(tmp_path, BATCH_SIZE * size * 5)
    fitted = estimator(
        gangs(size), tmp_path, loss=LOSSES[loss](), sync_every=sync_every
    ).fit_on_parquet(path=path)
    wanted = train_apart(x, y, LOSSES[loss](), size, sync_every).state_dict()
    for name, value in fitted.getModel().state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=1e-5, atol=1e-6), name


def test_a_resumed_fit_goes_on_as_if_uninterrupted(gangs, tmp_path):
    path, _, _ = write(tmp_path, 40)
    whole = estimator(gangs(2), tmp_path / "whole", sync_every=3).fit_on_parquet(path=path)
    estimator(gangs(2), tmp_path, sync_every=3, epochs=1, run_id="parts").fit_on_parquet(path=path)
    rest = estimator(gangs(2), tmp_path, sync_every=3, run_id="parts").fit_on_parquet(path=path)
    assert len(rest.getHistory()) == EPOCHS
    for name, value in rest.getModel().state_dict().items():
        assert torch.equal(value, whole.getModel().state_dict()[name]), name


def test_validation_sees_the_averaged_model(gangs, tmp_path):
    path, x, y = write(tmp_path, 40)
    fitted = estimator(gangs(2), tmp_path, sync_every=100).fit_on_parquet(path=path, val_path=path)
    wanted = nn.functional.cross_entropy(fitted.getModel()(x), y).item()
    assert fitted.getHistory()[-1]["validation"]["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
        ({"sync_every": 0}, "sync_every"),
    ],
)
def test_options_that_need_gradients_of_all_are_refused(options, words, gangs, tmp_path):
    path, _, _ = write(tmp_path, 16)
    with pytest.raises(ValueError, match=words):
        estimator(gangs(2), tmp_path, **{"sync_every": 2, **options}).fit_on_parquet(path=path)
