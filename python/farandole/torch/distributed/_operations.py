# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The common parts of a group's operations: their names, their works, and batches of them.

Operations are named by their number in the group, because ranks start the operations of a group in
one order. If they do not, the engine raises an error that shows what each rank submitted.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from farandole.torch.distributed._completion import BackgroundCompleter
from farandole.torch.distributed._direct_group import BackendBase, CopyableOptions
from farandole.torch.distributed._work import CombinedWork, FarandoleWork, PendingOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from farandole.torch.distributed._groups import MemberSetOpening, WorldStore

Tensors = list[torch.Tensor]


class GroupOperations(BackendBase):
    """The state of a group's operations.

    Args:
        rank: This process's number in the group.
        members: The global ranks, in the order of the group.
        opening: The process set of the members; `None` if there is no world yet.
        store: The store of the members; `None` as above.
        name: Keeps the names of this group's operations apart.
        timeout: Limit of each operation.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        opening: MemberSetOpening | None,
        store: WorldStore | None,
        name: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, len(members))
        self._rank = rank
        self._size = len(members)
        self._members = list(members)
        self._opening = opening
        self._store = store
        self._name = f"torch.distributed.{name}"
        self._limit = timeout
        self._options = CopyableOptions("farandole", timeout)
        self._operation_numbers = itertools.count()
        self._operation_count = 0
        self._completer = BackgroundCompleter()
        self._local = threading.local()
        self._engine_order = (
            None
            if self._members == sorted(self._members)
            else sorted(range(self._size), key=self._members.__getitem__)
        )
        """The ranks of the group in the order of the engine, which is ascending by global ranks;
        `None` if the order of the group is ascending, too."""

    @property
    def _member_set_number(self) -> int:
        """The number of the process set; waits for its members."""
        assert self._opening is not None  # noqa: S101 - a group without a world has refused before
        return self._opening.wait_for_number()

    def _reorder_for_group(
        self, whole: torch.Tensor, rows: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns elements of all members, and their numbers, in the order of the group."""
        if self._engine_order is None:
            return whole, rows
        parts = dict(zip(self._engine_order, whole.split(rows), strict=True))
        counts = dict(zip(self._engine_order, rows, strict=True))
        ranks = range(self._size)
        return torch.cat([parts[rank] for rank in ranks]), [counts[rank] for rank in ranks]

    def _reorder_for_engine(
        self, whole: torch.Tensor, rows: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns elements for all members, and their numbers, in the order of the engine."""
        if self._engine_order is None or not len(whole):
            return whole, [rows[rank] for rank in self._engine_order or range(self._size)]
        parts = whole.split(rows)
        return (
            torch.cat([parts[rank] for rank in self._engine_order]),
            [rows[rank] for rank in self._engine_order],
        )

    @staticmethod
    def _is_waited_at_once(opts: Any) -> bool:
        """Returns whether the caller waits at once; not known in torch 2.6."""
        return not getattr(opts, "asyncOp", True)

    def _next_name(self) -> str:
        self._operation_count += 1
        return f"{self._name}.{next(self._operation_numbers)}"

    def _submit_work(
        self,
        submission: tuple[Any, ...],
        keep: Any,
        finish: Callable[[list[Any]], None],
        outputs: Tensors,
    ) -> FarandoleWork:
        with _profiled_operation(submission[0].__name__) as end_of_event:
            pending = PendingOperation(submission, keep, finish)
            return self._note_work(self._make_work(pending, outputs), end_of_event)

    def _make_work(self, pending: PendingOperation, outputs: Tensors) -> FarandoleWork:
        return FarandoleWork(pending, outputs, self._completer, self._limit, self._operation_count)

    def _note_work(self, work: Any, end_of_event: Callable[[Any], None] | None = None) -> Any:
        """Notes a work for `last_work` and the batch in progress."""
        if end_of_event is not None:
            end_of_event(work)
        self._local.work = weakref.ref(work)
        batch = getattr(self._local, "batch", None)
        if batch is not None:
            batch.append(work)
        return work

    def _combine_works(self, works: Sequence[Any]) -> CombinedWork:
        combined = CombinedWork(works)
        self._local.work = weakref.ref(combined)
        return combined

    def forget_last_work(self) -> None:
        """Forgets the last work of this thread."""
        self._local.work = None

    def last_work(self) -> Any:
        """Returns the last work of this thread, or `None`."""
        found = getattr(self._local, "work", None)
        return None if found is None else found()

    def start_coalescing(self) -> None:
        """Begins a batch of this thread's operations."""
        self._local.batch = []

    def end_coalescing(self) -> CombinedWork:
        """Ends the batch; returns the work of all its operations."""
        batch, self._local.batch = getattr(self._local, "batch", None), None
        return self._combine_works(batch or [])


@contextlib.contextmanager
def _profiled_operation(name: str) -> Iterator[Callable[[Any], None] | None]:
    """Begins an event of torch's profiler; yields the function that lets it end with a work."""
    if not torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public name for it
        yield None
        return
    event = torch.profiler.record_function(f"farandole:{name}")
    event.__enter__()

    def end_with_work(work: Any) -> None:
        event._call_end_callbacks_on_future(work.get_future())  # noqa: SLF001 - as torch's RPC does

    try:
        yield end_with_work
    except BaseException:
        event.__exit__(None, None, None)
        raise
