# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups of torch.distributed whose members change, on real processes that the test itself
starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

LIMIT = timedelta(seconds=60)
SPAWN = get_context("spawn")


class Member:
    """A process of a test: its group, and a directory in which processes leave notes for each
    other.
    """

    def __init__(self, rank: int, size: int, folder: str) -> None:
        """Joins a group without members; `rank` and `size` are what torch tells of it until
        then.
        """
        import farandole.torch.distributed  # noqa: F401 - registers the backend

        torch.set_num_threads(1)
        self.number = rank
        self.store = dist.FileStore(f"{folder}/store", -1)
        dist.init_process_group(
            "farandole",
            store=self.store,
            rank=rank,
            world_size=size,
            timeout=LIMIT,
            enable_reconfigure=True,
        )
        self.backend: Any = dist.distributed_c10d._get_default_group()._get_backend(
            torch.device("cpu")
        )

    def handles(self, what: str, numbers: list[int]) -> list[str]:
        """The handles of some processes, after each has come here."""
        self.store.set(f"{what}/{self.number}", dist._get_reconfigure_handle())
        return [self.store.get(f"{what}/{number}").decode() for number in numbers]

    def becomes(self, uuid: int, handles: list[str] | set[str], limit: timedelta = LIMIT) -> None:
        """Forms the next world."""
        assert dist._reconfigure(uuid, handles, timeout=limit).wait()

    def sums(self, expected: float) -> None:
        """Sees that the numbers of all processes of the world come together."""
        for _ in range(3):
            tensor = torch.full((1000,), float(1 << self.number))
            dist.all_reduce(tensor)
            assert tensor.unique().tolist() == [expected]


def serve(rank: int, folder: str, pipe: Any) -> None:
    """The process: calls functions until the test closes the pipe."""
    member = Member(rank, 4, folder)
    with contextlib.suppress(EOFError):
        while True:
            function = pipe.recv()
            try:
                answer = (True, function(member))
            except BaseException:  # noqa: BLE001 - whatever it is, the test is told
                answer = (False, traceback.format_exc())
            pipe.send(answer)


class ProcessPool:
    """Processes that the test itself has started; one is there beside those of the first world."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Any] = {}
        for number in range(4):
            self.pipes[number], theirs = SPAWN.Pipe()
            self.processes[number] = SPAWN.Process(target=serve, args=(number, str(folder), theirs))
            self.processes[number].start()
            theirs.close()

    def run(
        self, functions: dict[int, Callable[[Member], Any]], dies: tuple[int, ...] = ()
    ) -> dict[int, Any]:
        """Returns the results of functions by process; a process that dies has no result."""
        for number, function in functions.items():
            self.pipes[number].send(function)
        found: dict[int, Any] = {}
        for number in functions:
            if number in dies:
                continue
            assert self.pipes[number].poll(120), f"process {number} does not answer"
            good, answer = self.pipes[number].recv()
            assert good, f"process {number}: {answer}"
            found[number] = answer
        return found

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(20)
            assert process.exitcode is not None, "it has not ended by itself"


@pytest.fixture(scope="module")
def process_pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Processes of all tests here, the last of which kills one: importing torch takes its time."""
    made = ProcessPool(tmp_path_factory.mktemp("crew"))
    yield made
    made.close()


def many_worlds(member: Member) -> list[tuple[int, int]]:
    number, everybody, seen = member.number, [0, 1, 2], []
    assert dist._supports_reconfigure()
    assert member.backend.supports_reconfigure
    assert (dist.get_rank(), dist.get_world_size()) == (number, 4), "as torch was told"
    with pytest.raises(ValueError, match=r"call reconfigure\(\) before a collective"):
        dist.all_reduce(torch.ones(1))

    def note(uuid: int, handles: list[str] | set[str], expected: float) -> None:
        member.becomes(uuid, handles)
        seen.append((dist.get_rank(), dist.get_world_size()))
        member.sums(expected)

    note(100, member.handles("first", everybody), 7.0)
    note(101, member.handles("same", everybody), 7.0)
    note(102, member.handles("backwards", everybody)[::-1], 7.0)
    note(103, set(member.handles("as a set", everybody)), 7.0)
    assert dist.get_rank() == 2 - number, "those who were in a world keep their order"
    # A number is used once; the world stays as it is.
    handles = member.handles("again", everybody)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="uuid 103 was already used"):
            member.becomes(103, set(handles))
    with pytest.raises(RuntimeError, match="not among those of the new group"):
        member.becomes(104, [one for one in handles if one != dist._get_reconfigure_handle()])
    with pytest.raises(RuntimeError, match="needs different handles"):
        member.becomes(104, [handles[0], *handles])
    with pytest.raises(RuntimeError, match="needs at least one handle"):
        member.becomes(104, [])
    with pytest.raises(RuntimeError, match="not a reconfigure handle"):
        member.becomes(104, ["gloo:0:-1:0:", *handles])
    member.sums(7.0)
    # Each alone, two and one, all.
    note(110 + number, [dist._get_reconfigure_handle()], float(1 << number))
    pair = member.handles("split", everybody)
    if number == 1:
        note(121, [pair[1]], 2.0)
    else:
        note(120, [pair[0], pair[2]], 5.0)
    note(122, member.handles("merge", everybody), 7.0)
    # One stays outside for a while, and sees its world end.
    handles = member.handles("shrink", everybody)
    if number != 1:
        note(123, [handles[0], handles[2]], 5.0)
    else:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    note(124, member.handles("grow", everybody), 7.0)
    member.backend.abort()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    note(125, member.handles("after abort", everybody), 7.0)
    member.handles("end", everybody)
    return seen


def test_a_group_grows_shrinks_splits_merges_and_stays_what_it_is(
    process_pool: ProcessPool,
) -> None:
    told = process_pool.run(dict.fromkeys(range(3), many_worlds))
    assert told[0] == [
        (0, 3),
        (0, 3),
        (2, 3),
        (2, 3),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 2),
        (0, 3),
        (0, 3),
    ]
    assert told[1] == [(1, 3), (1, 3), (1, 3), (1, 3), (0, 1), (0, 1), (1, 3), (1, 3), (1, 3)]
    assert told[2] == [
        (2, 3),
        (2, 3),
        (0, 3),
        (0, 3),
        (0, 1),
        (1, 2),
        (2, 3),
        (1, 2),
        (2, 3),
        (2, 3),
    ]


def parted(member: Member) -> str:
    handles = member.handles("parts", [0, 1, 2, 3])
    half = handles[:2] if member.number < 2 else handles[2:]
    failure = ""
    try:
        member.becomes(200, half, timedelta(seconds=8))
    except RuntimeError as error:
        failure = str(error)
    else:
        member.sums(3.0 if member.number < 2 else 12.0)
    member.handles("tried", [0, 1, 2, 3])
    # With their own numbers both halves continue separately.
    half = member.handles("second", [0, 1] if member.number < 2 else [2, 3])
    member.becomes(201 if member.number < 2 else 202, half)
    member.sums(3.0 if member.number < 2 else 12.0)
    # A process with a dead member on its list waits for it no longer than its timeout.
    if member.number == 3:
        with pytest.raises(RuntimeError, match=r"did not call reconfigure\(203\) in time"):
            member.becomes(
                203,
                ["farandole:9:0:0:elsewhere", dist._get_reconfigure_handle()],
                timedelta(seconds=2),
            )
    member.handles("parted", [0, 1, 2, 3])
    return failure


def test_two_halves_of_one_number_are_one_world_and_an_error(process_pool: ProcessPool) -> None:
    failures = process_pool.run(dict.fromkeys(range(4), parted))
    won = [number for number, failure in failures.items() if not failure]
    assert sorted(won) in ([0, 1], [2, 3]), failures
    lost = [failure for failure in failures.values() if failure]
    assert any("uuid 200 was already used" in failure for failure in lost)
    assert any("with other members" in failure for failure in lost)


def trained(member: Member) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(member.number)
    model = torch.nn.Linear(2, 1, bias=False)
    for uuid, numbers in ((300, [0, 1]), (301, [1, 2])):
        if member.number not in numbers:
            continue
        member.becomes(uuid, member.handles(f"world {uuid}", numbers))
        wrapped = DistributedDataParallel(model)
        wrapped(torch.full((1, 2), float(member.number))).sum().backward()
        weight: Any = model.weight.grad
        assert weight.flatten().tolist() == [sum(numbers) / 2] * 2
        model.zero_grad()
    member.handles("trained", [0, 1, 2])
    return model.weight.detach().flatten().tolist()


@pytest.mark.slow
def test_a_new_member_gets_the_parameters_of_a_ddp_model(process_pool: ProcessPool) -> None:
    told = process_pool.run(dict.fromkeys(range(3), trained))
    assert told[0] == told[1] == told[2]


def of_a_store_that_ends() -> None:
    import farandole.torch.distributed  # noqa: F401 - registers the backend

    with pytest.raises(ValueError, match="needs a store that survives the loss of any member"):
        dist.init_process_group("farandole", init_method="farandole://", enable_reconfigure=True)


def test_a_store_that_ends_with_the_world_is_refused(pair: Any) -> None:
    pair.run(of_a_store_that_ends)


def survivor(member: Member) -> tuple[int, int]:
    member.becomes(400, member.handles("before the kill", [0, 1, 2]))
    member.sums(7.0)
    if member.number == 0:  # it holds the registrar
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    with pytest.raises(RuntimeError):
        reduces_until(deadline)
    return joined(member)


def reduces_until(deadline: float) -> None:
    while time.monotonic() < deadline:
        dist.all_reduce(torch.ones(1))


def joined(member: Member) -> tuple[int, int]:
    member.becomes(401, member.handles("after the kill", [1, 2, 3]))
    member.sums(14.0)
    member.handles("joined", [1, 2, 3])
    return dist.get_rank(), dist.get_world_size()


def test_one_is_killed_and_a_new_one_joins_at_once(process_pool: ProcessPool) -> None:
    told = process_pool.run({0: survivor, 1: survivor, 2: survivor, 3: joined}, dies=(0,))
    assert told == {1: (0, 3), 2: (1, 3), 3: (2, 3)}
    process_pool.processes[0].join(10)
    assert process_pool.processes[0].exitcode == -signal.SIGKILL
