# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training steps whose gradients need longer on the network than the backward pass: with
`DistributedOptimizer.overlap_forward` and without, in turns in the same processes.

The ranks are on hosts that are network namespaces, shaped by `tc tbf`. As in VGG, the first layers
have most of the work and the last ones most of the parameters. With `--sleep`, the first layers
sleep for as many milliseconds in a forward pass, and twice in a backward pass: so the processor is
free meanwhile, as if a GPU computed. Writes bench/results/forward_overlap.json.

    bench/forward_overlap.sh [--hosts 2] [--rate 2gbit] [--rounds 5] [--steps 4] [--sleep 160]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from typing import Any

from netns import bridge, run_ranks, run_world
from saved import save

WIDTH, LAYERS, ROWS = 512, 8, 2048
"""Width and number of the first layers; rows of a batch."""
POOLED_ROWS, DENSE_WIDTH = 64, 24_576
"""Rows and width of the last layers: 25 M parameters."""
SLEEPING_ROWS, SLEEPING_POOLED_ROWS = 64, 8
"""The same rows with `--sleep`."""


def make_sleeping_layer(seconds: float) -> Any:
    """Returns a module that sleeps, in a backward pass twice as long as in a forward pass."""
    import torch  # noqa: PLC0415 - only ranks need it

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, rows: Any) -> Any:
            time.sleep(seconds)
            return rows.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            time.sleep(2 * seconds)
            return gradient

    class SleepingLayer(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            return Sleep.apply(rows)

    return SleepingLayer()


def make_model(sleep: float) -> Any:
    """Returns a network with its work in the first layers and its parameters in the last ones.

    Args:
        sleep: Milliseconds that the first layers sleep in a forward pass; 0 if they compute.
    """
    import torch  # noqa: PLC0415 - only ranks need it

    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        if sleep:
            layers.append(make_sleeping_layer(sleep / LAYERS / 1e3))
    rows, pooled = (SLEEPING_ROWS, SLEEPING_POOLED_ROWS) if sleep else (ROWS, POOLED_ROWS)
    # Neighbouring rows are averaged, as pooling reduces the pixels of an image.
    pooling = [
        torch.nn.Unflatten(0, (pooled, rows // pooled)),
        torch.nn.AdaptiveAvgPool2d((1, WIDTH)),
        torch.nn.Flatten(1),
    ]
    dense = [torch.nn.Linear(WIDTH, DENSE_WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, *pooling, *dense, torch.nn.Linear(DENSE_WIDTH, WIDTH))


def time_step(trainer: tuple[Any, Any], rows: Any, steps: int) -> float:
    """Trains; returns the seconds of a step, until all parameters are there on all ranks."""
    import farandole.torch as hvd  # noqa: PLC0415 - only ranks need it

    model, optimizer = trainer
    hvd.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    if hasattr(optimizer, "wait_for_parameters"):
        optimizer.wait_for_parameters()
    hvd.barrier()
    return (time.perf_counter() - began) / steps


def measure(arguments: argparse.Namespace) -> None:
    """One rank: measures steps; rank 0 prints a line of JSON."""
    import torch  # noqa: PLC0415 - only ranks need it

    import farandole.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    hvd.init()
    count = SLEEPING_ROWS if arguments.sleep else ROWS
    rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))
    trainers: dict[str, tuple[Any, Any]] = {}
    for way in ("waits", "overlaps", "alone"):
        model = make_model(arguments.sleep)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if way != "alone":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if way == "overlaps":
            optimizer.overlap_forward(model)
        trainers[way] = model, optimizer

    times: dict[str, list[float]] = {way: [] for way in trainers}
    for trainer in trainers.values():
        time_step(trainer, rows, 2)
    for _ in range(arguments.rounds):
        for way, taken in times.items():
            taken.append(time_step(trainers[way], rows, arguments.steps))
    states = [list(trainers[way][0].parameters()) for way in ("waits", "overlaps")]
    if not all(map(torch.equal, *states)):
        sys.exit("forward_overlap: the parameters differ")
    if hvd.rank() == 0:
        medians = {way: statistics.median(taken) for way, taken in times.items()}
        print(json.dumps(medians), flush=True)
    hvd.shutdown()


def shared_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options for the processes of hosts and ranks."""
    names = ("rate", "rounds", "steps", "sleep")
    return [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]


def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Trains in a world of hosts and returns the median seconds of a step in each way."""
    found: dict[str, float] = {}
    for line in run_world(arguments.hosts, shared_options(arguments), script=__file__):
        if line.startswith("{"):
            found = json.loads(line)
        else:
            print(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="hosts of one rank each")
    parser.add_argument("--rate", default="2gbit", help="what tc shapes each host to; 0: nothing")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument(
        "--sleep", type=float, default=0, help="milliseconds of the first layers; 0: they compute"
    )
    parser.add_argument("--keep", action="store_true", help="print only, and write no file")
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments)
        return
    if arguments.agent is not None:
        worker = [__file__, "--worker", *shared_options(arguments)]
        run_ranks(int(arguments.agent), arguments.rate, worker)
        return
    # The first process of a namespace ignores what it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("forward_overlap: ended by SIGTERM"))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    bridge()
    found = run(arguments)
    ratio = found["overlaps"] / found["waits"]
    print(
        f"{arguments.hosts} hosts, {arguments.rate}: a step takes {found['waits'] * 1e3:.0f} ms, "
        f"{found['overlaps'] * 1e3:.0f} ms with overlap_forward ({ratio:.2f}), "
        f"{found['alone'] * 1e3:.0f} ms without reductions"
    )
    if not arguments.keep:
        options = {"hosts": arguments.hosts, "rate": arguments.rate, "sleep": arguments.sleep}
        save("forward_overlap", {**options, **found}, began=began)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("forward_overlap: interrupted")
