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

from farandole import _variables as variables
from farandole._native import engine
from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DTYPE_CODES: Final = {
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
SUM_OPERATION: Final = 1
GLOBAL_PROCESS_SET: Final = 0
SECONDS_PER_SIZE: Final = 1.0
"""Seconds of the measurement at one size, if no number of iterations is given."""
MAX_ITERATIONS: Final = 2000
ALGORITHM_VARIABLE: Final = variables.ALLREDUCE_ALGORITHM
SMALL_TENSOR_ALGORITHMS: Final = ("direct", "doubling")
"""Algorithms for small tensors."""
SMALL_TENSOR_BYTES: Final = 1 << 20
"""Largest size, in bytes, at which the algorithms for small tensors are tried."""
MIN_SPEEDUP: Final = 1.05
"""Least ratio of times for which another algorithm is chosen: a smaller one may be noise."""


class BenchBuffer:
    """Zeroed memory with a fixed address."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, max(size, 1))
        self._anchor = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self._anchor)


def make_submitter(
    operation: str, dtype: str, size: int, ranks: int
) -> tuple[Callable[[], int], int]:
    """Returns a function that submits the operation once, and the number of bytes of the operation.

    Args:
        operation: Its name.
        dtype: Name of the element type.
        size: Bytes of the whole tensor: the result of each rank, or for reduce-scatter and
            all-to-all the input.
        ranks: Number of ranks.
    """
    number, each = DTYPE_CODES[dtype]
    whole = max(1, size // each)
    if operation in ("allgather", "reducescatter", "alltoall"):
        whole = max(1, whole // ranks) * ranks
    part = whole // ranks
    given, taken = BenchBuffer(whole * each), BenchBuffer(whole * each)

    def submit_operation() -> int:
        # The closure keeps both buffers alive.
        source, target = given.address, taken.address
        name = f"bench.{operation}.{size}"
        match operation:
            case "broadcast":
                return engine.broadcast(
                    name, number, (whole,), source, source, 0, GLOBAL_PROCESS_SET, True
                )
            case "allgather":
                return engine.allgather(name, number, (part,), source, GLOBAL_PROCESS_SET, True)
            case "alltoall":
                return engine.alltoall(
                    name, number, (whole,), source, None, GLOBAL_PROCESS_SET, True
                )
            case _:
                reduce = engine.allreduce if operation == "allreduce" else engine.reducescatter
                tensor = (name, number, (whole,), source, target)
                return reduce(*tensor, SUM_OPERATION, 1.0, 1.0, GLOBAL_PROCESS_SET, True)

    return submit_operation, whole * each


def time_operations(submit: Callable[[], int], count: int) -> list[float]:
    """Returns the seconds of each of `count` operations."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        engine.wait(submit())
        times.append(time.perf_counter() - start)
    return times


def broadcast_from_rank_zero(seconds: float) -> float:
    """Returns the value of rank 0 on every rank."""
    memory = BenchBuffer(8)
    value = ctypes.c_double.from_address(memory.address)
    value.value = seconds
    engine.wait(
        engine.broadcast(
            "bench.agree", 8, (1,), memory.address, memory.address, 0, GLOBAL_PROCESS_SET, True
        )
    )
    return value.value


class BenchRow(NamedTuple):
    """The measurement at one size."""

    size: int
    iterations: int
    median_seconds: float
    """Seconds."""
    p90_seconds: float
    """90th percentile, in seconds."""

    def print_row(self) -> None:
        """Prints the row for the command."""
        sys.stdout.write(
            f"bench-row {self.size} {self.iterations} {self.median_seconds:.9f} "
            f"{self.p90_seconds:.9f}\n"
        )
        sys.stdout.flush()


def measure_operation_at_size(operation: str, dtype: str, iterations: int, size: int) -> BenchRow:
    """Times the operation at one size.

    Args:
        operation: Its name.
        dtype: Name of the element type.
        iterations: Number of operations; 0 for as many as fit into a second.
        size: Bytes of the whole tensor.
    """
    submit, real = make_submitter(operation, dtype, size, engine.world().size)
    warm = time_operations(submit, 3)
    count = iterations or min(
        MAX_ITERATIONS,
        max(5, int(SECONDS_PER_SIZE / max(broadcast_from_rank_zero(min(warm)), 1e-6))),
    )
    engine.wait(engine.barrier("bench.start", GLOBAL_PROCESS_SET))
    times = sorted(time_operations(submit, count))
    return BenchRow(
        real, count, times[len(times) // 2], times[min(len(times) - 1, len(times) * 9 // 10)]
    )


def fastest_algorithm_rules(times: Mapping[str, Mapping[int, float]], sizes: Sequence[int]) -> str:
    """Returns the rules that choose the fastest algorithm.

    Tensors above the largest size get no algorithm for small tensors.

    Args:
        times: By algorithm and size; an algorithm need not have all sizes.
        sizes: Sizes in ascending order.
    """
    chosen: list[tuple[str, int]] = []
    for size in sizes:
        seconds_by_algorithm = {
            algorithm: of_sizes[size] for algorithm, of_sizes in times.items() if size in of_sizes
        }
        best = min(seconds_by_algorithm, key=lambda algorithm: seconds_by_algorithm[algorithm])
        if chosen:
            before = chosen[-1][0]
            if (
                seconds_by_algorithm.get(before, float("inf"))
                <= MIN_SPEEDUP * seconds_by_algorithm[best]
            ):
                best = before
                chosen.pop()
        chosen.append((best, size))
    texts = [f"{algorithm}:{size}" for algorithm, size in chosen]
    last = chosen[-1][0]
    if last not in SMALL_TENSOR_ALGORITHMS:
        texts[-1] = last
    return ",".join(texts)


def write_algorithm_rules(path: Path, shape: str, found: str) -> None:
    """Writes the rules of a shape into a file, in place of its old rules for the shape.

    Args:
        path: The file; it need not exist.
        shape: Hosts and ranks of each, such as `2x4`.
        found: The rules.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    other_lines = [line for line in lines if line.partition("=")[0].strip() != shape]
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text("\n".join([*other_lines, f"{shape}={found}", ""]))
    draft.replace(path)


def compare_algorithms(dtype: str, iterations: int, sizes: Sequence[int], path: Path) -> None:
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
    names = [*SMALL_TENSOR_ALGORITHMS, "pipeline", *across]
    rows: dict[str, dict[int, BenchRow]] = {}
    for name in names:
        os.environ[ALGORITHM_VARIABLE] = name
        basics.init()
        fitting = [
            size
            for size in sizes
            if name not in SMALL_TENSOR_ALGORITHMS or size <= SMALL_TENSOR_BYTES
        ]
        rows[name] = {
            size: measure_operation_at_size("allreduce", dtype, iterations, size)
            for size in fitting
        }
        basics.shutdown()
    if rank > 0:
        return
    times = {
        name: {size: row.median_seconds for size, row in of_sizes.items()}
        for name, of_sizes in rows.items()
    }
    for size in sizes:
        rows_of_size = {name: of_sizes[size] for name, of_sizes in rows.items() if size in of_sizes}
        times_text = ", ".join(
            f"{name} {row.median_seconds * 1e6:.1f} us" for name, row in rows_of_size.items()
        )
        sys.stderr.write(f"{size} bytes: {times_text}\n")
        min(rows_of_size.values(), key=lambda row: row.median_seconds).print_row()
    found = fastest_algorithm_rules(times, sizes)
    write_algorithm_rules(path, f"{hosts}x{each}", found)
    sys.stderr.write(f"{path}: {hosts}x{each}={found}\n")


def main() -> None:
    """Times the operation at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operation")
    parser.add_argument("dtype", choices=sorted(DTYPE_CODES))
    parser.add_argument("iterations", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is not None:
        compare_algorithms(
            arguments.dtype, arguments.iterations, sorted(set(arguments.sizes)), arguments.write
        )
        return
    basics.init()
    for size in arguments.sizes:
        row = measure_operation_at_size(
            arguments.operation, arguments.dtype, arguments.iterations, size
        )
        if engine.world().rank == 0:
            row.print_row()
    basics.shutdown()


if __name__ == "__main__":
    main()
