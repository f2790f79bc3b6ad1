# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Freed memory goes back to the system although workers keep the process."""

import os
import subprocess
import sys

import pytest
from tests.programs import program_path

from farandole._native.launcher import ALLOCATOR
from farandole.common.heap import HeapTrimmer, MallocHeap

MIB = 1 << 20


class Fake:
    """A heap of which a test says what is in it."""

    def __init__(self):
        self.alive, self.unused, self.others, self.trims = 100 * MIB, 0, 300 * MIB, 0
        self.separated = 0

    def used_bytes(self):
        return self.alive

    def anonymous_resident_bytes(self):
        return self.alive + self.unused + self.others

    def trim_unused(self):
        self.unused = 0
        self.trims += 1

    def map_large_blocks(self):
        self.separated += 1


@pytest.fixture
def heap():
    return Fake()


class Clock:
    """Looks at a heap every quarter of a second."""

    def __init__(self, heap):
        self.watch, self.now = HeapTrimmer(heap), 0.0

    def looks(self, seconds):
        """After how long it trimmed within these seconds, if it did."""
        for after in range(1, round(4 * seconds) + 1):
            self.now += 0.25
            if self.watch.sample_heap_and_trim(self.now):
                return after / 4
        return None


def test_unused_memory_is_returned_and_memory_of_other_allocators_is_left(heap):
    clock = Clock(heap)
    assert clock.looks(5) == 2.25
    assert clock.looks(20) is None, "nothing could be given back: that is no reason to try again"
    heap.unused = 30 * MIB
    assert clock.looks(20) is None
    heap.unused = 35 * MIB
    assert clock.looks(5) <= 2.25
    assert (heap.unused, heap.trims) == (0, 2)


def test_a_thread_that_seldom_runs_decides_as_soon(heap):
    watch = HeapTrimmer(heap)
    assert [watch.sample_heap_and_trim(second / 2) for second in range(1, 9)] == [
        *[False] * 7,
        True,
    ]


def test_memory_that_a_step_frees_and_takes_again_is_kept(heap):
    clock = Clock(heap)
    clock.looks(5)
    for step in range(200):
        heap.alive, heap.unused = (100 * MIB, 900 * MIB) if step % 3 else (1000 * MIB, 0)
        assert clock.looks(0.25) is None


def test_memory_that_comes_back_after_each_trim_is_allocated_apart(heap):
    clock = Clock(heap)
    for trims in range(1, 5):
        assert heap.separated == 0
        heap.unused = 200 * MIB
        assert clock.looks(5)
        assert heap.trims == trims
    assert heap.separated == 1


def test_a_trim_now_and_then_leaves_large_blocks_in_the_heap(heap):
    clock = Clock(heap)
    for _ in range(20):
        heap.unused = 200 * MIB
        assert clock.looks(5)
        assert clock.looks(10) is None
    assert (heap.trims, heap.separated) == (20, 0)


BLOCKS = program_path(__file__, "free_large_blocks")


@pytest.mark.parametrize("apart", [True, False])
def test_a_large_block_that_is_allocated_apart_goes_back_at_once(apart):
    command = [sys.executable, BLOCKS, "apart" if apart else "together"]
    done = subprocess.run(
        command, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) >= 60) == apart, done.stdout


def test_a_large_program_may_keep_more(heap):
    heap.alive, heap.others = 4000 * MIB, 0
    clock = Clock(heap)
    heap.unused = 450 * MIB
    assert clock.looks(10) is None
    heap.unused = 550 * MIB
    assert clock.looks(5) is not None


def test_the_heap_of_this_process_tells_what_is_used_and_gives_back_what_is_not():
    heap = MallocHeap()
    used = heap.used_bytes()
    block = bytearray(8 * MIB)
    assert heap.used_bytes() - used >= len(block)
    assert heap.anonymous_resident_bytes() > 8 * MIB
    heap.trim_unused()


THREADS = """
import threading
import farandole.torch as hvd
hvd.init()
print([thread.name for thread in threading.enumerate() if thread.name == "farandole-heap"])
"""


@pytest.mark.parametrize(
    ("threshold", "watched"), [(None, 0), ("131072", 0), (ALLOCATOR["MALLOC_TRIM_THRESHOLD_"], 1)]
)
def test_only_a_heap_that_a_launcher_told_to_keep_memory_is_looked_after(threshold, watched):
    name = "MALLOC_TRIM_THRESHOLD_"
    env = {key: value for key, value in os.environ.items() if key != name}
    env |= {name: threshold} if threshold else {}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("farandole-heap") == watched
