# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Fits an estimator of a framework, and prints all that the Training tab has."""

import json
import os
import sys

from plugged_session import plugged, until_rows


def torch_parts():
    import torch

    from farandole.spark.torch import TorchEstimator

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    more = {"optimizer": optimizer, "loss": torch.nn.MSELoss(), "input_shapes": [[-1, 1]]}
    return model, more, TorchEstimator


def keras_parts():
    import keras

    from farandole.spark.keras import KerasEstimator

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    more = {"optimizer": keras.optimizers.SGD(0.001), "loss": "mse"}
    return model, more, KerasEstimator


def lightning_parts():
    import lightning.pytorch as pl
    import torch

    from farandole.spark.lightning import LightningEstimator

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, index):
            x, y = (batch[name].float().reshape(-1, 1) for name in "xy")
            return torch.nn.functional.mse_loss(self(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    return Net(), {"input_shapes": [[-1, 1]]}, LightningEstimator


PARTS = {"torch": torch_parts, "keras": keras_parts, "lightning": lightning_parts}


def fit(spark):
    from farandole.spark.common import LocalStore

    model, more, kind = PARTS[sys.argv[1]]()
    frame = spark.createDataFrame(
        [(float(i % 7), float(i % 7) * 2 + 1) for i in range(800)], ["x", "y"]
    )
    estimator = kind(
        num_proc=2,
        model=model,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=10,
        epochs=3,
        verbose=0,
        run_id="the run",
        store=LocalStore(os.getcwd() + "/store"),
        **more,
    )
    estimator.fit(frame)


spark = plugged()
fit(spark)
print(
    json.dumps(until_rows(spark, lambda run, key, body: key == "run" and body["state"] == "ended"))
)
