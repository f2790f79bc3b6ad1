# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Lightning estimator and its model."""

import sys

import lightning.pytorch as pl
import torch
from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator
from horovod.spark.lightning.estimator import MIN_PL_VERSION
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, features):
        return self.layer(features)

    def training_step(self, batch, batch_index):
        loss = torch.nn.functional.mse_loss(
            self(batch["features"]).flatten(), batch["label"].float().flatten()
        )
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


if __name__ == "__main__":
    assert [int(part) for part in pl.__version__.split(".")[:2]] >= [
        int(part) for part in MIN_PL_VERSION.split(".")[:2]
    ]
    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    rows = [(float(a), float(b), float(a + b)) for a in range(8) for b in range(8)]
    frame = session.createDataFrame(rows, ["a", "b", "label"])
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    estimator = TorchEstimator(
        num_proc=2,
        store=Store.create(sys.argv[1]),
        model=Net(),
        input_shapes=[[-1, 2]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=2,
        verbose=0,
    )
    assert estimator.setNumGPUs(0).getNumGPUs() == 0
    fitted = estimator.fit(frame)
    assert fitted.transform(frame).count() == 64
    session.stop()
    print("done 0")
