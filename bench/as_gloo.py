# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Steps of a program that asks for Gloo, on Gloo and with `FARANDOLE_AS_GLOO=1`: training by DDP
and FSDP 2, and the forward pass of a tensor-parallel model.

The two engines take turns, each in processes of its own, which torchrun starts.

    python bench/as_gloo.py [--ranks 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from saved import save

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, BATCH = 16, 512, 8
"""16 layers of 512 x 512 and their biases: 4.2 M parameters."""
STEPS = 20
"""Steps of one turn; one more comes before they count."""
ENGINES = {"gloo": "0", "farandole": "1"}
"""The value of `FARANDOLE_AS_GLOO` for each."""


def measure() -> None:
    """One rank; rank 0 prints the milliseconds of each step as JSON."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.randn(BATCH, WIDTH)

    def make_model() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(model: Any) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

        return step

    sharded = make_model()
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
    plan = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(LAYERS)}
    parallel = parallelize_module(make_model(), mesh, plan)
    steps = {
        "DDP": training_step(DistributedDataParallel(make_model())),
        "FSDP 2": training_step(sharded),
        "tensor-parallel forward": torch.no_grad()(lambda: parallel(rows).sum().item()),
    }
    found = {}
    for name, step in steps.items():
        times = []
        for _ in range(STEPS + 1):
            dist.barrier()
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        found[name] = times[1:]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="size of the world")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure()
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={arguments.ranks}", __file__, "--worker"]
    times: dict[str, dict[str, list[float]]] = {engine: {} for engine in ENGINES}
    for _ in range(arguments.rounds):
        for engine, value in ENGINES.items():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "FARANDOLE_AS_GLOO": value}
            result = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env=environment, check=True
            )
            for name, taken in json.loads(result.stdout).items():
                times[engine].setdefault(name, []).extend(taken)
    rows = []
    print(f"median milliseconds of a step, {arguments.ranks} ranks on {os.cpu_count()} cores")
    for name in times["gloo"]:
        medians = {engine: statistics.median(times[engine][name]) for engine in ENGINES}
        ratio = medians["farandole"] / medians["gloo"]
        rows.append({"what": name, "ranks": arguments.ranks, "milliseconds": medians})
        print(
            f"{name:>24}: {medians['farandole']:8.2f}, Gloo {medians['gloo']:8.2f}, {ratio:.2f} x"
        )
    save("as_gloo", {"rows": rows})


if __name__ == "__main__":
    main()
