# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A notebook for Databricks: Horovod's KerasEstimator on a DataFrame, and the accuracy of its
model.
"""

import sys
import uuid

import horovod.spark.keras as hvd
import keras
import numpy as np
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import DBFSLocalStore
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import DoubleType
from sklearn.datasets import load_digits

BATCH_SIZE, EPOCHS, NUM_PROC = 32, 4, 2

# COMMAND ----------

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
work_dir = f"/dbfs/horovod_spark_estimator/{uuid.uuid4()}"
store = DBFSLocalStore(work_dir)

# COMMAND ----------

digits = load_digits(n_class=10)
names = [f"pixel{number}" for number in range(64)]
rows = [
    (*map(float, pixels / 16), float(label))
    for pixels, label in zip(digits.data, digits.target, strict=True)
]
frame = spark.createDataFrame(rows, [*names, "label"])
frame = VectorAssembler(inputCols=names, outputCol="features").transform(frame)
encoder = OneHotEncoder(inputCols=["label"], outputCols=["label_vec"], dropLast=False)
frame = encoder.fit(frame).transform(frame).select("features", "label", "label_vec")
train_df, test_df = frame.randomSplit([0.9, 0.1], seed=1)

# COMMAND ----------

model = keras.models.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Reshape((8, 8, 1)),
        keras.layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
backend = SparkBackend(
    num_proc=NUM_PROC, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True
)
keras_estimator = hvd.KerasEstimator(
    backend=backend,
    store=store,
    model=model,
    optimizer=keras.optimizers.Adam(0.005),
    loss="categorical_crossentropy",
    metrics=["accuracy"],
    feature_cols=["features"],
    label_cols=["label_vec"],
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=1,
)
keras_model = keras_estimator.fit(train_df).setOutputCols(["label_prob"])

# COMMAND ----------

pred_df = keras_model.transform(test_df)
argmax = udf(lambda v: float(np.argmax(v)), returnType=DoubleType())
pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
evaluator = MulticlassClassificationEvaluator(
    predictionCol="label_pred", labelCol="label", metricName="accuracy"
)
accuracy = evaluator.evaluate(pred_df)
print(f"Test accuracy: {accuracy:.3f}")
assert accuracy > 0.8, accuracy
assert len(keras_model.getHistory()["loss"]) == EPOCHS
print("done")
spark.stop()
