# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks in a loop of collectives, until one of them finds the file `enough`."""

import os
import time

import numpy as np

import farandole.numpy as hvd

hvd.init()
hvd.allreduce(np.ones(4), name="first")
print(f"up {hvd.rank()}", flush=True)
rounds = 0
while not hvd.allreduce(np.array([float(os.path.exists("enough"))]), op=hvd.Max, name="enough")[0]:
    rounds += 1
    if rounds == 5:
        print(f"goes on {hvd.rank()}", flush=True)
    time.sleep(0.02)
print(f"over {hvd.rank()}", flush=True)
hvd.shutdown()
