# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Barriers that name the ranks that did not come.

A rank that waits long writes a mark into the store of the group. When the time is over, the ranks
without a mark are the missing ones.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from farandole.torch.distributed._work import FarandoleWork, OperationTimeoutError

if TYPE_CHECKING:
    from datetime import timedelta

    from farandole.torch.distributed._completion import BackgroundCompleter
    from farandole.torch.distributed._groups import WorldStore
    from farandole.torch.distributed._work import PendingOperation

_MARK_DELAY: Final = 0.5
"""Seconds after which a rank that waits in a barrier writes its mark."""
_VERDICT_GRACE_PERIOD: Final = 2.0
"""Seconds that a rank waits longer for the verdict of rank 0, if rank 0 has come."""


class BarrierMarkScope(NamedTuple):
    """The marks of the barriers of a group.

    Attributes:
        store: The store of the members; `None` if the group has no members yet.
        name: A name that is unique in the store.
        rank: This process's rank in the group.
        members: The global ranks of the members.
    """

    store: WorldStore | None
    name: str
    rank: int
    members: list[int]


class BarrierWork(FarandoleWork):
    """A barrier in progress.

    Args:
        pending: The operation.
        completer: Like in `FarandoleWork`.
        timeout: Limit of a wait.
        number: Number of the operation in its group.
        scope: Scope of the marks.
    """

    def __init__(
        self,
        pending: PendingOperation,
        completer: BackgroundCompleter,
        timeout: timedelta,
        number: int,
        scope: BarrierMarkScope,
    ) -> None:
        super().__init__(pending, [], completer, timeout, number)
        self._scope = scope

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until every member has called the barrier.

        Args:
            timeout: Longest wait; by default, the timeout of the barrier.

        Raises:
            OperationTimeoutError: A member has not called it in time; the error names the ranks.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        limit = timeout or self._limit
        seconds = limit.total_seconds()
        if not self._pending.wait_until_over(min(_MARK_DELAY, seconds / 2)):
            self._write_arrival_mark()
            self._pending.wait_until_over(seconds - min(_MARK_DELAY, seconds / 2))
        return super().wait(limit if self._pending.done else type(limit)(microseconds=1))

    def _mark_key(self, rank: int) -> str:
        return f"barrier/{self._scope.name}/{self._number}/{rank}"

    def _write_arrival_mark(self) -> None:
        store, _, rank, _ = self._scope
        if store is not None:
            store.set(self._mark_key(rank), "here")

    def _describe_timeout(self, limit: timedelta) -> str:
        store, _, _, members = self._scope
        if store is None:
            return super()._describe_timeout(limit)
        # Ranks that came just before have not written their marks yet.
        if self._pending.wait_until_over(_MARK_DELAY):
            return f"the barrier needed more than {self._limit.total_seconds():.3f} s"
        missing = [
            member
            for rank, member in enumerate(members)
            if not store.contains(self._mark_key(rank))
        ]
        return (
            f"barrier {self._number} of the group did not complete within "
            f"{self._limit.total_seconds():.3f} s: rank {_format_ranks(missing)} did not call it"
        )


def run_monitored_barrier(
    scope: BarrierMarkScope, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Returns when all members have called it.

    Rank 0 of the group collects the marks of all members and publishes its verdict.

    Args:
        scope: Scope of the marks; equal on all members except the rank.
        timeout: Longest wait.
        wait_all_ranks: Whether rank 0 names all missing ranks, not only the first one.

    Raises:
        OperationTimeoutError: A member did not come in time; on rank 0, the error names it.
    """
    store, name, rank, members = scope
    if store is None:
        raise ValueError("monitored_barrier needs a group with members: call reconfigure() first")
    seconds = timeout.total_seconds()
    end = time.monotonic() + seconds
    key = f"monitored/{name}"
    store.set(f"{key}/{rank}", "here")
    if rank == 0:
        missing = []
        for other in range(1, len(members)):
            if not store.wait_for_key(f"{key}/{other}", end):
                missing.append(members[other])
                if not wait_all_ranks:
                    break
        store.set(f"{key}/verdict", json.dumps(missing))
        if missing:
            raise OperationTimeoutError(
                f"Rank {_format_ranks(missing)} failed to pass monitoredBarrier in "
                f"{seconds:.3f} s: the rank did not call monitored_barrier, or is lost"
            )
        return
    verdict = f"{key}/verdict"
    if not store.wait_for_key(verdict, end) and not (
        store.contains(f"{key}/0")
        and store.wait_for_key(verdict, time.monotonic() + _VERDICT_GRACE_PERIOD)
    ):
        raise OperationTimeoutError(
            f"Rank {members[rank]} waited {seconds:.3f} s in monitoredBarrier for rank "
            f"{members[0]}, which did not call it or still waits for other ranks"
        )
    missing = json.loads(store.get(verdict))
    if missing:
        raise OperationTimeoutError(
            f"Rank {members[rank]} reached monitoredBarrier, but rank {_format_ranks(missing)} did "
            f"not within the timeout of rank {members[0]}"
        )


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "?"
