# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cost of metrics: steps with and without them, alternately in the same processes.

    python bench/metrics.py [--ranks 2] [--blocks 60] [--seconds 2.5]

Each rank trains a network of PyTorch in blocks. In every second block the optimizer measures its
steps and a thread reports to the driver every two seconds, as in a job with `--metrics`. Prints the
median step without and with metrics, the time of the hooks in one step and of one report, and the
share of a step that both together take: the bound is 0.5 %.
"""

# ruff: noqa: PLC0415 - each rank loads what it needs

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
from saved import save

import farandole

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 512
LAYERS = 24
BATCH = 128
REPEATS = 20_000
MAX_SHARE = 0.005

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_training_step() -> Callable[[], None]:
    """Returns a step of a network with two tensors in each layer."""
    import torch

    import farandole.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    rows = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    return step


class Reports:
    """The thread of reports of a rank, which a block can stop."""

    def __init__(self) -> None:
        from farandole.common.rank_progress import OWN_PROGRESS
        from farandole.runner.load_reports import LoadSampler

        self.progress, self.load = OWN_PROGRESS, LoadSampler()
        self.processor_seconds: list[float] = []

    def report(self) -> None:
        """Sends one report to the driver."""
        import json

        from farandole._native import launcher

        began = time.thread_time()
        record = {"load": self.load.sample_load()} | self.progress.take_report()
        launcher.report_record("rank", json.dumps(record).encode())
        self.processor_seconds.append(time.thread_time() - began)

    def start(self, interval: float) -> Callable[[], None]:
        """Starts the thread; returns a function that ends it."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(interval):
                self.report()

        thread = threading.Thread(target=run)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return end


def measure(blocks: int, seconds: float) -> dict[str, float]:
    """Medians of this rank in seconds."""
    import farandole.numpy as hvd
    from farandole.runner.load_reports import REPORT_INTERVAL

    hvd.init()
    step, reports = make_training_step(), Reports()
    for _ in range(5):
        step()
    began = time.perf_counter()
    step()
    # The same number on all ranks.
    steps = int(hvd.broadcast_object(max(2, int(seconds / (time.perf_counter() - began)))))
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(2 * blocks):
        is_measured = block % 2 == 1
        reports.progress.measures_steps = is_measured
        end = reports.start(REPORT_INTERVAL) if is_measured else lambda: None
        hvd.barrier()
        step()
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times[is_measured].append(time.perf_counter() - began)
        hvd.barrier()
        end()
    began = time.perf_counter()
    for _ in range(REPEATS):
        with reports.progress.measure_reduction():
            pass
        reports.progress.end_step()
    hooks = (time.perf_counter() - began) / REPEATS
    without = statistics.median(times[0])
    report = statistics.median(reports.processor_seconds)
    return {
        "without": without,
        "with": statistics.median(times[1]),
        "without_mean": statistics.mean(times[0]),
        "with_mean": statistics.mean(times[1]),
        "hooks": hooks,
        "report": report,
        "share": hooks / without + report / REPORT_INTERVAL,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=2.5)
    given = parser.parse_args()
    found = farandole.run(measure, (given.blocks, given.seconds), num_proc=given.ranks)
    slowest = max(found, key=lambda one: one["share"])
    row: dict[str, Any] = {
        "ranks": given.ranks,
        "without_ms": 1e3 * slowest["without"],
        "with_ms": 1e3 * slowest["with"],
        "ratio": slowest["with"] / slowest["without"],
        "ratio_of_means": slowest["with_mean"] / slowest["without_mean"],
        "hooks_us": 1e6 * slowest["hooks"],
        "report_us": 1e6 * slowest["report"],
        "share": slowest["share"],
    }
    print(", ".join(f"{name} {value:,.5g}" for name, value in row.items()), flush=True)
    save("metrics", {"metrics": row})
    if row["share"] > MAX_SHARE:
        raise SystemExit(f"metrics take {row['share']:.2%} of a step, more than {MAX_SHARE:.1%}")


if __name__ == "__main__":
    main()
