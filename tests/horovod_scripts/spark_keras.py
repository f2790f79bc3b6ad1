# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The Keras estimator and its model."""

import sys

import keras
from horovod.spark.common.store import LocalStore
from horovod.spark.keras import KerasEstimator
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession

if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    rows = [(float(a), float(b), float(a + b)) for a in range(8) for b in range(8)]
    frame = session.createDataFrame(rows, ["a", "b", "label"])
    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    estimator = KerasEstimator(
        num_proc=2,
        store=LocalStore(sys.argv[1]),
        model=model,
        optimizer=keras.optimizers.Adam(0.05),
        loss="mse",
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=2,
        verbose=0,
    )
    fitted = estimator.fit(frame, None)
    found = fitted.transform(frame).collect()
    assert len(found) == 64
    assert "label__output" in found[0].asDict()
    session.stop()
    print("done 0")
