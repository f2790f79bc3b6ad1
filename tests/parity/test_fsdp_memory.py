# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A model that is larger than the memory of a training process."""

from __future__ import annotations

import functools
import importlib
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import farandole.torch as hvd
from farandole.runner.backend import LocalBackend
from farandole.spark.torch import TorchEstimator

PROCESSES = 3
WIDTH = 2048
BLOCKS = 24
MODEL_BYTES = BLOCKS * WIDTH * WIDTH * 4
LIMIT_SHARE = 0.9
"""Share of the model's size that a process may allocate in addition to loaded libraries."""


def run_limited(function, *args, **kwargs):
    """Calls a function in a process that cannot allocate memory for the whole model."""
    for name in (
        "torch._dynamo",
        "farandole.spark.torch.remote",
        "farandole.spark.torch.sharding.sharded_run",
    ):
        importlib.import_module(name)
    hvd.init()  # its threads have stacks
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + int(MODEL_BYTES * LIMIT_SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return function(*args, **kwargs)


class LimitedBackend(LocalBackend):
    """Processes of this host with little memory."""

    def run(self, fn, *args, **kwargs):
        return super().run(functools.partial(run_limited, fn), *args, **kwargs)


def fit(folder, path, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(3, WIDTH), *layers, nn.Linear(WIDTH, 1))
    return TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        loss=nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        epochs=1,
        verbose=0,
        backend=LimitedBackend(PROCESSES, env={"MALLOC_ARENA_MAX": "1"}, verbose=0),
        store=str(folder),
        **options,
    ).fit_on_parquet(path=path, val_path=path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_model_larger_than_the_memory_of_a_process_is_trained(tmp_path):
    x = np.random.default_rng(5).normal(size=(32, 3)).astype("float32")
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), path)
    with pytest.raises(RuntimeError, match=r"(?i)memory"):
        fit(tmp_path / "whole", path)
    fitted = fit(tmp_path / "divided", path, strategy="fsdp")
    weight = fitted.getModel()[1].weight
    assert fitted.getHistory()[-1]["validation"]["loss"] > 0
    assert weight.shape == (WIDTH, WIDTH)
    assert weight.isfinite().all()
    fitted.write().save(str(tmp_path / "saved"))
    (stored,) = (tmp_path / "saved").rglob("state")
    assert torch.equal(load_file(stored)["1.weight"], weight)
