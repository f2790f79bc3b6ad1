# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A worker of the tests of fault-tolerant optimizers: trains a small model, and is lost where the test says.

`PLAN` is JSON: `steps`; `ends`, a list of `[identity, step, moment]`, identities being the ranks of the first world;
`grows`, a size that the world must have again after `steps`, before training ends; and `ddp`, the options of
`FaultTolerantDataParallel`, if that is to be used.
"""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import farandole.torch as hvd
from farandole.common import basics
from farandole.common.exceptions import FarandoleInternalError

STEPS_FROM = 3
"""The schedule of learning rates halves them that often."""


def model() -> torch.nn.Module:
    """Equal on all ranks, but for newcomers, whose seed is another."""
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def batch(identity: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a worker trains on in a step."""
    random = torch.Generator().manual_seed(1000 * identity + step)
    inputs = torch.randn(5, 6, generator=random, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def loss(network: torch.nn.Module, identity: int, step: int) -> torch.Tensor:
    """The mean squared error of a worker's batch."""
    inputs, targets = batch(identity, step)
    return torch.nn.functional.mse_loss(network(inputs), targets)


taken = []
"""Results of another rank that this one took after its own reduction had failed."""


def fail_once() -> None:
    """Has the next reduction fail on this rank alone, after it has come to its end on all."""
    from farandole.torch.distributed import _fault_tolerant

    reduce, take = _fault_tolerant._reduce, _fault_tolerant._Piece.take

    def fail(pieces: list) -> None:
        reduce(pieces)
        time.sleep(0.5)
        _fault_tolerant._reduce = reduce
        raise FarandoleInternalError("a link broke")

    def note(piece: object, results: dict) -> None:
        taken.append(piece)
        take(piece, results)

    _fault_tolerant._reduce, _fault_tolerant._Piece.take = fail, note


def end(moment: str, network: torch.nn.Module) -> None:
    """Ends this process without a word, at once or a little later."""
    if moment == "fails":
        fail_once()
    elif moment == "within":
        # The gradients of the layers behind it are being reduced by then.
        network[0].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    elif moment == "during":
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif moment == "recovering":
        basics.on_init(lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        os.kill(os.getpid(), signal.SIGTERM if moment == "asked" else signal.SIGKILL)


def main() -> None:
    """Trains."""
    plan = json.loads(os.environ["PLAN"])
    if "ddp" in plan:
        from farandole.torch.distributed import FaultTolerantDataParallel

        dist.init_process_group("farandole")
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = model()
    network.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    if "ddp" in plan:
        called = tolerant = FaultTolerantDataParallel(network, optimizer, **plan["ddp"])
    else:
        named = network.named_parameters()
        called = network
        tolerant = optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, fault_tolerant=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS_FROM)
    tolerant.share(schedule=schedule)
    first = tolerant.steps
    identity = hvd.rank() if first == 0 else 100 + hvd.rank()
    ends = {(who, step): moment for who, step, moment in plan["ends"]}
    sizes = []
    goal = sys.maxsize if "grows" in plan else plan["steps"]
    while tolerant.steps < goal:
        step = tolerant.steps
        moment = ends.pop((identity, step), None)
        if moment is not None and moment != "after":
            end(moment, network)
        optimizer.zero_grad()
        loss(called, identity, step).backward()
        if moment == "after":
            if "ddp" not in plan:
                optimizer.synchronize()
            end(moment, network)
        optimizer.step()
        schedule.step()
        network.seen += 1
        sizes.append(hvd.size())
        if "ddp" in plan:
            assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
        if goal == sys.maxsize:
            time.sleep(0.02)
            if hvd.size() == plan["grows"] and tolerant.steps > plan["steps"]:
                # All ranks of the grown world see this after the same step.
                goal = tolerant.steps + 10
    said = {"identity": identity, "rank": hvd.rank(), "steps": tolerant.steps, "first": first, "sizes": sizes}
    said |= {"seen": int(network.seen), "taken": len(taken)}
    said |= {
        "rate": schedule.get_last_lr()[0],
        "weights": [p.detach().flatten().tolist() for p in network.parameters()],
    }
    sys.stdout.write(f"result {json.dumps(said)}\n")


if __name__ == "__main__":
    main()
