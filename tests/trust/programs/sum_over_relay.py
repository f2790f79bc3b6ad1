# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sums whose every element is known; a rank that gets another one prints it."""

import sys
import time

import numpy as np

import farandole.numpy as hvd
from farandole.common.exceptions import HorovodInternalError

rounds, length, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
hvd.init()
assert hvd.cross_size() == 2
try:
    for _ in range(rounds):
        total = hvd.allreduce(np.arange(length, dtype=np.float32) + hvd.rank(), op=hvd.Sum)
        if not np.array_equal(total, 2 * np.arange(length, dtype=np.float32) + 1):
            print("wrong sum", flush=True)
        if hvd.broadcast_object({"told": 1} if hvd.rank() == 0 else None, root_rank=0) != {
            "told": 1
        }:
            print("wrong object", flush=True)
        time.sleep(pause)
except HorovodInternalError as error:
    print("error:", error, flush=True)
else:
    print("done", flush=True)
