# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Continues without rank 2, which has left the world and ended."""

import os
import time

import farandole.numpy as hvd

hvd.init()
rank = hvd.rank()
process = hvd.broadcast_object(os.getpid(), 2)
hvd.shutdown()
if rank != 2:
    while os.path.exists(f"/proc/{process}/exe"):
        time.sleep(0.01)
    time.sleep(2)  # a rank whose connection has closed counts as lost after one second
    hvd.init(comm=[0, 1])
    hvd.barrier()
print("place", rank, flush=True)
