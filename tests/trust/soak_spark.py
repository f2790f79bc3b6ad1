# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Jobs on Spark one after the other in one session, and what the driver's two processes hold; see
`soak`.

python -m tests.trust.soak_spark FITS EVERY
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from pyspark import accumulators
from pyspark.sql import SparkSession
from tests.trust.soak import resident, servers

from farandole.runner.errors import FarandoleJobError
from farandole.spark.common import SparkBackend


def good():
    """Ranks that meet."""
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    return float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


def failing():
    """A rank that fails."""
    import farandole.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ArithmeticError("this job always fails")
    return hvd.rank()


def interrupting(driver):
    """A user who presses Ctrl-C while the ranks work."""
    import farandole.numpy as hvd

    hvd.init()
    if hvd.rank() == 0:
        os.kill(driver, signal.SIGINT)
    while True:
        signal.pause()


def run_job(kind, backend):
    """One job; whether it ended as it should."""
    if kind == 1:
        try:
            backend.run(failing)
        except FarandoleJobError as error:
            return "this job always fails" in str(error)
        return False
    if kind == 2:
        try:
            backend.run(interrupting, (os.getpid(),))
        except KeyboardInterrupt:
            return True
        return False
    return backend.run(good) == [2.0, 2.0]


def tasks_of(context):
    """Tasks that Spark still runs: those of a job that was interrupted end a moment later."""
    tracker = context.statusTracker()
    return sum(tracker.getStageInfo(stage).numActiveTasks for stage in tracker.getActiveStageIds())


def temporary_files():
    """Names of all files of the two processes."""
    return [name for _, _, names in os.walk(os.environ["TMPDIR"]) for name in names]


POOLS = (
    "block-manager-a",
    "block-manager-s",
    "QueryStageCreat",
    "ResultQueryStag",
    "shuffle-exchang",
)
"""First letters of threads that Spark keeps in pools for a minute, at most 16 to 128 in each."""


def threads(java):
    """Threads of Java, without those of Spark's pools."""
    names = []
    for task in (java / "task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text())
    return sum(not name.startswith(POOLS) for name in names)


def held(session):
    """Counts the resources of the driver."""
    context = session.sparkContext
    end = time.monotonic() + 20.0
    while tasks_of(context) and time.monotonic() < end:
        time.sleep(0.05)
    gc.collect()
    # Spark deletes files of a shuffle after Java has collected what refers to it.
    while any("shuffle_" in name for name in temporary_files()) and time.monotonic() < end:
        context._jvm.java.lang.System.gc()
        time.sleep(0.5)
    bus = context._jsc.sc().listenerBus()
    java = Path(f"/proc/{context._jvm.java.lang.ProcessHandle.current().pid()}")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "accumulators": len(accumulators._accumulatorRegistry),
        "listeners": bus.listeners().size(),
        "persisted": context._jsc.getPersistentRDDs().size(),
        "processes": servers(),
        "temporary files": len(temporary_files()),
        "memory": resident(),
        "descriptors of Java": len(os.listdir(java / "fd")),
        "threads of Java": threads(java),
    }


def main(fits, every):
    """Runs, and prints."""
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", os.environ["TMPDIR"])
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    backend = SparkBackend(2, verbose=0, stderr=sys.stderr)
    for number in range(fits):
        if not run_job(number % 4, backend):
            raise SystemExit(f"job {number} did not end as it should")
        if (number + 1) % every == 0:
            print(json.dumps({"fits": number + 1, **held(session)}), flush=True)
    session.stop()


if __name__ == "__main__":
    # A shell starts what it puts into the background deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*map(int, sys.argv[1:]))
