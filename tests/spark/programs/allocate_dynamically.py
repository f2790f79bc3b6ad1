# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Runs gangs under dynamic allocation, and kills an executor of one."""

import os
import pathlib
import signal
import sys
import threading
import time

from driver_session import session

import farandole.spark

folder = sys.argv[1]
spark = session(
    "local-cluster[2,1,1024]",
    executor_cores="1",
    dynamicAllocation_enabled="true",
    dynamicAllocation_shuffleTracking_enabled="true",
    dynamicAllocation_minExecutors="0",
    dynamicAllocation_maxExecutors="2",
    dynamicAllocation_executorIdleTimeout="5s",
)


def work():
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return hvd.allreduce(np.ones(2, dtype=np.float32), op=hvd.Sum).tolist(), hvd.size()


print("formed", farandole.spark.run(work, num_proc=2))


def uneven():
    import os
    import time

    os.close(os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT))
    seen = len(os.listdir(folder))
    if os.environ["RANK"] == "0":
        return seen  # has ended well when the other is lost
    if seen <= 2:
        time.sleep(600)
    return seen


def running(name):
    try:
        return pathlib.Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill():
    # Until both have begun, and the one that does not sleep has ended.
    while len(os.listdir(folder)) < 2 or all(map(running, os.listdir(folder))):
        time.sleep(0.02)
    # The executor of the one that sleeps: its worker's agent's executor.
    from farandole.runner import warm_workers

    for name in sorted(os.listdir(folder)):
        pid = int(name)
        while pid > 1 and os.path.exists(f"/proc/{pid}"):
            if b"CoarseGrainedExecutorBackend" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return
            pid = warm_workers._parent_pid(pid)


threading.Thread(target=kill).start()
print("again", farandole.spark.run(uneven, num_proc=2))
try:
    farandole.spark.run(work, num_proc=3)
except ValueError as error:
    print(error)
spark.stop()
