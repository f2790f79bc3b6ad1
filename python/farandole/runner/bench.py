# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A rank of `farandole bench`: times one collective on plain memory, no framework imported.

Rank 0 prints one line per size: `bench-row`, bytes, iterations, and median and 90th percentile in
seconds. With `--write`, these are the times of the fastest algorithm, and a file gets the rules
that choose it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from farandole._native import engine
from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
CHOICE: Final = "FARANDOLE_ALLREDUCE_ALGORITHM"
FEW_STEPS: Final = ("direct", "doubling")
"""Algorithms for small tensors."""
SMALL: Final = 1 << 20
"""Bytes up to which these are tried."""
CLEARLY: Final = 1.05
"""Another algorithm is chosen if it is so many times faster: less may be chance."""


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
        size: Bytes of the whole tensor: what every rank ends with, or for reduce-scatter and
            all-to-all begins with.
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
                return engine.allreduce(
                    name, number, (whole,), source, target, SUM, 1.0, 1.0, GLOBAL, True
                )
            case "broadcast":
                return engine.broadcast(name, number, (whole,), source, source, 0, GLOBAL, True)
            case "allgather":
                return engine.allgather(name, number, (part,), source, GLOBAL, True)
            case "alltoall":
                return engine.alltoall(name, number, (whole,), source, None, GLOBAL, True)
            case _:
                return engine.reducescatter(
                    name, number, (whole,), source, target, SUM, 1.0, 1.0, GLOBAL, True
                )

    return submit, whole * each


def turn(submit: Callable[[], int], count: int) -> list[float]:
    """Returns the seconds of each of `count` operations."""
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
    engine.wait(
        engine.broadcast("bench.agree", 8, (1,), memory.address, memory.address, 0, GLOBAL, True)
    )
    return value.value


class Row(NamedTuple):
    """The measurement at one size."""

    size: int
    iterations: int
    middle: float
    """Seconds."""
    late: float
    """Seconds; a tenth took longer."""

    def show(self) -> None:
        """Prints it for the command."""
        sys.stdout.write(
            f"bench-row {self.size} {self.iterations} {self.middle:.9f} {self.late:.9f}\n"
        )
        sys.stdout.flush()


def timed(operation: str, dtype: str, iterations: int, size: int) -> Row:
    """Times the operation at one size.

    Args:
        operation: Its name.
        dtype: Name of the element type.
        iterations: Number of operations; 0 for as many as fit into a second.
        size: Bytes of the whole tensor.
    """
    submit, real = calls(operation, dtype, size, engine.world().size)
    warm = turn(submit, 3)
    count = iterations or min(MOST, max(5, int(LONGEST / max(agreed(min(warm)), 1e-6))))
    engine.wait(engine.barrier("bench.start", GLOBAL))
    times = sorted(turn(submit, count))
    return Row(
        real, count, times[len(times) // 2], times[min(len(times) - 1, len(times) * 9 // 10)]
    )


def rules(times: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> str:
    """Returns the rules that choose the fastest algorithm.

    Tensors above the largest size get no algorithm for small tensors.

    Args:
        times: By algorithm and size; an algorithm need not have all sizes.
        sizes: Sizes in ascending order.
    """
    chosen: list[tuple[str, int]] = []
    for size in sizes:
        here = {
            algorithm: of_sizes[size] for algorithm, of_sizes in times.items() if size in of_sizes
        }
        best = min(here, key=lambda algorithm: here[algorithm])
        if chosen:
            before = chosen[-1][0]
            if here.get(before, float("inf")) <= CLEARLY * here[best]:
                best = before
                chosen.pop()
        chosen.append((best, size))
    texts = [f"{algorithm}:{size}" for algorithm, size in chosen]
    last = chosen[-1][0]
    if last not in FEW_STEPS:
        texts[-1] = last
    return ",".join(texts)


def write(path: Path, shape: str, found: str) -> None:
    """Puts the rules of a shape into a file, in place of those that it has.

    Args:
        path: The file; it need not exist.
        shape: Hosts and ranks of each, such as `2x4`.
        found: The rules.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if line.partition("=")[0].strip() != shape]
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text("\n".join([*kept, f"{shape}={found}", ""]))
    draft.replace(path)


def compare(dtype: str, iterations: int, sizes: Sequence[int], path: Path) -> None:
    """Times all algorithms of an allreduce and writes the rules that choose the fastest.

    Args:
        dtype: Name of the element type.
        iterations: Number of operations of each size; 0 for as many as fit into a second.
        sizes: Bytes of the tensors.
        path: The file of rules.

    Raises:
        SystemExit: If there is one rank, or hosts have different numbers of ranks.
    """
    basics.init()
    world = engine.world()
    rank, hosts, each = world.rank, world.cross_size, world.local_size
    fits = world.size > 1 and world.is_homogeneous
    basics.shutdown()
    if not fits:
        raise SystemExit("--write needs several ranks, the same number on each host")
    across = [
        name
        for name, fits in (("hierarchy", hosts > 1 and each > 1), ("halving", hosts > 1))
        if fits
    ]
    names = [*FEW_STEPS, "pipeline", *across]
    rows: dict[str, dict[int, Row]] = {}
    for name in names:
        os.environ[CHOICE] = name
        basics.init()
        fitting = [size for size in sizes if name not in FEW_STEPS or size <= SMALL]
        rows[name] = {size: timed("allreduce", dtype, iterations, size) for size in fitting}
        basics.shutdown()
    if rank > 0:
        return
    times = {
        name: {size: row.middle for size, row in of_sizes.items()}
        for name, of_sizes in rows.items()
    }
    for size in sizes:
        here = {name: of_sizes[size] for name, of_sizes in rows.items() if size in of_sizes}
        told = ", ".join(f"{name} {row.middle * 1e6:.1f} us" for name, row in here.items())
        sys.stderr.write(f"{size} bytes: {told}\n")
        min(here.values(), key=lambda row: row.middle).show()
    found = rules(times, sizes)
    write(path, f"{hosts}x{each}", found)
    sys.stderr.write(f"{path}: {hosts}x{each}={found}\n")


def main() -> None:
    """Times the operation at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation")
    parser.add_argument("dtype", choices=sorted(DTYPES))
    parser.add_argument("iterations", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is not None:
        compare(
            arguments.dtype, arguments.iterations, sorted(set(arguments.sizes)), arguments.write
        )
        return
    basics.init()
    for size in arguments.sizes:
        row = timed(arguments.operation, arguments.dtype, arguments.iterations, size)
        if engine.world().rank == 0:
            row.show()
    basics.shutdown()


if __name__ == "__main__":
    main()
