# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The grid: what there is to break, and how.

Four factors make a cell: the operation under way, the fault, the transport, the number of ranks.

| fault | what is done | what must follow |
| --- | --- | --- |
| kill | SIGKILL to a rank | an error naming it at every other rank, within 0.1 s on its host, within 1 s elsewhere |
| orphan | a rank is killed whose forked child lives on, with copies of all its connections | the same |
| stop | SIGSTOP to a rank | the same within the peer timeout; the rank itself gets its error once it goes on |
| partition | every packet to and from a rank's host vanishes | an error at every rank within the peer timeout |
| drop | every packet of a connection vanishes | an error naming an end of it everywhere, then too or `RATIONED` later |
| reset | one data connection is reset | the same within 1 s |
| exception | a rank raises, and its interpreter ends | an error naming it at every other rank, times as for kill |
| shutdown | a rank leaves with operations in flight | the same, and the operations fail at that rank |
| mismatch | a rank submits something else under a name | an error naming it everywhere within 1 s; the world goes on |
| slow | a rank pauses for longer than the peer timeout | the right result |
| double init | a rank calls `init` again | the right result |
| fork | a rank forks; the child tries to take part | an error in the child, the right result in the parent |

Not meaningful, and no cells:

- both transports at once with fewer than two ranks on each host.
- partition, drop and reset in shared memory: there is no connection between two ranks whose packets
  could vanish, and memory that both have mapped cannot be taken away from outside; what can end
  such a link is the end of a process.
- a barrier has nothing that could differ but its kind: its mismatch is a broadcast under its name.
- a mismatch in a set is that of an allreduce, which the rank outside of the set has no part in.
- a join has nothing that could differ: a rank that has not joined yet may do anything.
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Final

from tests.faults.operations import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSPORTS: Final = ("memory", "tcp", "both")
"""All ranks on one host; each on a host of its own; half of them on one host and half on
another.
"""

RANKS: Final = (2, 3, 4, 8)

TURN: Final = 6
"""The step at which a rank does to itself what the plan says."""


@dataclass(frozen=True)
class Fault:
    """A fault, and how its results are judged."""

    name: str
    kind: str
    """The end of a rank, a break between ranks, ranks that disagree, or a fault without any
    effect.
    """
    inside: bool = False
    """The rank does it to itself, on request."""
    survivable: bool = False
    link: bool = False
    """It needs a connection between two ranks."""
    silent: bool = False
    """Nothing tells of it but silence: the peer timeout counts."""


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("kill", "end"),
        Fault("orphan", "end", inside=True),
        Fault("exception", "end", inside=True),
        Fault("shutdown", "end", inside=True),
        Fault("stop", "break", silent=True),
        Fault("partition", "break", link=True, silent=True),
        Fault("drop", "break", link=True, silent=True),
        Fault("reset", "break", link=True),
        Fault("mismatch", "mismatch", inside=True),
        Fault("slow", "survivable", inside=True, survivable=True),
        Fault("double init", "survivable", inside=True, survivable=True),
        Fault("fork", "survivable", inside=True, survivable=True),
    )
}


@dataclass(frozen=True)
class Cell:
    """One experiment."""

    operation: str
    fault: str
    transport: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.operation}-{self.fault}-{self.transport}-{self.ranks}"

    @property
    def hosts(self) -> list[int]:
        """The host of every rank."""
        if self.transport == "both":
            return [int(rank >= self.ranks // 2) for rank in range(self.ranks)]
        return [rank if self.transport == "tcp" else 0 for rank in range(self.ranks)]

    @property
    def victim(self) -> int:
        """The rank that is hit: the first, the last or one between, by turns."""
        place = list(OPERATIONS).index(self.operation) + list(FAULTS).index(self.fault) + self.ranks
        victim = (0, self.ranks - 1, self.ranks // 2)[place % 3]
        if (self.operation, self.fault, victim) == ("join", "shutdown", TURN % self.ranks):
            # All others have joined, so whatever this one waits for comes true.
            victim = (victim + 1) % self.ranks
        return victim


def is_meaningful(cell: Cell) -> bool:
    """Returns whether the fault can happen there."""
    if FAULTS[cell.fault].link and cell.transport == "memory":
        return False
    if cell.transport == "both" and cell.ranks < 4:
        return False
    return not (cell.fault == "mismatch" and cell.operation in ("in a set", "join"))


def every_cell() -> list[Cell]:
    """The whole grid, in a fixed order."""
    cells = (Cell(*values) for values in product(OPERATIONS, FAULTS, TRANSPORTS, RANKS))
    return [cell for cell in cells if is_meaningful(cell)]


def _pairs(cell: Cell) -> Iterator[tuple[str, object, str, object]]:
    """Yields the pairs that a cell covers: any two of its factors; an operation is paired with the
    fault's kind only.

    All operations with all faults would be more pairs than a short run has cells.
    """
    factors = {
        "op": cell.operation,
        "fault": cell.fault,
        "transport": cell.transport,
        "ranks": cell.ranks,
    }
    for one, other in combinations(factors, 2):
        if (one, other) == ("op", "fault"):
            yield "op", cell.operation, "kind", FAULTS[cell.fault].kind
        else:
            yield one, factors[one], other, factors[other]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of which some cover every pair that any of `cells` covers: greedily, so few, and
    always the same ones.
    """
    numbers: dict[tuple[str, object, str, object], int] = {}
    covers = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in _pairs(cell)) for cell in cells
    ]
    missing = (1 << len(numbers)) - 1
    met: Counter[str] = Counter()
    chosen: list[Cell] = []

    def worth(place: int) -> tuple[int, int]:
        cell = cells[place]
        # Among equals, what was met least.
        return (covers[place] & missing).bit_count(), -met[cell.fault] - met[cell.operation]

    while missing:
        best = max(range(len(cells)), key=worth)
        chosen.append(cells[best])
        met.update((cells[best].fault, cells[best].operation))
        missing &= ~covers[best]
    return chosen
