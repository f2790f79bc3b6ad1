# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports an epoch, and waits until the test has seen it."""

import os
import sys

from plugged_session import plugged, ui

import farandole.spark
from farandole.spark import task

spark = plugged("local-cluster[2,1,1024]")


def train(folder):
    import os
    import time

    import farandole.numpy as hvd

    hvd.init()
    for epoch in range(2):
        if hvd.rank() == 0:
            scores = {"loss": 1.0 / (epoch + 1), "all_metrics": []}
            entry = {"epoch": epoch, "train": scores, "seconds": 0.1, "rows": 100}
            task.report(
                {
                    "kind": "epoch",
                    "entry": entry,
                    "epochs": 2,
                    "steps": 10,
                    "rows_per_second": 1000.0,
                }
            )
        while not os.path.exists(os.path.join(folder, f"seen-{epoch}")):
            time.sleep(0.05)


print(ui(spark), flush=True)
farandole.spark.run(train, args=(os.getcwd(),), num_proc=2)
sys.stdin.readline()
spark.stop()
