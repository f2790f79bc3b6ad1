# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A function on Spark's executors."""

import horovod.spark
from pyspark.sql import SparkSession


def train(factor):
    import horovod.torch as hvd
    import torch

    hvd.init()
    x = torch.ones(1, requires_grad=True)
    hvd.broadcast(x, 0).sum().backward()
    total = hvd.allreduce(torch.ones(2) * factor, op=hvd.Sum)
    return hvd.rank(), total.tolist(), x.grad.item()


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    results = horovod.spark.run(train, args=(3,), num_proc=2, verbose=0)
    # The root's gradient is the average of two ones.
    assert results == [(0, [6.0, 6.0], 1.0), (1, [6.0, 6.0], 0.0)], results
    session.stop()
    print("done 0")
