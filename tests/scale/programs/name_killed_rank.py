# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Kills a rank in the middle; the others print after how many seconds they named it."""

import os
import signal
import sys
import time

import numpy as np
from ranks_of_hosts import rank, size

import farandole.numpy as hvd

began = time.monotonic()
try:
    # Some ranks leave the barrier, and one of these is killed, before others do.
    hvd.barrier()
    if rank == size // 2 - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(np.ones(100_000, dtype=np.float32), op=hvd.Sum)
except hvd.HorovodInternalError as error:
    assert f"rank {size // 2 - 1}" in str(error), error
sys.stdout.write(f"{time.monotonic() - began}")
