# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sends functions and models that are too large for a message of Spark Connect."""

import os

import torch
from pyspark.sql import SparkSession

import farandole.spark
from farandole.spark.job import connect_artifacts
from farandole.spark.torch import TorchModel

spark = SparkSession.builder.remote(os.environ["SERVER"]).getOrCreate()
ballast = os.urandom(140 << 20)


def length():
    return len(ballast)


print("carried", farandole.spark.run(length, num_proc=2))
model = torch.nn.Sequential(torch.nn.Embedding(9_000_000, 4), torch.nn.Flatten())
with torch.no_grad():
    model[0].weight[7] = torch.arange(4.0)
frame = spark.range(7, 8).selectExpr("id as x")
made = TorchModel(model=model, feature_columns=["x"], input_dtypes=["int64"], label_columns=["y"])
for _ in range(2):
    print("predicted", made.transform(frame).first()["y__output"])
print("sent", len(connect_artifacts._SENT_FILES_BY_SESSION[spark]))
