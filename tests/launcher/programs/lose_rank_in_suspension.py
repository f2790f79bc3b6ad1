# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Commits a counter. When rank 0 has reported the suspension of the job, rank 1 dies; the training
of the next world ends before a commit. Argument: the store.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import farandole.numpy as hvd
from farandole.common import suspension
from farandole.common.elastic import ObjectState, leave_and_join, run_fn

REPORTED, GONE = Path("reported"), Path("gone")
report_suspension = suspension.report_suspension


def report_and_wait_for_loss(*values: object) -> None:
    report_suspension(*values)
    REPORTED.touch()
    while not GONE.exists():
        time.sleep(0.02)


def die_after_report() -> None:
    while not REPORTED.exists():
        time.sleep(0.02)
    GONE.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def train(state: ObjectState) -> None:
    print(f"rank {hvd.rank()} begins at {state.step}", flush=True)
    if hvd.rank() == 1:
        threading.Thread(target=die_after_report).start()
    while not GONE.exists():
        state.step += 1
        time.sleep(0.02)
        state.commit()


suspension.report_suspension = report_and_wait_for_loss
hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)
state.save_to(sys.argv[1], "digits")
run_fn(train, leave_and_join)(state)
print("the rest of the script", flush=True)
