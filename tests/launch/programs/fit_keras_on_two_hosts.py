# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver of Spark that fits a model of Keras with a rank on each of two hosts. Each rank leaves
its host and its weights in the directory of the first argument.
"""

import json
import socket
import sys
from pathlib import Path

import keras
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession

from farandole.spark.common import LocalStore
from farandole.spark.keras import KerasEstimator

FOLDER = Path(sys.argv[1])


class WeightReport(keras.callbacks.Callback):
    """Writes the rank's host and its weights when the training has ended."""

    def on_train_end(self, logs=None):
        """Writes the file of the rank."""
        import farandole.keras as hvd

        kernel, bias = (values.reshape(-1).tolist() for values in self.model.get_weights())
        found = {"host": socket.gethostname(), "size": hvd.size(), "weights": kernel + bias}
        (FOLDER / f"rank-{hvd.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    builder = SparkSession.builder.master("spark://head:7077")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "head",
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.local.dir": "/run/tmp",
        "spark.executorEnv.KERAS_BACKEND": "torch",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    frame = session.range(400).selectExpr("rand(1) AS a", "rand(2) AS b")
    frame = frame.selectExpr("a", "b", "2 * a - 3 * b + 0.5 AS y")
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(frame)
    KerasEstimator(
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.3),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=20,
        epochs=20,
        num_proc=2,
        callbacks=[WeightReport()],
        store=LocalStore(str(FOLDER / "store")),
        verbose=0,
    ).fit(frame.select("x", "y"))
    session.stop()
