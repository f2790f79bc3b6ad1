# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A rank without pending operations uses no CPU."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

import farandole.torch as hvd


def wakeups():
    """Returns the number of context switches of this process's threads since they began."""
    counts = []
    for status in Path("/proc/self/task").glob("*/status"):
        lines = status.read_text().splitlines()
        counts += [int(line.split()[1]) for line in lines if "_ctxt_switches" in line]
    return sum(counts)


def idle(windows):
    """Wake-ups and CPU seconds of this process, for each window of a second in which nothing was
    pending.
    """
    for _ in range(3):
        hvd.allreduce(torch.ones(1000))
    hvd.barrier()
    time.sleep(0.2)
    used = []
    for _ in range(windows):
        woken, cpu = wakeups(), time.process_time()
        time.sleep(1.0)
        cpu = time.process_time() - cpu
        used.append((wakeups() - woken, cpu))
    return used


@pytest.mark.timing
def test_an_idle_world_wakes_seldom_and_uses_less_than_a_percent_of_a_core(pair):
    # What one wake-up costs depends on what else the machine does, so the count is the narrow
    # bound. It is about 17.
    for used in pair.run(idle, 3):
        woken, cpu = (min(of) for of in zip(*used, strict=True))
        assert woken < 40, f"{woken} wake-ups a second"
        assert cpu < 0.01, f"{cpu:.2%} of a core"


def threads():
    return sorted(thread.name for thread in threading.enumerate()), len(
        os.listdir("/proc/self/task")
    )


def test_the_only_threads_of_the_interpreter_wait_for_events_and_questions_or_watch_memory(pair):
    for names, _ in pair.run(threads):
        assert names == ["MainThread", "farandole-heap", "farandole-log", "farandole-stacks"]
