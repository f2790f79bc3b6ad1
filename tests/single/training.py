# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Helpers for tests of the torch estimator: a line to learn from Parquet, in this process."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from farandole.spark.common import Backend, LocalStore
from farandole.spark.torch import TorchEstimator


class Here(Backend):
    """Runs the function in this process; keeps what workers report."""

    def __init__(self):
        self.runs = 0

    def run(self, fn, args=(), kwargs=None, env=None, on_progress=None):  # noqa: ARG002
        self.runs += 1
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


def write(directory, **columns):
    """A Parquet data set; two-dimensional columns become fixed-size lists."""
    arrays = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        if values.ndim == 2
        else pa.array(values)
        for name, values in columns.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays), directory / "part-0.parquet")


def line(rows=96, seed=0):
    """y = 2 x0 - 3 x1 + 1."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 2)).astype(np.float32)
    return x, (2 * x[:, 0] - 3 * x[:, 1] + 1).astype(np.float32)


def linear(outputs=1, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, outputs)


def estimator(directory, model, **params):
    """An estimator over the line's columns."""
    known = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 20,
        "verbose": 0,
        "random_seed": 1,
        "store": LocalStore(str(directory)),
        "backend": Here(),
    }
    return TorchEstimator(
        **{name: value for name, value in (known | params).items() if value is not None}
    )


def fit(directory, model, **params):
    """The model that the estimator fits on the Parquet in its store."""
    return estimator(directory, model, **params).fit_on_parquet()


def weights(model):
    return torch.cat(
        [parameter.detach().reshape(-1) for parameter in model.getModel().parameters()]
    )
