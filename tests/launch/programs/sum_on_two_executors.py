# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver of Spark whose two executors sum until a file is there."""

import os
import sys

from pyspark.sql import SparkSession

import farandole.spark


def work():
    import os
    import time

    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    rounds, more = 0, 1.0
    while more:
        more = hvd.allreduce(
            np.array([0.0 if os.path.exists("/run/job/enough") else 1.0]), op=hvd.Min
        )[0]
        rounds += 1
        if rounds == 20:
            with open("/run/job/rank.new", "w") as told:
                told.write(f"{os.getpid()} {hvd.rank()}")
            os.rename("/run/job/rank.new", "/run/job/rank")
        time.sleep(0.01)
    hvd.shutdown()
    return rounds > 20


settings = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "head",
    "spark.driver.bindAddress": "0.0.0.0",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.local.dir": "/run/tmp",
    "spark.stage.maxConsecutiveAttempts": "1",
}
settings |= {
    f"spark.executorEnv.{name}": value
    for name, value in os.environ.items()
    if name.startswith("FARANDOLE_")
}
builder = SparkSession.builder.master("spark://head:7077")
for name, value in settings.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
session.sparkContext.setLogLevel("ERROR")
try:
    print(
        "results",
        farandole.spark.run(work, num_proc=2, start_timeout=float(sys.argv[1])),
        flush=True,
    )
except Exception as error:
    print("failed", type(error).__name__, str(error).replace("\n", " "), flush=True)
