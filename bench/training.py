# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A training step of a model with many tensors, and bursts of asynchronous allreduces, next to DDP
and Gloo.

Contestants take turns in the same processes, so that all see the same machine. Every step computes
the loss, its gradients, reduces them and updates: `alone` without reducing, `farandole` by
DistributedOptimizer, `ddp` by DistributedDataParallel over Gloo, and both again with gradients that
are views of their buckets.

    python bench/training.py [--ranks 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, BATCH = 160, 400, 8
"""160 layers of 400 x 400 and their biases: 25.7 M parameters in 320 tensors, about 45 ms a step
on one core.
"""
STEPS = 10
"""Steps of one turn; one more comes before they count."""
BURST, BURST_BYTES = 100, 64 << 10
LARGE = 64 << 20


def turn(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls after one that does not count."""
    times = []
    for index in range(count + 1):
        start = time.perf_counter()
        call()
        if index:
            times.append(time.perf_counter() - start)
    return times


def measure(rounds: int) -> None:
    """One rank; rank 0 prints one line of JSON per row."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    import farandole.torch as hvd  # noqa: PLC0415
    from farandole._native import engine  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.manual_seed(0)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def model() -> torch.nn.Module:
        layers = [
            layer
            for _ in range(LAYERS)
            for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
        ]
        return torch.nn.Sequential(*layers)

    def step_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()

        return step

    def plain(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.001)

    def reducing(module: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(
            plain(module), named_parameters=module.named_parameters(), **options
        )

    alone, ours, viewed = model(), model(), model()
    ddp, ddp_viewed = (
        DistributedDataParallel(model()),
        DistributedDataParallel(model(), gradient_as_bucket_view=True),
    )
    report(
        {
            "training step": {
                "alone": step_of(alone, plain(alone)),
                "farandole": step_of(ours, reducing(ours)),
                "ddp": step_of(ddp, plain(ddp)),
            },
            "training step, bucket views": {
                "alone": step_of(alone, plain(alone)),
                "farandole": step_of(viewed, reducing(viewed, gradient_as_bucket_view=True)),
                "ddp": step_of(ddp_viewed, plain(ddp_viewed)),
            },
        },
        rounds,
        STEPS,
    )

    tensors = [torch.ones(BURST_BYTES // 4) for _ in range(BURST)]

    def our_burst() -> None:
        for handle in [
            hvd.allreduce_async_(t, name=f"burst.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
        ]:
            hvd.synchronize(handle)

    def gloo_burst() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    burst = {"farandole": our_burst, "gloo": gloo_burst}
    report({"100 asynchronous allreduces of 64 KiB": burst}, rounds, STEPS * 2)
    # The memory of bucket views, in which the ranks of a host reduce each other's numbers.
    shared = torch.frombuffer(engine.allocate_shared_memory(LARGE), dtype=torch.float32)
    private, other = torch.ones(LARGE // 4), torch.ones(LARGE // 4)
    large = {
        "farandole": lambda: hvd.allreduce_(private, name="private", op=hvd.Average),
        "shared": lambda: hvd.allreduce_(shared, name="shared", op=hvd.Average),
        "gloo": lambda: dist.all_reduce(other),
    }
    report({"allreduce of 64 MiB": large}, rounds, STEPS // 2)
    dist.destroy_process_group()
    hvd.shutdown()


def report(tables: dict[str, dict[str, Callable[[], object]]], rounds: int, count: int) -> None:
    """Measures the contestants of all tables turn by turn."""
    import farandole.torch as hvd  # noqa: PLC0415

    times: dict[tuple[str, str], list[float]] = {
        (what, name): [] for what in tables for name in tables[what]
    }
    for _ in range(rounds):
        for (what, name), taken in times.items():
            hvd.barrier()
            taken.extend(turn(tables[what][name], count))
    for what, calls in tables.items():
        if hvd.rank() == 0:
            medians = {name: statistics.median(times[what, name]) * 1e3 for name in calls}
            print(
                json.dumps({"what": what, "ranks": hvd.size(), "milliseconds": medians}), flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="size of the world")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.rounds)
        return
    command = [sys.executable, "-m", "farandole", "run", "-np", str(arguments.ranks)]
    command += [sys.executable, __file__, "--worker", "--rounds", str(arguments.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    rows = []
    for line in result.stdout.splitlines():
        # The launcher puts the rank before every line.
        _, brace, rest = line.partition("{")
        if not brace:
            continue
        row = json.loads(brace + rest)
        rows.append(row)
        *_, (peer, theirs) = row["milliseconds"].items()
        print(
            f"\n{row['what']}, {row['ranks']} ranks on {os.cpu_count()} cores (median milliseconds)"
        )
        for name, milliseconds in row["milliseconds"].items():
            print(f"{name:>14} {milliseconds:>9.2f}  {milliseconds / theirs:.3f} x {peer}")
    save("training", {"rows": rows})


if __name__ == "__main__":
    main()
