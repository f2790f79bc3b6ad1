# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Forecasts the sales of shops from a table: embeddings of categories beside numbers, as one stage
of a Spark pipeline.

The table is made up: each shop and each weekday has a level of its own, promotions sell, far
competitors help.
"""

import os
import sys

import keras
import numpy as np
import pandas as pd
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.sql import SparkSession

from farandole.keras.callbacks import BestModelCheckpoint
from farandole.spark.common import LocalStore
from farandole.spark.keras import KerasEstimator

SHOPS, DAYS, ROWS, NOISE = 30, 7, 6000, 0.1
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

random = np.random.default_rng(0)
shop, day = random.integers(0, SHOPS, ROWS), random.integers(0, DAYS, ROWS)
promotion, distance = random.integers(0, 2, ROWS), random.exponential(2.0, ROWS)
level = (
    random.normal(0, 1, SHOPS)[shop]
    + random.normal(0, 0.5, DAYS)[day]
    + 0.4 * promotion
    + 0.2 * np.log1p(distance)
)
table = pd.DataFrame(
    {
        "shop": [f"shop {number}" for number in shop],
        "day": day,
        "promotion": promotion,
        "distance": distance,
        "log_sales": level + random.normal(0, NOISE, ROWS),
    }
)
train, test = spark.createDataFrame(table).randomSplit([0.8, 0.2], seed=1)

# Three inputs: two categories, and all numbers side by side.
of_shop, of_day = (
    keras.Input((1,), dtype="int32", name="shop"),
    keras.Input((1,), dtype="int32", name="day"),
)
numbers = keras.Input((2,), name="numbers")
joined = keras.layers.Concatenate()(
    [
        keras.layers.Flatten()(keras.layers.Embedding(SHOPS, 8)(of_shop)),
        keras.layers.Flatten()(keras.layers.Embedding(DAYS, 4)(of_day)),
        numbers,
    ]
)
hidden = keras.layers.Dense(32, activation="relu")(joined)
network = keras.Model([of_shop, of_day, numbers], keras.layers.Dense(1)(hidden))
network.compile(optimizer=keras.optimizers.Adam(0.005), loss="mse", metrics=["mae"])

estimator = KerasEstimator(
    num_proc=2,
    model=network,
    feature_cols=["shop_index", "day", ["promotion", "distance"]],
    label_cols=["log_sales"],
    validation=0.1,
    batch_size=64,
    epochs=12,
    random_seed=1,
    callbacks=[keras.callbacks.EarlyStopping(patience=4)],
    checkpoint_callback=BestModelCheckpoint(monitor="val_loss"),
    store=LocalStore("farandole-demo"),
)
pipeline = Pipeline(stages=[StringIndexer(inputCol="shop", outputCol="shop_index"), estimator])
model = pipeline.fit(train)

rmse = RegressionEvaluator(labelCol="log_sales", predictionCol="log_sales__output").evaluate(
    model.transform(test)
)
print(
    f"test error {rmse:.4f}, of which {NOISE} is noise; guessing the mean: "
    f"{table.log_sales.std():.4f}"
)
assert rmse < 2 * NOISE
print(model.stages[-1].history_frame().to_string(index=False))
spark.stop()
