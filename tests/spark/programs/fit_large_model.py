# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits a model and returns a result that are larger than a row of Spark."""

import os

import torch
from driver_session import session

import farandole.spark
from farandole.spark.common import LocalStore, SparkBackend
from farandole.spark.torch import TorchEstimator

spark = session("local[2]", driver_maxResultSize="10m")
frame = spark.range(8).selectExpr("cast(id as float) as x", "cast(id as float) as y")
for backend in ({"num_proc": 2}, {"backend": SparkBackend(2)}):
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 2_500_000), torch.nn.Flatten(), torch.nn.AvgPool1d(2_500_000)
    )
    fitted = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        verbose=0,
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=1,
        batch_size=1,
        store=LocalStore(os.getcwd() + "/store"),
        **backend,
    ).fit(frame)
    print("parameters", sum(one.numel() for one in fitted.getModel().parameters()))
print(
    "left",
    [
        name
        for name in os.listdir("store/runs")
        if "spill" in name and os.listdir("store/runs/" + name)
    ],
)
try:
    farandole.spark.run(lambda: os.urandom(20 << 20), num_proc=2, verbose=0)
except farandole.spark.FarandoleJobError as error:
    print("told", error)
spark.stop()
