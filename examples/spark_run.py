# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Averages a number over two processes of a Spark application."""

import os
import sys

from pyspark.sql import SparkSession

import farandole.spark


def average():
    import torch

    import farandole.torch as hvd

    hvd.init()
    mean = hvd.allreduce(torch.tensor(float(hvd.rank())), name="mean")
    return f"rank {hvd.rank()} of {hvd.size()}: the mean of all ranks is {mean.item()}"


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    print("\n".join(farandole.spark.run(average, num_proc=2)))
