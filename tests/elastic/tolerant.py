# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A worker of the tests of fault-tolerant optimizers: trains a small model, and is lost where the
test says.

`PLAN` is JSON: `steps`; `ends`, a list of `[identity, step, moment]`, identities being the ranks of
the first world; `grows`, a size that the world must have again after `steps`, before training ends;
`ddp`, the options of `FaultTolerantDataParallel`, if that is to be used; `averages`, whether the
loss is averaged before each step of the optimizer; `piece`, the bytes that a state is sent in at
once; and `folder`, where each rank notes the reductions that it has finished.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import farandole.torch as hvd
from farandole.common import basics
from farandole.common.exceptions import FarandoleInternalError
from farandole.torch import _fault_tolerance, _state_transfer
from farandole.torch._fault_tolerance import FaultTolerantReducer

STEPS_FROM = 3
"""The schedule of learning rates halves them that often."""


def model() -> torch.nn.Module:
    """Equal on all ranks, but for newcomers, whose seed is another."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()


def batch(identity: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and targets of a worker in a step."""
    random = torch.Generator().manual_seed(1000 * identity + step)
    inputs = torch.randn(5, 6, generator=random, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def loss(network: torch.nn.Module, identity: int, step: int) -> torch.Tensor:
    """The mean squared error of a worker's batch."""
    inputs, targets = batch(identity, step)
    return torch.nn.functional.mse_loss(network(inputs), targets)


taken = []
"""Results of another rank that this one took after its own reduction had failed."""
rejoined = []
"""Steps in which the loss could not be averaged."""
interrupted = []
"""Transfers to this rank that have failed."""


LIMIT = 60.0
"""Seconds that a rank waits for the others to finish a reduction."""


def note_finished(folder: Path, identity: int, step: int) -> None:
    """Tells the ranks whose reduction fails that this one has finished it."""
    (folder / f"{step}.{identity}").touch()


def wait_for_finished(folder: Path, step: int, count: int) -> None:
    """Waits until so many ranks have finished a reduction."""
    end = time.monotonic() + LIMIT
    while len(list(folder.glob(f"{step}.*"))) < count:
        assert time.monotonic() < end, f"{count} ranks did not finish step {step} in {LIMIT} s"
        time.sleep(0.01)


def fail_once(folder: Path, step: int, others: int) -> None:
    """Makes the next reduction of an optimizer fail on this rank, after so many other ranks have
    finished it.
    """
    reduce = FaultTolerantReducer._reduce_buckets

    def fail(reducer: FaultTolerantReducer) -> None:
        reduce(reducer)
        wait_for_finished(folder, step, others)
        FaultTolerantReducer._reduce_buckets = reduce
        raise FarandoleInternalError("a link broke")

    FaultTolerantReducer._reduce_buckets = fail


def fail_once_in_ddp(folder: Path, step: int, others: int) -> None:
    """Like `fail_once`, in DDP."""
    from farandole.torch.distributed import _fault_tolerant

    reduce, take = _fault_tolerant._run_reductions, _fault_tolerant._BucketReduction.copy_results

    def fail(pieces: list) -> None:
        reduce(pieces)
        wait_for_finished(folder, step, others)
        _fault_tolerant._run_reductions = reduce
        raise FarandoleInternalError("a link broke")

    def note(piece: object, results: dict) -> None:
        taken.append(piece)
        take(piece, results)

    _fault_tolerant._run_reductions, _fault_tolerant._BucketReduction.copy_results = fail, note


def end_while_sending() -> None:
    """Ends this process when it has sent a part of a state."""
    start = _state_transfer._StateTransfer.start_piece

    def end_before_the_third(mover: Any, piece: Any) -> int:
        if mover._count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(mover, piece)

    _state_transfer._StateTransfer.start_piece = end_before_the_third


def watch_transfers(plan: dict[str, Any]) -> None:
    """Notes the transfers to this rank that fail."""
    if "piece" in plan:
        _state_transfer._MAX_PIECE_BYTES = _state_transfer._LARGE_TENSOR_BYTES = plan["piece"]
    move = _fault_tolerance.transfer_tensors

    def watched(name: str, tensors: Any, roles: Any) -> None:
        try:
            move(name, tensors, roles)
        except FarandoleInternalError:
            if hvd.rank() in roles.takers:
                interrupted.append(name)
            raise

    _fault_tolerance.transfer_tensors = watched


def average(value: torch.Tensor, tolerant: Any) -> None:
    """Averages a loss, as a script does that reports it; this fails if a rank is lost."""
    try:
        hvd.allreduce(value.detach(), name="loss")
    except FarandoleInternalError:
        tolerant.rejoin()
        rejoined.append(tolerant.steps)


def take_step(plan: dict[str, Any], value: torch.Tensor, tolerant: Any, optimizer: Any) -> None:
    """The step of the optimizer, and what comes before it."""
    if "averages" in plan:
        average(value, tolerant)
    optimizer.step()


def end(moment: str, network: torch.nn.Module) -> None:
    """Ends this process without a word, at once or a little later."""
    if moment == "within":
        # The gradients of the layers behind it are being reduced by then.
        network[0].weight.register_post_accumulate_grad_hook(
            lambda _: os.kill(os.getpid(), signal.SIGKILL)
        )
    elif moment == "during":
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif moment == "recovering":
        basics.call_on_each_init(lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        os.kill(os.getpid(), signal.SIGTERM if moment == "asked" else signal.SIGKILL)


def prepare(
    moment: str | None, network: torch.nn.Module, folder: Path, step: int, plan: dict[str, Any]
) -> None:
    """Arranges what is to happen to this rank in a step before its reduction has ended."""
    if moment == "fails":
        fail = fail_once_in_ddp if "ddp" in plan else fail_once
        fail(folder, step, hvd.size() - sum(each[1:] == [step, "fails"] for each in plan["ends"]))
    elif moment == "sending":
        end_while_sending()
    elif moment is not None and moment != "after":
        end(moment, network)


def start(plan: dict[str, Any]) -> tuple[torch.nn.Module, Any, Any, Any]:
    """The model, the module to call, the optimizer, and the one of them that is fault tolerant."""
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
        called = FaultTolerantDataParallel(network, optimizer, **plan["ddp"])
        return network, called, optimizer, called
    named = network.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, fault_tolerant=True)
    return network, network, optimizer, optimizer


def main() -> None:
    """Trains."""
    plan = json.loads(os.environ["PLAN"])
    watch_transfers(plan)
    network, called, optimizer, tolerant = start(plan)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS_FROM)
    tolerant.share(schedule=schedule)
    first = tolerant.steps
    identity = hvd.rank() if first == 0 else 100 + hvd.rank()
    ends = {(who, step): moment for who, step, moment in plan["ends"]}
    sizes, folder = [], Path(plan["folder"])
    goal = sys.maxsize if "grows" in plan else plan["steps"]
    while tolerant.steps < goal:
        step = tolerant.steps
        moment = ends.pop((identity, step), None)
        prepare(moment, network, folder, step, plan)
        optimizer.zero_grad()
        value = loss(called, identity, step)
        value.backward()
        if "ddp" in plan:
            note_finished(folder, identity, step)
        if moment == "after":
            if "ddp" not in plan:
                optimizer.synchronize()
            end(moment, network)
        take_step(plan, value, tolerant, optimizer)
        if "ddp" not in plan:
            note_finished(folder, identity, step)
        schedule.step()
        network.seen = network.seen + 1  # another tensor in each step
        sizes.append(hvd.size())
        if "ddp" in plan:
            assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
        if goal == sys.maxsize:
            time.sleep(0.02)
            if hvd.size() == plan["grows"] and tolerant.steps > plan["steps"]:
                # All ranks of the grown world see this after the same step.
                goal = tolerant.steps + 10
    said = {
        "identity": identity,
        "rank": hvd.rank(),
        "steps": tolerant.steps,
        "first": first,
        "sizes": sizes,
    }
    said |= {
        "seen": int(network.seen),
        "taken": len(taken),
        "rejoined": len(rejoined),
        "interrupted": interrupted,
    }
    said |= {
        "rate": schedule.get_last_lr()[0],
        "weights": [p.detach().flatten().tolist() for p in network.parameters()],
    }
    sys.stdout.write(f"result {json.dumps(said)}\n")


if __name__ == "__main__":
    main()
