# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Handles of operations in progress, for all frameworks.

The engine writes to addresses without the GIL. So this table keeps the objects that own the memory
until the engine has finished, also if the caller drops them or Ctrl-C ends a wait.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from farandole._native import door, engine
from farandole.common import basics

if TYPE_CHECKING:
    from farandole.common.process_sets import ProcessSet

Outcome: TypeAlias = "engine.GatheredTensor | int | None"
"""The engine's result of one operation: memory it filled, a number, or nothing."""
_Reached = engine.PendingDeviceResult
_GPU_POLL_INTERVAL = 50e-6
"""Seconds between two polls of a GPU."""
Finish: TypeAlias = Callable[[list[Outcome]], Any]
"""Converts the outcomes of an operation's members to the result for the caller."""


def reset_numbers_after_join(last: int) -> int:
    """Records that a join has completed: all ranks restart the numbers of unnamed operations.

    Ranks that ran out of data have used fewer numbers than others. The native library counts the
    joins, because its operations and the operations of every framework restart their numbers.

    Args:
        last: The rank that joined last.

    Returns:
        The same rank.
    """
    door.note_all_joined()
    return last


_Entry: TypeAlias = tuple[tuple[int, ...], Any, Finish]
"""The members of an operation that is not awaited yet, the objects that it keeps, and the function
of its result. A tuple, because there may be hundreds at a time, and each further object makes the
garbage collector run more often."""


class _ResumableGroupFinish:
    """Makes the result of an operation if a member failed or the wait was interrupted."""

    def __init__(self, finish: Finish, before: list[Any]) -> None:
        self._finish = finish
        self._known_outcomes = before

    def with_member_outcomes(self, outcomes: list[Any]) -> _ResumableGroupFinish:
        """Returns a copy that has the outcomes of further members."""
        return _ResumableGroupFinish(self._finish, self._known_outcomes + outcomes)

    def __call__(self, outcomes: list[Any]) -> Any:
        """Returns the result, or the first failure."""
        outcomes = self._known_outcomes + outcomes
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return self._finish(outcomes)


class HandleTable:
    """The operations of one framework's module that are in progress, and the numbers of its unnamed
    operations.

    Args:
        family: Prefix of numbered names, which keeps the names of different modules distinct.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._entries: dict[int, _Entry] = {}
        self._submitting: dict[int, Any] = {}
        self._submission_numbers = itertools.count()
        self._numbers: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(
            itertools.count
        )
        self._join_count = 0
        basics.call_on_each_init(self._reset_for_world)

    def _reset_for_world(self) -> None:
        self._entries.clear()
        self._submitting.clear()
        self._numbers.clear()
        self._join_count = 0

    def operation_name(
        self, operation: str, name: str | None, process_set: ProcessSet | None = None
    ) -> str:
        """Returns the name of an operation: the user's, or a number that counts the unnamed
        operations of this module.

        Members of a set issue its unnamed operations in the same order, so the numbers agree. Every
        set has its own numbers, because ranks are members of different sets. A numbered name does
        not contain the operation: if ranks call different operations, the names match and the
        engine reports the mismatch. Call this after all checks: a refused operation must not use up
        a number.
        """
        if name is not None:
            return f"{operation}.{name}"
        if self._join_count != (joins := door.completed_join_count()):
            self._join_count = joins
            self._numbers.pop((), None)
        ranks = (
            ()
            if process_set is None or process_set.process_set_id == 0
            else tuple(process_set.ranks or ())
        )
        family = (
            f"{self._family}.{self._join_count}" if self._join_count and not ranks else self._family
        )
        return f"{family}.{next(self._numbers[ranks])}"

    def group_member_names(
        self, operation: str, name: str | None, count: int, process_set: ProcessSet | None = None
    ) -> list[str]:
        """Returns the names of a group's members: `<name>`, then `<name>_<i>of<n>` from the second
        on.

        The first name has no size, so ranks with groups of different sizes match on it and report
        the mismatch.

        Raises:
            ValueError: When there are no members.
        """
        if count == 0:
            raise ValueError("a group must have at least one member")
        base = self.operation_name(operation, name, process_set)
        return [base, *(f"{base}_{i}of{count}" for i in range(2, count + 1))]

    def submit_operation(
        self, keep: Any, finish: Finish, call: Callable[..., int | list[int]], *arguments: Any
    ) -> int:
        """Starts an operation or a group of them, and keeps `keep` alive until the returned handle
        is consumed.

        `keep` is stored before the engine gets the first address, because Ctrl-C may come between
        the engine's call and the next line. Then the memory is kept until the world ends.

        Args:
            keep: The owner of the memory that the engine uses.
            finish: Takes the outcomes in the order of members (one outcome without a group), and
                returns the result.
            call: A function of the engine that returns one handle or several.
            *arguments: Arguments of `call`.
        """
        ticket = next(self._submission_numbers)
        self._submitting[ticket] = keep
        try:
            started = call(*arguments)
        except Exception:
            del self._submitting[ticket]  # refused, so not started
            raise
        members = (started,) if isinstance(started, int) else tuple(started)
        handle = members[0]
        self._entries[handle] = members, keep, finish
        del self._submitting[ticket]
        return handle

    def poll(self, handle: int) -> bool:
        """Returns whether `synchronize(handle)` would return at once.

        Raises:
            ValueError: When the handle was consumed already, or never given out.
        """
        return all(
            map(engine.poll, (self._entries.get(handle) or _raise_unknown_handle(handle))[0])
        )

    def synchronize(self, handle: int, timeout: float | None = None) -> Any:
        """Waits for an operation and returns its result.

        The handle is consumed, whether the operation succeeded or failed; Ctrl-C interrupts the
        wait and leaves it valid. Of a group whose members failed, the first failure is raised.

        Args:
            handle: The handle.
            timeout: Longest wait in seconds; `None` for no limit.

        Raises:
            TimeoutError: When the wait took longer than `timeout`; the handle stays valid.
            ValueError: When the handle was consumed already, or never given out; or when ranks
                disagree about the operation.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        members, keep, finish = self._entries.get(handle) or _raise_unknown_handle(handle)
        outcomes: list[Any] = []
        end = None if timeout is None else time.monotonic() + timeout
        for member in members:
            try:
                outcome = engine.wait(
                    member, None if end is None else max(0.0, end - time.monotonic())
                )
            except BaseException as error:
                finish = (
                    finish
                    if isinstance(finish, _ResumableGroupFinish)
                    else _ResumableGroupFinish(finish, [])
                )
                # A failed operation is over. An operation whose wait was interrupted or has timed
                # out is not: its memory is still being written.
                waits_on = isinstance(error, TimeoutError) or not isinstance(error, Exception)
                if waits_on or engine.is_pending(member):
                    self._entries[handle] = (
                        members[len(outcomes) :],
                        keep,
                        finish.with_member_outcomes(outcomes),
                    )
                    raise
                outcome = error
            outcomes.append(
                self.wait_for_gpu_result(outcome) if isinstance(outcome, _Reached) else outcome
            )
        self._entries.pop(handle, None)
        return finish(outcomes)

    def wait_for_gpu_result(self, reached: engine.PendingDeviceResult) -> Outcome:
        """Waits until a GPU has computed a result; modules with streams make their stream wait
        instead.

        Args:
            reached: The result that the engine returned.
        """
        while not reached.is_ready():
            time.sleep(_GPU_POLL_INTERVAL)
        return reached.outcome


def _raise_unknown_handle(handle: int) -> NoReturn:
    raise ValueError(f"no operation has this handle; each can be synchronized once: {handle!r}")


def process_set_number(process_set: ProcessSet) -> int:
    """Returns the engine's number of a process set.

    Raises:
        ValueError: When it is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"process set is not registered: {process_set!r}")
    return process_set.process_set_id


def member_ranks(process_set: ProcessSet) -> list[int]:
    """Returns the global ranks of a registered process set, ascending.

    Raises:
        ValueError: When it is not registered, or before `init`.
    """
    process_set_number(process_set)
    ranks = process_set.ranks
    return list(range(basics.size())) if ranks is None else ranks


def row_count_of_this_rank(rows: int, process_set: ProcessSet) -> int:
    """Returns this rank's share of `rows`: the same for all ranks, plus one on the first ranks if
    rows remain.

    Raises:
        ValueError: When the set is not registered, or this rank is not a member.
    """
    members = member_ranks(process_set)
    rank = basics.rank()
    if rank not in members:
        raise ValueError(f"rank {rank} is not a member of {process_set!r}")
    base, extra = divmod(rows, len(members))
    return base + (members.index(rank) < extra)
