# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Cost of the timeline of all ranks: steps with it and without it, alternately in the same
processes.

    python bench/timeline.py [--ranks 2] [--blocks 40] [--steps 15]

Each rank trains a network of PyTorch and marks its phases, as estimators do. Prints the median step
without and with a timeline, and bytes of the timeline for each step of a rank. `small` is the worst
case: nothing but small sums.
"""

# ruff: noqa: PLC0415 - each rank loads what it needs

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from saved import save

import farandole

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 512
LAYERS = 24
BATCH = 128
SUMS = 100

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def training() -> Callable[[], None]:
    """A step of a network with two tensors in each layer."""
    import torch

    import farandole.torch as hvd
    from farandole.common.timeline import phase

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
        with phase("step"):
            optimizer.zero_grad()
            with phase("forward"):
                loss = model(rows).square().mean()
            with phase("backward"):
                loss.backward()
            with phase("reduce"):
                optimizer.step()

    return step


def small() -> Callable[[], None]:
    """A step of small sums, one after the other."""
    import numpy as np

    import farandole.numpy as hvd

    value = np.ones(8)

    def step() -> None:
        for number in range(SUMS):
            hvd.allreduce(value, name=f"value {number}")

    return step


KINDS = {"training": training, "small": small}


def measure(
    kind: str, blocks: int, steps: int, folder: str
) -> tuple[list[float], list[float], float]:
    """Seconds of each step on this rank without and with a timeline, and bytes for a step."""
    import farandole.numpy as hvd
    from farandole.common.timeline import start_timeline, stop_timeline

    hvd.init()
    step = KINDS[kind]()
    for _ in range(5):
        step()
    times: tuple[list[float], list[float]] = ([], [])
    path = Path(folder, f"{hvd.rank()}.json")
    size = 0
    for block in range(2 * blocks):
        traced = block % 2 == 1
        if traced:
            start_timeline(str(Path(folder, "{rank}.json")))
        hvd.barrier()
        step()
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times[traced].append(time.perf_counter() - began)
        hvd.barrier()
        if traced:
            stop_timeline()
            size += path.stat().st_size
    return times[0], times[1], size / blocks / (steps + 1)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            told = farandole.run(
                measure, (kind, given.blocks, given.steps, folder), num_proc=given.ranks
            )
        without, traced, size = told[0]
        medians = statistics.median(without), statistics.median(traced)
        rows[kind] = {
            "ranks": given.ranks,
            "steps": len(without),
            "without_ms": 1000 * medians[0],
            "with_ms": 1000 * medians[1],
            "share": medians[1] / medians[0] - 1,
            "share_of_means": sum(traced) / sum(without) - 1,
            "bytes_per_step": size,
        }
        print(
            kind,
            ", ".join(f"{name} {value:,.4g}" for name, value in rows[kind].items()),
            flush=True,
        )
    save("timeline", rows)


if __name__ == "__main__":
    main()
