# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A rank of `farandole bench`: times one collective on plain memory, no framework imported.

Rank 0 prints one line per size: `bench-row`, bytes, iterations, and median and 90th percentile in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from typing import TYPE_CHECKING, Final

from farandole._native import engine
from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES: Final = {
    "uint8": (0, 1),
    "int8": (1, 1),
    "int32": (4, 4),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (10, 2),
    "float8_e4m3fn": (15, 1),
    "float8_e5m2": (16, 1),
}
"""Number and bytes of the element types."""
SUM: Final = 1
GLOBAL: Final = 0
LONGEST: Final = 1.0
"""Seconds that one size takes, where no number of iterations is asked for."""
MOST: Final = 2000


class Memory:
    """Zeroed memory of its own, by address."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, max(size, 1))
        self._anchor = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self._anchor)


def calls(operation: str, dtype: str, size: int, ranks: int) -> tuple[Callable[[], int], int]:
    """Returns a function that submits the operation once, and the number of bytes of the operation.

    Args:
        operation: Its name.
        dtype: Name of the element type.
        size: Bytes of the whole tensor: what every rank ends with, or for reduce-scatter and all-to-all begins with.
        ranks: Number of ranks.
    """
    number, each = DTYPES[dtype]
    whole = max(1, size // each)
    if operation in ("allgather", "reducescatter", "alltoall"):
        whole = max(1, whole // ranks) * ranks
    part = whole // ranks
    given, taken = Memory(whole * each), Memory(whole * each)

    def submit() -> int:
        # Holds both memories as long as it lives itself.
        source, target = given.address, taken.address
        name = f"bench.{operation}.{size}"
        match operation:
            case "allreduce":
                return engine.allreduce(name, number, (whole,), source, target, SUM, 1.0, 1.0, GLOBAL, True)
            case "broadcast":
                return engine.broadcast(name, number, (whole,), source, source, 0, GLOBAL, True)
            case "allgather":
                return engine.allgather(name, number, (part,), source, GLOBAL, True)
            case "alltoall":
                return engine.alltoall(name, number, (whole,), source, None, GLOBAL, True)
            case _:
                return engine.reducescatter(name, number, (whole,), source, target, SUM, 1.0, 1.0, GLOBAL, True)

    return submit, whole * each


def turn(submit: Callable[[], int], count: int) -> list[float]:
    """Seconds of each of `count` operations."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.wait(submit())
        times.append(time.perf_counter() - start)
    return times


def agreed(seconds: float) -> float:
    """Rank 0's value, on every rank."""
    memory = Memory(8)
    value = ctypes.c_double.from_address(memory.address)
    value.value = seconds
    engine.wait(engine.broadcast("bench.agree", 8, (1,), memory.address, memory.address, 0, GLOBAL, True))
    return value.value


def main() -> None:
    """Times the operation at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation")
    parser.add_argument("dtype", choices=sorted(DTYPES))
    parser.add_argument("iterations", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    basics.init()
    world = engine.world()
    for size in arguments.sizes:
        submit, real = calls(arguments.operation, arguments.dtype, size, world.size)
        warm = turn(submit, 3)
        iterations = arguments.iterations or min(MOST, max(5, int(LONGEST / max(agreed(min(warm)), 1e-6))))
        engine.wait(engine.barrier("bench.start", GLOBAL))
        times = sorted(turn(submit, iterations))
        if world.rank == 0:
            middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 9 // 10)]
            sys.stdout.write(f"bench-row {real} {iterations} {middle:.9f} {late:.9f}\n")
            sys.stdout.flush()
    basics.shutdown()


if __name__ == "__main__":
    main()
