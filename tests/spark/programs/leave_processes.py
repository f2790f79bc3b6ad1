# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Stops executors that have left processes behind, and prints which of them live."""

import contextlib
import json
import os
import time

from plugged_session import plugged

spark = plugged("local-cluster[1,1,1024]")


def start(_):
    import subprocess
    import sys

    wait = "import time; time.sleep(300)"
    # In sessions of their own: Spark ends the group of its Python workers by a signal.
    names = ["farandole.runner.stand-in", "another.program"]
    return [
        subprocess.Popen([sys.executable, "-c", wait, name], start_new_session=True).pid
        for name in names
    ]


(pids,) = spark.sparkContext.parallelize([0], 1).map(start).collect()


def alive(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as command:
            # a process that has ended and has not been waited for has none
            return bool(command.read())
    except FileNotFoundError:
        return False


before = [alive(pid) for pid in pids]
spark.stop()
deadline = time.monotonic() + 30
while alive(pids[0]) and time.monotonic() < deadline:
    time.sleep(0.05)
after = [alive(pid) for pid in pids]
for pid in pids:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
print(json.dumps([before, after]))
