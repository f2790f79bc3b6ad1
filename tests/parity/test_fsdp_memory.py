# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A model whose states are larger than the memory of a training process."""

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
from torch import nn

import farandole.torch as hvd
from farandole.runner.backend import LocalBackend
from farandole.spark.torch import TorchEstimator

PROCESSES = 3
WIDTH = 2048
BLOCKS = 14
REPLICA_BYTES = 4 * BLOCKS * WIDTH * WIDTH * 4
"""Bytes of the parameters, their gradients and the two moments of Adam."""
LIMIT_SHARE = 0.7
"""Share of a replica that a process may allocate in addition to the libraries and threads."""


def run_limited(function, *args, **kwargs):
    """Calls a function in a process that cannot allocate memory for a whole replica."""
    for name in ("remote", "sharding.sharded_run"):
        importlib.import_module(f"farandole.spark.torch.{name}")
    hvd.init()  # the engine's threads have stacks
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + int(REPLICA_BYTES * LIMIT_SHARE)
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
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
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


@pytest.fixture
def path(tmp_path):
    x = np.random.default_rng(5).normal(size=(24, 3)).astype("float32")
    pq.write_table(pa.table({"x": list(x), "y": x.sum(1)}), tmp_path / "train.parquet")
    return str(tmp_path / "train.parquet")


def test_a_model_larger_than_the_memory_of_a_process_is_trained_in_parts(path, tmp_path):
    fitted = fit(tmp_path / "divided", path, strategy="fsdp")
    (entry,) = fitted.getHistory()
    assert np.isfinite(entry["validation"]["loss"])
    states = fitted.getOptimizer().state_dict()["state"]
    held = [*fitted.getModel().parameters(), *(each["exp_avg"] for each in states.values())]
    assert sum(tensor.nbytes for tensor in held) > REPLICA_BYTES / 2
    assert all(tensor.isfinite().all() and tensor.any() for tensor in held)


def test_the_memory_of_a_process_is_too_small_for_a_whole_replica(path, tmp_path):
    with pytest.raises(RuntimeError, match=r"MemoryError: rank \d has no memory .*fsdp. divides"):
        fit(tmp_path / "whole", path)
