# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints what each process set is in each world of an elastic job."""

import os
import time

import numpy as np

import farandole.numpy as hvd
from farandole.common.elastic import ObjectState, leave_and_join, run_fn

even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
os.environ["FARANDOLE_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init(process_sets=[even, odd])


def describe_set(process_set):
    if process_set.process_set_id is None:
        return "gone"
    inside = process_set.included() and int(
        hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=process_set)[0]
    )
    return f"{process_set.ranks}:{inside or 0}".replace(" ", "")


def train(state):
    # Those of the world before are what they were: only the first world makes this one.
    low = hvd.add_process_set([0, 1]) if hvd.size() == 4 and state.step == 0 else None
    if low is not None:
        state.low = low
        state.commit()
    print(f"world {hvd.size()} rank {hvd.rank()} pid {os.getpid()}", flush=True)
    texts = " ".join(describe_set(one) for one in (even, odd, state.low))
    print(f"sets {hvd.size()} {hvd.rank()} {texts}", flush=True)
    while not hvd.allreduce(np.array([float(os.path.exists("enough"))]), op=hvd.Max)[0]:
        state.step += 1
        time.sleep(0.02)
        state.commit()
    print(f"over {hvd.size()}", flush=True)


run_fn(train, leave_and_join)(ObjectState(hvd.broadcast_object, hvd.rank, step=0, low=None))
