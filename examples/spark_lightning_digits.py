# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a `LightningModule` on scikit-learn's scanned digits: a Spark DataFrame in, a Spark ML
model out.
"""

import os
import sys

import lightning
import torch
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from sklearn.datasets import load_digits

from farandole.spark.common import LocalStore
from farandole.spark.lightning import TorchEstimator

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

digits = load_digits()
rows = [
    (Vectors.dense(image / 16), int(label))
    for image, label in zip(digits.data, digits.target, strict=True)
]
train, test = spark.createDataFrame(rows, ["features", "label"]).randomSplit([0.8, 0.2], seed=1)


class Digits(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self(batch["features"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _index: int) -> None:
        output = self(batch["features"])
        self.log("val_loss", torch.nn.functional.cross_entropy(output, batch["label"]))
        self.log("val_accuracy", (output.argmax(dim=1) == batch["label"]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.004)


torch.manual_seed(1)
model = TorchEstimator(
    num_proc=2,
    model=Digits(),
    feature_cols=["features"],
    input_shapes=[[-1, 1, 8, 8]],
    label_cols=["label"],
    validation=0.1,
    batch_size=32,
    epochs=10,
    random_seed=1,
    store=LocalStore("farandole-lightning"),
).fit(train)

scored = model.transform(test).withColumn("scores", vector_to_array("label__output"))
predicted = scored.withColumn("predicted", F.expr("array_position(scores, array_max(scores)) - 1"))
print(
    "test accuracy "
    f"{predicted.select(F.avg((F.col('predicted') == F.col('label')).cast('int'))).first()[0]:.4f}"
)
print(model.history_frame().to_string(index=False))
spark.stop()
