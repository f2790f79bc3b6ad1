# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Programs of the ranks in `gpu_check.py`; they run on any device, so that they can be tested
without a GPU.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from gpu_features import features

import farandole.torch as hvd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
TYPES = [*FLOATS, *EIGHT_BITS, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool]


def settle(device: str) -> None:
    """Waits for what the device has to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def median(call: Callable[[], object], device: str, repeat: int) -> float:
    """Milliseconds of a call, until the device is done."""
    times: list[float] = []
    for _ in range(repeat):
        settle(device)
        began = time.perf_counter()
        call()
        settle(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def parts_of(dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Every rank's tensor, the same on all ranks: small numbers, of which sums are exact."""
    generator = torch.Generator().manual_seed(3)
    limit = 3 if dtype in EIGHT_BITS else 5
    return [torch.randint(0, limit, (12, 1001), generator=generator).to(dtype) for _ in range(size)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that torch can compare: it does not compare floats of eight bits."""
    return tensor.view(torch.uint8) if tensor.dtype in EIGHT_BITS else tensor


def correct(device: str, folder: Path) -> dict[str, Any]:
    """Describes the operations with wrong results."""
    del folder
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    wrong: list[str] = []

    def compare(case: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if got.device.type != device or not torch.equal(plain(got.cpu()), plain(expected)):
            wrong.append(f"{case} on rank {rank}")

    for dtype in TYPES:
        parts = parts_of(dtype, size)
        own, whole = parts[rank].to(device), torch.stack([part.double() for part in parts])
        for name, op, joined in [
            ("sum", hvd.Sum, whole.sum(0)),
            ("min", hvd.Min, whole.amin(0)),
            ("max", hvd.Max, whole.amax(0)),
        ]:
            expected = joined.clamp(max=1) if dtype is torch.bool else joined
            compare(f"{name} of {dtype}", hvd.allreduce(own, op=op), expected.to(dtype))
        compare(f"broadcast of {dtype}", hvd.broadcast(own, size - 1), parts[-1])
        uneven = [part[: index + 1] for index, part in enumerate(parts)]
        compare(f"allgather of {dtype}", hvd.allgather(own), torch.cat(parts))
        compare(
            f"uneven allgather of {dtype}",
            hvd.allgather(uneven[rank].to(device)),
            torch.cat(uneven),
        )
        pair = hvd.grouped_allgather([own, uneven[rank].to(device)])
        compare(f"allgathers of {dtype} in a group", torch.cat(pair), torch.cat(parts + uneven))
        rows = [part[rank * 12 // size : (rank + 1) * 12 // size] for part in parts]
        compare(f"alltoall of {dtype}", hvd.alltoall(own), torch.cat(rows))
        # All to the last rank but for one row, which goes to the first.
        splits = [1, *[0] * (size - 2), 11]
        rows = [part[:1] if rank == 0 else part[1 : 12 * (rank == size - 1)] for part in parts]
        received, counts = hvd.alltoall(own, splits=splits)
        compare(f"uneven alltoall of {dtype}", received, torch.cat(rows))
        if counts.tolist() != [len(part) for part in rows]:
            wrong.append(f"splits of {dtype} on rank {rank}")
        if dtype in FLOATS + EIGHT_BITS:
            mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
            compare(
                f"reducescatter of {dtype}",
                hvd.reducescatter(own, op=hvd.Sum),
                whole.sum(0).to(dtype)[mine],
            )
    hvd.shutdown()
    return {"wrong": wrong}


def speed(device: str, folder: Path) -> dict[str, Any] | None:
    """Milliseconds for 64 MiB."""
    del folder
    hvd.init()
    tensor = torch.ones(16 << 20, device=device)
    ms = median(lambda: hvd.allreduce_(tensor, name="speed", op=hvd.Max), device, 9)
    rank = hvd.rank()
    hvd.shutdown()
    return {"ms": ms} if rank == 0 else None


def engine(device: str, folder: Path) -> dict[str, Any]:
    """One rank: an allreduce of 1 MiB through the engine and by torch, and whether a kernel in
    front holds the host.
    """
    import torch.distributed as dist  # noqa: PLC0415

    hvd.init()
    tensor = torch.ones(1 << 18, device=device)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/engine", rank=0, world_size=1)
    both: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(6):
        call = lambda: hvd.allreduce_(tensor, name="engine", op=hvd.Sum)  # noqa: E731
        for name, one in (("ours", call), ("theirs", lambda: dist.all_reduce(tensor))):
            ms = median(one, device, 100)
            if turn:
                both[name].append(ms)
    ours, theirs = (statistics.median(times) for times in both.values())
    dist.destroy_process_group()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "allreduce": lambda: hvd.allreduce_(tensor, name="engine", op=hvd.Sum),
        "allgather": lambda: hvd.allgather(tensor, name="engine"),
        "alltoall": lambda: hvd.alltoall(tensor, name="engine"),
    }
    ahead, held = 0.0, dict.fromkeys(calls, 0.0)
    if device == "cuda":
        cycles = 200_000_000
        ahead = median(lambda: torch.cuda._sleep(cycles), device, 3)  # noqa: SLF001
        for name, call in calls.items():
            # The first of a kind takes memory, loads kernels and connects ranks, which may wait for
            # the GPU.
            call()
            settle(device)
            torch.cuda._sleep(cycles)  # noqa: SLF001
            began = time.perf_counter()
            call()
            held[name] = (time.perf_counter() - began) * 1e3
            settle(device)
    good = {name: torch.equal(call(), torch.ones_like(tensor)) for name, call in calls.items()}
    gathers = {name: median(calls[name], device, 100) for name in ("allgather", "alltoall")}
    hvd.shutdown()
    return {
        "ours": ours,
        "theirs": theirs,
        "ahead": ahead,
        "held": held,
        "good": good,
        "gathers": gathers,
    }


def gloo(device: str, folder: Path) -> dict[str, Any] | None:
    """The same by torch's Gloo."""
    import torch.distributed as dist  # noqa: PLC0415

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    tensor = torch.ones(16 << 20, device=device)
    ms = median(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX), device, 9)
    dist.barrier()
    dist.destroy_process_group()
    return {"ms": ms} if rank == 0 else None


def model(device: str, width: int) -> torch.nn.Module:
    """A model of convolutions; of width 64 with as many parameters as a ResNet-50."""
    torch.manual_seed(11)
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for stage in range(4):
        before, here = width << max(stage - 1, 0), width << stage
        layers += [torch.nn.Conv2d(before, here, 3, stride=2, padding=1), torch.nn.ReLU()]
        for _ in range(3):
            layers += [
                torch.nn.Conv2d(here, here, 3, padding=1),
                torch.nn.GroupNorm(8, here),
                torch.nn.ReLU(),
            ]
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width << 3, 1000)]
    return torch.nn.Sequential(*layers).to(device)


def step_of(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> Callable[[], None]:
    """One step of training on a batch."""

    def step() -> None:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    return step


def train(device: str, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step, plain and wrapped, in turns: a GPU's clocks change in a minute."""
    del folder
    hvd.init()
    width, count = (64, 32) if device == "cuda" else (8, 2)
    batch = torch.randn(count, 3, 64, 64, device=device)
    steps: dict[str, Callable[[], None]] = {}
    for name in ("plain", "wrapped"):
        network = model(device, width)
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.01)
        if name == "wrapped":
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=network.named_parameters()
            )
        steps[name] = step_of(network, optimizer, batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(6):
        for name, step in steps.items():
            ms = median(step, device, 15 if device == "cuda" else 3)
            if turn:
                times[name].append(ms)
    hvd.shutdown()
    return {name: statistics.median(each) for name, each in times.items()}


def views(device: str, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step whose gradients are views of buckets, how many of them NCCL gave, and
    what was learnt.

    The second optimizer takes the memory of the first, while the device may still be at work on it.
    """
    del folder
    from farandole._native import engine as native  # noqa: PLC0415

    torch.backends.cudnn.deterministic = True
    hvd.init()
    width, count = (64, 32) if device == "cuda" else (8, 2)
    torch.manual_seed(5)
    batch = torch.randn(count, 3, 64, 64, device=device)
    times: list[float] = []
    learnt: list[float] = []
    given = 0
    for _ in range(2):
        network = model(device, width)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.01),
            named_parameters=network.named_parameters(),
            gradient_as_bucket_view=True,
        )
        given += device == "cuda" and native.allocate_registered_memory(0, 0, 1024) is not None
        step = step_of(network, optimizer, batch)
        times.append(median(step, device, 10 if device == "cuda" else 3))
        step()
        learnt.append(
            float(
                sum(parameter.detach().double().abs().sum() for parameter in network.parameters())
            )
        )
        del network, optimizer, step
    hvd.shutdown()
    return {"ms": min(times), "given": given, "learnt": learnt}


def alike(device: str, folder: Path) -> dict[str, Any]:
    """The largest difference of parameters between two ranks' training and one rank's with all
    batches.
    """
    del folder
    # Convolutions in fewer bits would differ by more than the order of sums does.
    torch.backends.cudnn.allow_tf32 = False
    hvd.init()
    torch.manual_seed(5)
    batches = torch.randn(3, hvd.size(), 2, 3, 32, 32).to(device)
    together, alone = model(device, 8), model(device, 8)
    plain = torch.optim.SGD(alone.parameters(), lr=0.01)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.01),
        named_parameters=together.named_parameters(),
    )
    for batch in batches:
        step_of(together, wrapped, batch[hvd.rank()])()
        step_of(alone, plain, batch.flatten(0, 1))()
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    hvd.shutdown()
    return {"difference": difference}


def die(device: str, folder: Path) -> dict[str, Any] | None:
    """Seconds from the other rank's death to the error."""
    # the launcher ends survivors, which have still to note the time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    tensor = torch.ones(1 << 20, device=device)
    hvd.allreduce_(tensor, name="step", op=hvd.Max)
    if hvd.rank() == 1:
        (folder / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            hvd.allreduce_(tensor, name="step", op=hvd.Max)
    except RuntimeError:
        heard = time.monotonic()
    return {"seconds": heard - float((folder / "died").read_text())}


ROLES: dict[str, Callable[[str, Path], dict[str, Any] | None]] = {
    "correct": correct,
    "features": features,
    "speed": speed,
    "engine": engine,
    "gloo": gloo,
    "train": train,
    "views": views,
    "alike": alike,
    "die": die,
}
