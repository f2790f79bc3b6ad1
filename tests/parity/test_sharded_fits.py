# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `shard_optimizer=True` give the bits of fits without it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.torch import TorchEstimator

EPOCHS = 3


def write(folder, rows=37):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 3)).astype("float32")
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), path)
    return str(path)


def fit(gang, folder, path, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    known = {"epochs": EPOCHS, "batch_size": 12 // gang.num_processes()}
    return TorchEstimator(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder),
        **known | options,
    ).fit_on_parquet(path=path)


def assert_equal(one, other):
    for name, value in one.getModel().state_dict().items():
        assert torch.equal(value, other.getModel().state_dict()[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward_passes_per_step": 2},
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
    ],
    ids=["plain", "two passes", "schedule"],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_fitted_model_is_that_of_whole_states(size, options, gangs, tmp_path):
    path = write(tmp_path)
    whole = fit(gangs(size), tmp_path / "whole", path, **options)
    sharded = fit(gangs(size), tmp_path / "sharded", path, shard_optimizer=True, **options)
    assert_equal(whole, sharded)


def test_clipping_uses_the_norm_of_all_processes(gangs, tmp_path):
    path = write(tmp_path)
    options = {"gradient_clip_norm": 0.05}
    whole = fit(gangs(2), tmp_path / "whole", path, **options)
    sharded = fit(gangs(2), tmp_path / "sharded", path, shard_optimizer=True, **options)
    free = fit(gangs(2), tmp_path / "free", path)
    for name, value in whole.getModel().state_dict().items():
        found = sharded.getModel().state_dict()[name]
        assert torch.allclose(value, found, rtol=1e-5, atol=1e-6), name
        assert not torch.allclose(value, free.getModel().state_dict()[name], rtol=1e-5), name


@pytest.mark.parametrize("rest", [2, 3])
def test_a_run_goes_on_with_its_states(rest, gangs, tmp_path):
    """On another number of processes it goes on as a run with whole states does."""
    path = write(tmp_path)
    fitted = {}
    for shard in (False, True):
        options = {"shard_optimizer": shard, "run_id": "parts", "resume": "force"}
        folder = tmp_path / str(shard)
        fit(gangs(2), folder, path, epochs=1, **options)
        fitted[shard] = fit(gangs(rest), folder, path, **options)
        assert len(fitted[shard].getHistory()) == EPOCHS
    assert_equal(fitted[False], fitted[True])
    if rest == 2:
        assert_equal(fit(gangs(2), tmp_path / "whole", path), fitted[True])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"sync_every": 2}, "shard_optimizer"),
        ({"optimizer": torch.optim.Adafactor}, "element-wise"),
        ({"train_minibatch_fn": lambda *_: None}, "train_minibatch_fn"),
    ],
)
def test_options_that_need_all_gradients_are_refused(options, words, gangs, tmp_path):
    with pytest.raises(ValueError, match=words):
        fit(gangs(2), tmp_path, write(tmp_path), shard_optimizer=True, **options)
