# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits with `strategy="fsdp"` equal fits with whole models."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from farandole.spark.torch import TorchEstimator

EPOCHS = 3


class TiedModel(nn.Module):
    """A model with a tied and a frozen weight, batch norm, buffers, and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(3, 5, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(3)
        )
        self.back = nn.Linear(3, 5, bias=False)
        self.back.weight = self.table.weight
        self.head = nn.Linear(3, 1)
        self.blocks[1][0].weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x):
        hidden = self.table(x)
        for block in self.blocks:
            hidden = hidden + block(hidden) * self.scale * self.cache.mean()
        return self.head(hidden @ self.back.weight)


def write(folder, rows=37):
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, 3)).astype("float32")
    path = folder / "train.parquet"
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), path)
    return str(path)


def plain_model():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def fit(gang, folder, path, optimizer=torch.optim.AdamW, model=plain_model, **options):
    torch.manual_seed(0)
    model = model()
    known = {"epochs": EPOCHS, "batch_size": 12 // gang.num_processes(), "validation": 0.2}
    return TorchEstimator(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        metrics=[nn.L1Loss()],
        feature_cols=["x"],
        label_cols=["y"],
        shuffle=False,
        verbose=0,
        backend=gang,
        store=str(folder),
        **known | options,
    ).fit_on_parquet(path=path)


def assert_close(expected, found):
    for name, value in expected.getModel().state_dict().items():
        other = found.getModel().state_dict()[name]
        assert torch.allclose(value, other, rtol=1e-4, atol=1e-5), name
    for one, other in zip(expected.getHistory(), found.getHistory(), strict=True):
        for part in ("train", "validation"):
            assert one[part]["loss"] == pytest.approx(other[part]["loss"], rel=1e-4)
            assert one[part]["all_metrics"][0]["L1Loss"] == pytest.approx(
                other[part]["all_metrics"][0]["L1Loss"], rel=1e-4
            )


def assert_equal_optimizers(expected, found):
    mine, other = expected.getOptimizer().state_dict(), found.getOptimizer().state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, state in mine["state"].items():
        for key, value in state.items():
            assert torch.allclose(value, other["state"][index][key], rtol=1e-3, atol=1e-6), key


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": TiedModel},
        {"backward_passes_per_step": 2},
        {"optimizer": torch.optim.Adagrad},
        {"gradient_clip_norm": 0.05},
        {"global_batch_size": 12, "batch_size": 2},
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
    ],
    ids=["plain", "tied", "two passes", "adagrad", "clip", "micro-batches", "schedule"],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_fitted_model_is_that_of_whole_models(size, options, gangs, tmp_path):
    path = write(tmp_path)
    whole = fit(gangs(size), tmp_path / "whole", path, **options)
    divided = fit(gangs(size), tmp_path / "divided", path, strategy="fsdp", **options)
    assert_close(whole, divided)
    assert_equal_optimizers(whole, divided)
