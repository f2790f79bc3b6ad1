# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The trouble grid: what happens to a store while it is used, and what must hold.

Three factors make a cell: the place, the operation under way, the trouble.

| trouble | what is done | what must hold |
| --- | --- | --- |
| busy | every request is answered by 503 for some seconds | the operation goes on |
| refused | the service refuses connections for some seconds | the same |
| reset | connections are reset for some seconds | the same |
| silent | nothing is answered for some seconds | the same |
| slow | 1 MiB passes in a second | the same |
| full | writes fail with ENOSPC | reads go on; writes end in an error that names the place; `gc` goes on where an empty file can be created |
| quota | writes fail with EDQUOT | the same |
| unreadable | reads and lookups fail with EIO | an error that names the place, and no "is not there" |
| stale | the same with ESTALE | the same |
| unconnected | the same with ENOTCONN | the same |
| expired | every request is refused: its token has expired | the same |
| skewed | the server's clock is four minutes ahead | the operation goes on, what is in use stays |

In every cell: what was there before is there after, whole, and the operation works once the trouble
is over.

Not possible, and no cells:

- the troubles of connections and credentials, on file systems; a mount can be silent, however.
- the errors of file systems, in object stores and HDFS.
- on the local file system, everything but a full disk: the disk itself is not at hand, and the mount
  takes the same way through the code.
- on HDFS, everything but silence, because no proxy speaks its protocol.
- a skewed clock where no time is compared.
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Final

SERVICES: Final = ("s3", "gcs", "azure")
PLACES: Final = (*SERVICES, "hdfs", "local", "mount")
OPERATIONS: Final = (
    "read", "prepare", "checkpoint", "commit", "resume", "lease", "gc", "saved model",
)  # fmt: skip
READING: Final = ("read", "resume")
"""Operations that write nothing."""
PASSING: Final = ("busy", "refused", "reset", "silent", "slow", "skewed")
"""Troubles in which an operation goes on."""
FULL: Final = ("full", "quota")
UNREADABLE: Final = ("unreadable", "stale", "unconnected")
TROUBLES: Final = (*PASSING, *FULL, *UNREADABLE, "expired")
_POSSIBLE: Final = {
    **dict.fromkeys(SERVICES, ("busy", "refused", "reset", "silent", "slow", "expired")),
    "hdfs": ("silent",),
    "local": ("full",),
    "mount": ("silent", *FULL, *UNREADABLE, "skewed"),
}


@dataclass(frozen=True)
class Cell:
    """One cell."""

    place: str
    operation: str
    trouble: str

    def __str__(self) -> str:
        return f"{self.place}-{self.operation}-{self.trouble}"

    @property
    def kind(self) -> str:
        """Kind of the trouble, which similar troubles share."""
        kinds = {"passing": PASSING, "full": FULL, "unreadable": UNREADABLE}
        return next((kind for kind, ones in kinds.items() if self.trouble in ones), self.trouble)

    @property
    def goes_on(self) -> bool:
        """Whether the operation must end well."""
        writes_nothing = self.trouble in FULL and self.operation in READING
        # The lease of `gc` can be an empty file. The mount refuses to create files.
        frees_room = self.trouble in FULL and self.operation == "gc" and self.place == "local"
        return self.trouble in PASSING or writes_nothing or frees_room


def is_possible(cell: Cell) -> bool:
    """Returns whether the trouble can happen there."""
    if cell.trouble == "skewed" and cell.operation not in ("lease", "gc", "commit"):
        return False
    return cell.trouble in _POSSIBLE[cell.place]


def every_cell() -> list[Cell]:
    """The whole grid, in a fixed order."""
    cells = (Cell(*values) for values in product(PLACES, OPERATIONS, TROUBLES))
    return [cell for cell in cells if is_possible(cell)]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Cells of which some cover every pair of place and trouble, of place and operation, and of
    operation and kind of trouble: greedily, so few, and always the same ones.
    """

    def pairs(cell: Cell) -> set[tuple[str, str]]:
        return {
            (cell.place, cell.trouble),
            (cell.place, cell.operation),
            (cell.operation, cell.kind),
        }

    missing = set().union(*map(pairs, cells))
    met: Counter[str] = Counter()
    chosen: list[Cell] = []
    while missing:
        # Among equals, what was met least.
        worth = [(len(pairs(one) & missing), -met[one.place], -met[one.trouble]) for one in cells]
        best = cells[worth.index(max(worth))]
        chosen.append(best)
        met.update((best.place, best.trouble))
        missing -= pairs(best)
    return chosen
