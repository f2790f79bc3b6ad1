# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small Keras network on scikit-learn's scanned digits: a Spark DataFrame in, a Spark ML
model out.

Runs on whatever backend `KERAS_BACKEND` names.
"""

import os
import sys

import keras
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from sklearn.datasets import load_digits

from farandole.spark.common import LocalStore
from farandole.spark.keras import KerasEstimator, KerasModel

ENOUGH = 0.95
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

keras.utils.set_random_seed(1)
network = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
estimator = KerasEstimator(
    num_proc=2,
    model=network,
    optimizer=keras.optimizers.Adam(0.001),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    feature_cols=["features"],
    label_cols=["label"],
    validation=0.1,
    batch_size=32,
    epochs=15,
    random_seed=1,
    store=LocalStore("farandole-demo"),
)
model = estimator.fit(train)

scored = model.transform(test).withColumn("scores", vector_to_array("label__output"))
predicted = scored.withColumn("predicted", F.expr("array_position(scores, array_max(scores)) - 1"))
accuracy = predicted.select(F.avg((F.col("predicted") == F.col("label")).cast("int"))).first()[0]
print(f"test accuracy {accuracy:.4f}")
assert accuracy >= ENOUGH

model.write().overwrite().save("farandole-demo/keras-model")
again = KerasModel.load("farandole-demo/keras-model")
assert (
    again.transform(test).select("label__output").collect()
    == predicted.select("label__output").collect()
)
print("predictions identical after save/load")

print(model.history_frame().to_string(index=False))
for what, path in model.getPaths().items():
    print(f"{what:16}{path}")
spark.stop()
