# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Nothing pending costs nothing."""

import os
import threading
import time

import torch

import farandole.torch as hvd


def idle(seconds):
    """CPU seconds this process used, and wall seconds, while nothing was pending."""
    for _ in range(3):
        hvd.allreduce(torch.ones(1000))
    hvd.barrier()
    time.sleep(0.2)
    wall, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return time.process_time() - cpu, time.monotonic() - wall


def test_an_idle_world_uses_less_than_half_a_percent_of_a_core(pair):
    for cpu, wall in pair.run(idle, 3.0):
        assert cpu < 0.005 * wall, f"{cpu / wall:.2%} of a core"


def threads():
    return sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/task"))


def test_the_only_threads_of_the_interpreter_are_those_that_wait_for_events_and_questions_and_look_after_memory(pair):
    for names, _ in pair.run(threads):
        assert names == ["MainThread", "farandole-heap", "farandole-log", "farandole-stacks"]
