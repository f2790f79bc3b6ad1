# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small network on scikit-learn's scanned digits: a Spark DataFrame in, a Spark ML
model out.
"""

import os
import sys

import torch
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from sklearn.datasets import load_digits

from farandole.spark.common import LocalStore
from farandole.spark.torch import TorchEstimator, TorchModel

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


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == label).float().mean()


network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
estimator = TorchEstimator(
    num_proc=2,
    model=network,
    optimizer=torch.optim.Adam(network.parameters(), lr=0.001),
    loss=torch.nn.CrossEntropyLoss(),
    metrics=[accuracy],
    feature_cols=["features"],
    label_cols=["label"],
    validation=0.1,
    batch_size=32,
    epochs=20,
    random_seed=1,
    store=LocalStore("farandole-demo"),
)
model = estimator.fit(train)

scored = model.transform(test).withColumn("scores", vector_to_array("label__output"))
predicted = scored.withColumn("predicted", F.expr("array_position(scores, array_max(scores)) - 1"))
print(
    "test accuracy "
    f"{predicted.select(F.avg((F.col('predicted') == F.col('label')).cast('int'))).first()[0]:.4f}"
)

model.write().overwrite().save("farandole-demo/model")
again = TorchModel.load("farandole-demo/model")
assert (
    again.transform(test).select("label__output").collect()
    == predicted.select("label__output").collect()
)
print("predictions identical after save/load")

print(model.history_frame().to_string(index=False))
for what, path in model.getPaths().items():
    print(f"{what:16}{path}")
spark.stop()
print(
    f"see the run in the browser: {os.path.relpath(sys.executable)} -m farandole ui farandole-demo"
)
