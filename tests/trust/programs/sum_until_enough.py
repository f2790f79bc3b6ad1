# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks that sum until a file is there, and their driver, of a kind that the test names."""

import sys


def rank(enough, announcement):
    import os
    import time

    import numpy as np

    import farandole.numpy as hvd
    from farandole.spark import task

    hvd.init()
    if announcement == "training":
        print("training", flush=True)
    elif announcement == "pid":
        print("pid", os.getpid(), flush=True)
    rounds, longest, more = 0, 0.0, 1.0
    while more:
        began = time.monotonic()
        more = hvd.allreduce(np.array([0.0 if os.path.exists(enough) else 1.0]), op=hvd.Min)[0]
        longest, rounds = max(longest, time.monotonic() - began), rounds + 1
        if rounds % 20 == 0:
            task.report({"rounds": rounds})
        time.sleep(0.005)
    hvd.shutdown()
    return rounds, longest


def make_backend(kind):
    if kind == "local":
        from farandole.spark.common import LocalBackend

        return LocalBackend(2, verbose=0, warm=False)
    from pyspark.sql import SparkSession

    from farandole.spark.common import SparkBackend

    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    return SparkBackend(2, verbose=0)


def progress(rank, record):
    if len(told) == 0:
        print("training", flush=True)
    told.append(record["rounds"])


kind, enough, announcement = sys.argv[1:]
if kind == "command":  # the launcher is the driver
    print("results", [rank(enough, announcement)], flush=True)
else:
    told = []
    results = make_backend(kind).run(rank, (enough, announcement), on_progress=progress)
    print("results", results, "last", told[-1], flush=True)
