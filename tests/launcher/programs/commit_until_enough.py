# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits a counter until the file `enough` exists. Arguments: the store or `none`, the name of the
run, the commits between two writes, and the step up to which the counter counts.
"""

import sys
import time
from pathlib import Path

import farandole.numpy as hvd
from farandole.common.elastic import ObjectState, leave_and_join, run_fn

store, run_id, every, last_step = sys.argv[1:5]


def train(state: ObjectState) -> None:
    print(f"rank {hvd.rank()} begins at {state.step}", flush=True)
    while not hvd.broadcast_object(Path("enough").exists()):
        if state.step < int(last_step):
            state.step += 1
        time.sleep(0.02)
        state.commit()
    print(f"rank {hvd.rank()} is over at {state.step}", flush=True)


hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)
if store != "none":
    state.save_to(store, run_id, every=int(every))
run_fn(train, leave_and_join)(state)
print("the rest of the script", flush=True)
