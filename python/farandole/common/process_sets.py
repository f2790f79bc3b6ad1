# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Process sets: the ranks that take part in an operation.

Operations run over the global set in this version; `init(process_sets=...)` refuses anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.common import basics

if TYPE_CHECKING:
    from collections.abc import Sequence


class ProcessSet:
    """Some ranks of the world.

    Args:
        ranks: Their global ranks, in any order.

    Raises:
        ValueError: When an entry is no rank, or appears twice.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
            raise ValueError(f"a process set is made of ranks, which are whole numbers from 0: {list(ranks)!r}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"a process set names each rank once: {list(ranks)!r}")
        self._ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None
        """Number of the set once it is registered."""

    @property
    def ranks(self) -> list[int] | None:
        """Its global ranks, ascending; `None` for the global set before `init`."""
        return self._ranks

    def size(self) -> int | None:
        """Number of its ranks; `None` when it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's position in it; `None` when it is not registered.

        Raises:
            ValueError: When this process is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = basics.rank()
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not a member of {self!r}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Whether this process is a member."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __repr__(self) -> str:
        """Shows number and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of whatever world `init` finds."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        """All global ranks; `None` before `init`."""
        return list(range(basics.size())) if basics.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks."""


def require_global(process_set: ProcessSet) -> None:
    """Refuses an operation over anything but all ranks.

    Raises:
        ValueError: When `process_set` is not the global one.
    """
    if process_set is not global_process_set:
        raise ValueError(f"operations run over the global process set only in this version: {process_set!r}")
