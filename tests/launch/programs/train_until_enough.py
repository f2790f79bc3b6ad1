# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains until a rank finds the file `enough`. Ranks print their host in every world."""

import os
import socket
import time

import numpy as np

import farandole.numpy as hvd
from farandole.common.elastic import ObjectState, leave_and_join, run_fn


def train(state):
    print(
        f"world {hvd.size()} {hvd.rank()} {socket.gethostname()} {os.getpid()} "
        f"{min(state.step, 1)}",
        flush=True,
    )
    while True:
        enough, ones = hvd.allreduce(np.array([float(os.path.exists("enough")), 1.0]), op=hvd.Sum)
        assert ones == hvd.size()
        state.step += 1
        if enough:
            return print(f"over {hvd.size()}", flush=True)
        time.sleep(0.02)
        state.commit()
        if state.step == 3:
            print("has committed", flush=True)


hvd.init()
run_fn(train, leave_and_join)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
