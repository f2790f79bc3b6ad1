# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports 200 epochs to the run viewer; rank 1 kills itself when it is asked to."""

import os
import signal
import sys
import time
from pathlib import Path

import farandole


def train(folder):
    import farandole.numpy as hvd
    from farandole.spark.task import report

    hvd.init()
    print("rank", hvd.rank(), "is here", flush=True)
    for epoch in range(200):
        if hvd.rank() == 0:
            report(
                {
                    "kind": "epoch",
                    "entry": {
                        "epoch": epoch,
                        "train": {"loss": 1 / (epoch + 1), "all_metrics": []},
                    },
                }
            )
        if hvd.rank() == 1 and Path(folder, "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
        time.sleep(0.5)


farandole.run(train, args=(sys.argv[1],), num_proc=2, ui=sys.argv[1], timeline=True)
