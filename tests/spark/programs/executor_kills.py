# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Executors that their driver kills."""

import os
import pathlib
import signal
import time

from pyspark import SparkContext


def executors():
    """The JVMs that this driver's JVM has started."""
    jvm, found = SparkContext._gateway.proc.pid, []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                told = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == jvm and b"CoarseGrainedExecutorBackend" in told:
                found.append(int(entry.name))
    return sorted(found)


def kill_one():
    os.kill(executors()[0], signal.SIGKILL)


def until_executors(count, limit):
    deadline = time.monotonic() + limit
    while len(executors()) < count:
        assert time.monotonic() < deadline, (
            f"{len(executors())} of {count} executors after {limit} s"
        )
        time.sleep(0.05)
