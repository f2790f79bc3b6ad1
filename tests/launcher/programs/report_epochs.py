# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reports three epochs, and fails if it is asked to."""

import sys

import numpy as np

import farandole.numpy as hvd
from farandole.spark.task import report

hvd.init()
print("rank", hvd.rank(), "is here")
for epoch in range(3):
    hvd.allreduce(np.ones(4), name="gradient")
    if hvd.rank() == 0:
        report(
            {
                "kind": "epoch",
                "entry": {"epoch": epoch, "train": {"loss": 1 / (epoch + 1), "all_metrics": []}},
            }
        )
hvd.barrier()
if hvd.rank() == 1 and "fail" in sys.argv:
    sys.exit(3)
