# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits a frame of pandas and prepared data, and prints whether there is a JVM."""

import sys

import numpy as np
import pandas as pd
import torch

from farandole.data import prepare_data
from farandole.spark.common import LocalBackend, LocalStore
from farandole.spark.torch import TorchEstimator

rows = np.random.default_rng(0).random((400, 2), dtype=np.float32)
frame = pd.DataFrame(
    {"a": rows[:, 0], "b": rows[:, 1], "y": rows @ np.array([2.0, -1.0], dtype=np.float32)}
)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, a, b):
        return self.layer(torch.cat([a, b], dim=1))


model = Two()
estimator = TorchEstimator(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
    loss=torch.nn.functional.mse_loss,
    feature_cols=["a", "b"],
    label_cols=["y"],
    batch_size=20,
    epochs=8,
    random_seed=1,
    verbose=0,
    store=LocalStore(sys.argv[1]),
    backend=LocalBackend(2),
    validation=0.2,
)
fitted = estimator.fit(frame)
print("frame", fitted.getHistory()[-1]["train"]["loss"] < 0.01)
data = prepare_data(frame, sys.argv[1], feature_cols=["a", "b"], label_cols=["y"], validation=0.2)
again = estimator.fit_on_parquet(dataset_idx=data.index)
print("parquet", again.getHistory()[-1]["train"]["loss"] < 0.01, data.index)
print(
    "jvm", "py4j.java_gateway" in sys.modules and bool(__import__("pyspark").SparkContext._gateway)
)
try:
    estimator.fit([1, 2])
except TypeError as error:
    print(error)
