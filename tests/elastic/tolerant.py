# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A worker of the tests of fault-tolerant optimizers: trains a small model, and is lost where the test says.

`PLAN` is JSON: `steps`; `ends`, a list of `[identity, step, moment]`, identities being the ranks of the first world;
and `grows`, a size that the world must have again after `steps`, before training ends.
"""

import json
import os
import signal
import sys
import threading
import time

import torch

import farandole.torch as hvd
from farandole.common import basics

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


def end(moment: str) -> None:
    """Ends this process without a word, at once or a little later."""
    if moment == "during":
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif moment == "recovering":
        basics.on_init(lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        os.kill(os.getpid(), signal.SIGTERM if moment == "asked" else signal.SIGKILL)


def main() -> None:
    """Trains."""
    plan = json.loads(os.environ["PLAN"])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), fault_tolerant=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS_FROM)
    optimizer.share(schedule=schedule)
    first = optimizer.steps
    identity = hvd.rank() if first == 0 else 100 + hvd.rank()
    ends = {(who, step): moment for who, step, moment in plan["ends"]}
    sizes = []
    goal = sys.maxsize if "grows" in plan else plan["steps"]
    while optimizer.steps < goal:
        step = optimizer.steps
        moment = ends.pop((identity, step), None)
        if moment is not None and moment != "after":
            end(moment)
        optimizer.zero_grad()
        loss(network, identity, step).backward()
        if moment == "after":
            optimizer.synchronize()
            end(moment)
        optimizer.step()
        schedule.step()
        sizes.append(hvd.size())
        if goal == sys.maxsize:
            time.sleep(0.02)
            if hvd.size() == plan["grows"] and optimizer.steps > plan["steps"]:
                # All ranks of the grown world see this after the same step.
                goal = optimizer.steps + 10
    said = {"identity": identity, "rank": hvd.rank(), "steps": optimizer.steps, "first": first, "sizes": sizes}
    said |= {
        "rate": schedule.get_last_lr()[0],
        "weights": [p.detach().flatten().tolist() for p in network.parameters()],
    }
    sys.stdout.write(f"result {json.dumps(said)}\n")


if __name__ == "__main__":
    main()
