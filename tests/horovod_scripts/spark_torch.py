# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The PyTorch estimator and its model."""

import sys

import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession

if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    rows = [(float(a), float(b), 2.0 * a - b) for a in range(8) for b in range(8)]
    frame = session.createDataFrame(rows, ["a", "b", "label"])
    model = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        backend=SparkBackend(num_proc=2, verbose=0),
        store=Store.create(sys.argv[1]),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss=lambda output, target: torch.nn.functional.mse_loss(
            output, target.float().reshape(output.shape)
        ),
        input_shapes=[[-1, 2]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=2,
        verbose=0,
    )
    from pyspark.ml.feature import VectorAssembler

    frame = VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)
    fitted = estimator.fit(frame).setOutputCols(["predicted"])
    found = fitted.transform(frame).select("label", "predicted").collect()
    assert len(found) == 64
    history = fitted.getHistory()
    assert len(history) == 2, history
    session.stop()
    print("done 0")
