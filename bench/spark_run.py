# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A trivial function on two tasks of a Spark session that is up, next to TorchDistributor in the
same run.

    python bench/spark_run.py [--repeat 5] [--skip-peer]

Prints medians in seconds: `farandole.spark.run`, the same with torch imported in the function, cold
and warm, `TorchDistributor.run` where pyspark has it, and the floors: a bare barrier job, two
`import torch` at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import torch  # what a driver that trains has
from pyspark.sql import SparkSession
from saved import save

import farandole.spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

assert torch is not None


def seconds(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """The first time, and the median of those that follow."""
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


rows: dict[str, dict[str, float]] = {}
"""Seconds."""


def row(name: str, found: tuple[float, float]) -> None:
    rows[name] = {"first": found[0], "median": found[1]}
    print(f"{name:<44} {found[0]:>8.2f} {found[1]:>8.2f}", flush=True)


def imports() -> None:
    both = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
    for one in both:
        one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--skip-peer", action="store_true", help="leave TorchDistributor out")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable

    with tempfile.TemporaryDirectory() as folder:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", folder)
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")

        def bare(batches: Iterator[object]) -> Iterator[object]:
            yield from batches

        def nothing() -> None:
            return None

        def with_torch() -> int:
            import torch  # noqa: PLC0415 - in the worker

            return torch.get_num_threads()

        tasks = spark.range(0, 2, 1, 2)
        print(f"{'seconds':<44} {'first':>8} {'median':>8}")
        row(
            "bare barrier job",
            seconds(tasks.mapInArrow(bare, "id long", barrier=True).collect, options.repeat),
        )
        row("two `import torch` at once", seconds(imports, 2))
        row(
            "farandole.spark.run",
            seconds(lambda: farandole.spark.run(nothing, num_proc=2, warm=False), options.repeat),
        )
        cold = seconds(lambda: farandole.spark.run(with_torch, num_proc=2, warm=False), 2)
        row("farandole.spark.run, imports torch", cold)
        warm = seconds(
            lambda: farandole.spark.run(with_torch, num_proc=2, warm=True), options.repeat
        )
        row("farandole.spark.run, imports torch, warm", warm)
        if not options.skip_peer:
            from pyspark.ml.torch.distributor import TorchDistributor  # noqa: PLC0415 - heavy, and may be left out

            def peer() -> None:
                TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(nothing)

            def peer_on_tasks() -> None:
                TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(nothing)

            row("TorchDistributor, local mode", seconds(peer, 2))
            row("TorchDistributor, Spark tasks", seconds(peer_on_tasks, 2))
        spark.stop()
    save("spark_run", {"rows": rows})


if __name__ == "__main__":
    main()
