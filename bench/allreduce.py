# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Allreduce from 4 B to 64 MiB through farandole.torch, next to torch.distributed's Gloo in the
same processes.

Rows alternate between the two, so that both see the same machine. Prints min, p50, p99 and max in
microseconds, the bandwidth at the median and the ratio of medians, and writes everything to
bench/results/allreduce.json. Where mpi4py and `mpirun` are installed, the same sizes follow through
MPI's own Allreduce of NumPy arrays, in processes of its own.

    python bench/allreduce.py [--ranks 2 4] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = [4, 1 << 10, 64 << 10, 256 << 10, 4 << 20, 64 << 20]
"""Bytes of one tensor of float32."""
ROUNDS = 5
"""Turns of each library per size."""
OVERHEAD = 20
"""Calls before a turn counts."""


def turn(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    for _ in range(min(OVERHEAD, count)):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """The row of one library, in microseconds."""
    ordered = sorted(time * 1e6 for time in times)
    return {
        "min": ordered[0],
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max": ordered[-1],
        "count": len(ordered),
    }


def measure(seconds: float) -> None:
    """One rank: measures every size; rank 0 prints one line of JSON per size."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415

    import farandole.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for size in SIZES:
        tensor = torch.ones(size // 4)
        name = f"bench.{size}"
        calls: dict[str, Callable[[], object]] = {
            "farandole": lambda tensor=tensor, name=name: hvd.allreduce_(
                tensor, name=name, op=hvd.Sum
            ),
            "gloo": lambda tensor=tensor: dist.all_reduce(tensor),
        }
        times: dict[str, list[float]] = {library: [] for library in calls}
        for library, call in calls.items():
            # Ranks must agree on the number of calls: rank 0 decides by what one call takes.
            once = hvd.broadcast_object(statistics.median(turn(call, 3)))
            count = max(3, min(2000, int(seconds / ROUNDS / max(once, 1e-6))))
            times[library].append(count)
        counts = {library: int(values.pop()) for library, values in times.items()}
        for _ in range(ROUNDS):
            for library, call in calls.items():
                tensor.fill_(1.0)
                hvd.barrier()
                times[library] += turn(call, counts[library])
        if hvd.rank() == 0:
            print(
                json.dumps(
                    {
                        "bytes": size,
                        **{library: summary(values) for library, values in times.items()},
                    }
                ),
                flush=True,
            )
    dist.destroy_process_group()
    hvd.shutdown()


def measure_mpi(seconds: float) -> None:
    """One rank of MPI, as `measure`."""
    import numpy as np  # noqa: PLC0415 - only ranks need it
    from mpi4py import MPI  # noqa: PLC0415 - may be missing

    world = MPI.COMM_WORLD
    for size in SIZES:
        array = np.ones(size // 4, np.float32)

        def call(array: np.ndarray = array) -> None:
            world.Allreduce(MPI.IN_PLACE, array)

        once = world.bcast(statistics.median(turn(call, 3)))
        count = max(3, min(2000, int(seconds / ROUNDS / max(once, 1e-6))))
        times: list[float] = []
        for _ in range(ROUNDS):
            array.fill(1.0)
            world.Barrier()
            times += turn(call, count)
        if world.Get_rank() == 0:
            print(json.dumps({"bytes": size, "mpi": summary(times)}), flush=True)


def run_mpi(ranks: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    """The rows of MPI, by size; none where it is not installed."""
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        print("MPI: not measured, needs mpi4py and mpirun")
        return []
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]
    command += [sys.executable, __file__, "--mpi-worker", "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def human(size: int) -> str:
    """A size in the largest unit that divides it."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def run(ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Measures in a world of `ranks` and prints the table."""
    command = [sys.executable, "-m", "farandole", "run", "-np", str(ranks)]
    command += [sys.executable, __file__, "--worker", "--seconds", str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rows: list[dict[str, Any]] = []
    print(f"\nallreduce of float32, {ranks} ranks on {os.cpu_count()} cores (microseconds)")
    columns = (
        f"{'size':>8}  {'library':<9} {'calls':>6} {'min':>9} {'p50':>9} {'p99':>9} {'max':>9} "
        f"{'GB/s':>7}  ratio"
    )
    print(columns)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # The launcher puts the rank before every line.
            _, brace, rest = line.partition("{")
            if not brace:
                print(line, end="")
                continue
            row = json.loads(brace + rest)
            rows.append({"ranks": ranks, **row})
            ratio = row["farandole"]["p50"] / row["gloo"]["p50"]
            for library in ("farandole", "gloo"):
                times = row[library]
                bandwidth = row["bytes"] / times["p50"] / 1e3
                numbers = " ".join(f"{times[key]:>9.1f}" for key in ("min", "p50", "p99", "max"))
                tail = f"  {ratio:.3f} x gloo" if library == "farandole" else ""
                print(
                    f"{human(row['bytes']):>8}  {library:<9} {times['count']:>6} {numbers} "
                    f"{bandwidth:>7.2f}{tail}"
                )
    if process.returncode != 0:
        sys.exit(f"ranks failed with exit code {process.returncode}")
    for row, peer in zip(rows, run_mpi(ranks, seconds), strict=False):
        row["mpi"] = peer["mpi"]
        theirs, ours = peer["mpi"]["p50"], row["farandole"]["p50"]
        print(f"{human(row['bytes']):>8}  mpi {theirs:>9.1f} p50  {ours / theirs:.2f} x mpi")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the world")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time for each library at each size"
    )
    for own in ("--worker", "--mpi-worker"):
        parser.add_argument(own, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker or arguments.mpi_worker:
        (measure if arguments.worker else measure_mpi)(arguments.seconds)
        return
    rows = [row for ranks in arguments.ranks for row in run(ranks, arguments.seconds)]
    save("allreduce", {"rows": rows})


if __name__ == "__main__":
    main()
