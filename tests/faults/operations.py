# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The operations of the grid, straight on the engine: a worker needs no array library.

Each operation submits something whose result is known, and checks it. The numbers depend on the
step, so that no result of an earlier step can pass for this one's.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from farandole._native import engine

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT32: Final = 7
FLOAT64: Final = 8
SUM: Final = 1
SET: Final = 1
"""The process set that every worker asks for: all ranks but the last."""
SIZES: Final = (16, 1 << 18)
"""Elements: a message that is one packet, and one that is cut into many."""


class Block:
    """Memory of floats at a fixed address."""

    def __init__(self, values: array[float]) -> None:
        self.values = values

    @classmethod
    def filled_with(cls, value: float, count: int) -> Block:
        """Equal values."""
        return cls(array("f", [value]) * count)

    @property
    def address(self) -> int:
        """The address of the values."""
        return self.values.buffer_info()[0]

    def __len__(self) -> int:
        return len(self.values)


class Attempt:
    """A submitted operation."""

    def __init__(self, handles: list[int], check: Callable[[list[Any]], bool], *keep: Any) -> None:
        self.handles = handles
        self._check = check
        self._keep = keep

    def finish(self) -> None:
        """Waits, and looks at the result."""
        results = [engine.wait(handle) for handle in self.handles]
        assert self._check(results), "a wrong result"


def _floats(gathered: Any) -> array[float]:
    return array("f", bytes(memoryview(gathered)))


def _allreduce(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    source, target = Block.filled_with(world.rank + step, count), Block.filled_with(-1, count)
    shape = (count if dtype == FLOAT32 else count // 2,)
    handle = engine.allreduce(
        name, dtype, shape, source.address, target.address, SUM, 1.0, 1.0, 0, False
    )
    total = world.size * (world.size - 1) / 2 + world.size * step
    return Attempt(
        [handle], lambda _: target.values == Block.filled_with(total, count).values, source, target
    )


def _grouped_allreduce(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    sources = [Block.filled_with(world.rank + step + part, count) for part in range(3)]
    targets = [Block.filled_with(-1, count) for _ in sources]
    shape = (count if dtype == FLOAT32 else count // 2,)
    tensors = [
        (f"{name}.{part}", dtype, shape, source.address, target.address)
        for part, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    handles = engine.grouped_allreduce(tensors, SUM, 1.0, 1.0, 0)

    def check(_: list[Any]) -> bool:
        ranks = world.size * (world.size - 1) / 2
        expected = [
            Block.filled_with(ranks + world.size * (step + part), count).values for part in range(3)
        ]
        return [target.values for target in targets] == expected

    return Attempt(handles, check, sources, targets)


def _allgather(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    source = Block.filled_with(world.rank + step, count)
    shape = (count if dtype == FLOAT32 else count // 2,)
    handle = engine.allgather(name, dtype, shape, source.address, 0, False)

    def check(results: list[Any]) -> bool:
        expected = array("f")
        for rank in range(world.size):
            expected.extend(Block.filled_with(rank + step, count).values)
        return _floats(results[0]) == expected

    return Attempt([handle], check, source)


def _grouped_allgather(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    sources = [Block.filled_with(world.rank + step + part, count) for part in range(3)]
    shape = (count if dtype == FLOAT32 else count // 2,)
    tensors = [
        (f"{name}.{part}", dtype, shape, source.address) for part, source in enumerate(sources)
    ]
    handles = engine.grouped_allgather(tensors, 0)

    def check(results: list[Any]) -> bool:
        for part, result in enumerate(results):
            expected = array("f")
            for rank in range(world.size):
                expected.extend(Block.filled_with(rank + step + part, count).values)
            if _floats(result) != expected:
                return False
        return True

    return Attempt(handles, check, sources)


def _alltoall(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    part = -(-count // world.size)
    source = Block(array("f"))
    for rank in range(world.size):
        source.values.extend(Block.filled_with(world.rank * world.size + rank + step, part).values)
    rows = part if dtype == FLOAT32 else part // 2
    shape = (rows * world.size,)
    handle = engine.alltoall(name, dtype, shape, source.address, None, 0, False)

    def check(results: list[Any]) -> bool:
        expected = array("f")
        for rank in range(world.size):
            expected.extend(Block.filled_with(rank * world.size + world.rank + step, part).values)
        return _floats(results[0]) == expected and results[0].rows == [part] * world.size

    return Attempt([handle], check, source)


def _reducescatter(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    rows = count + 1  # never the same for all ranks
    own = rows // world.size + (world.rank < rows % world.size)
    source, target = Block.filled_with(world.rank + step, rows), Block.filled_with(-1, own + 4)
    # Of another dtype, half as many numbers fill the same memory; the own part may be a little
    # larger.
    shape = (rows if dtype == FLOAT32 else rows // 2,)
    handle = engine.reducescatter(
        name, dtype, shape, source.address, target.address, SUM, 1.0, 1.0, 0, False
    )
    total = world.size * (world.size - 1) / 2 + world.size * step
    return Attempt(
        [handle],
        lambda _: target.values[:own] == Block.filled_with(total, own).values,
        source,
        target,
    )


def _grouped_reducescatter(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    rows = count + 1
    own = rows // world.size + (world.rank < rows % world.size)
    sources = [Block.filled_with(world.rank + step + part, rows) for part in range(3)]
    targets = [Block.filled_with(-1, own + 4) for _ in sources]
    shape = (rows if dtype == FLOAT32 else rows // 2,)
    tensors = [
        (f"{name}.{part}", dtype, shape, source.address, target.address)
        for part, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    handles = engine.grouped_reducescatter(tensors, SUM, 1.0, 1.0, 0)

    def check(_: list[Any]) -> bool:
        ranks = world.size * (world.size - 1) / 2
        expected = [
            Block.filled_with(ranks + world.size * (step + part), own).values for part in range(3)
        ]
        return [target.values[:own] for target in targets] == expected

    return Attempt(handles, check, sources, targets)


def _broadcast(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    world = engine.world()
    root = step % world.size
    source, target = Block.filled_with(world.rank + step, count), Block.filled_with(-1, count)
    shape = (count if dtype == FLOAT32 else count // 2,)
    handle = engine.broadcast(name, dtype, shape, source.address, target.address, root, 0, False)
    return Attempt(
        [handle],
        lambda _: target.values == Block.filled_with(root + step, count).values,
        source,
        target,
    )


def _barrier(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    if dtype != FLOAT32:
        # A barrier has no dtype to differ in, so what differs is the operation.
        return _broadcast(name, step, count)
    return Attempt([engine.barrier(name, 0)], lambda _: True)


def _in_a_set(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    """An allreduce of all ranks but the last, beside a barrier of all."""
    world = engine.world()
    others = world.size - 1
    handles = [engine.barrier(f"{name}.all", 0)]
    source, target = Block.filled_with(world.rank + step, count), Block.filled_with(-1, count)
    expected = target
    if world.rank < others:
        shape = (count if dtype == FLOAT32 else count // 2,)
        handles.append(
            engine.allreduce(
                name, dtype, shape, source.address, target.address, SUM, 1.0, 1.0, SET, False
            )
        )
        expected = Block.filled_with(others * (others - 1) / 2 + others * step, count)
    return Attempt(handles, lambda _: target.values == expected.values, source, target)


def _join(name: str, step: int, count: int, dtype: int = FLOAT32) -> Attempt:
    """One rank still works while all others have joined; it joins last."""
    if name == "lonely":
        # A join would be the others' step. An allreduce waits for the one that has not joined, and
        # that one for it.
        return _allreduce(name, step, count, dtype)
    world = engine.world()
    last = step % world.size
    if world.rank != last:
        return Attempt([engine.join(False)], lambda results: results == [last])
    source, target = Block.filled_with(step + 1, count), Block.filled_with(-1, count)
    handle = engine.allreduce(
        name, dtype, (count,), source.address, target.address, SUM, 1.0, 1.0, 0, False
    )
    work = Attempt([handle], lambda _: target.values == source.values, source, target)

    def check(_: list[Any]) -> bool:
        work.finish()
        return engine.wait(engine.join(False)) == last

    return Attempt([], check)


OPERATIONS: Final[dict[str, Callable[..., Attempt]]] = {
    "allreduce": _allreduce,
    "grouped_allreduce": _grouped_allreduce,
    "allgather": _allgather,
    "grouped_allgather": _grouped_allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "grouped_reducescatter": _grouped_reducescatter,
    "barrier": _barrier,
    "in a set": _in_a_set,
    "join": _join,
}
"""Every operation: starts `step` under `name` on `count` elements; another dtype makes a
mismatch.
"""


def vote(ballot: bool) -> bool:
    """Returns whether any rank says yes: the same answer everywhere."""
    source, target = Block.filled_with(float(ballot), 1), Block.filled_with(0, 1)
    handle = engine.allreduce(
        "vote", FLOAT32, (1,), source.address, target.address, SUM, 1.0, 1.0, 0, True
    )
    Attempt([handle], lambda _: True, source, target).finish()
    return target.values[0] > 0
