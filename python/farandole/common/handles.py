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

Outcome: TypeAlias = "engine.Gathered | int | None"
"""The engine's result of one operation: memory it filled, a number, or nothing."""
_Reached = engine.Reached
_LOOK = 50e-6
"""Seconds between two looks at a GPU."""
Finish: TypeAlias = Callable[[list[Outcome]], Any]
"""Turns the outcomes of an operation's members into what the caller gets."""


def joined(last: int) -> int:
    """Notes that a join has completed, from where on all ranks number unnamed operations alike
    again.

    Ranks that ran out of data gave out fewer numbers than others. The native library counts, for
    its own operations and for those of every framework.

    Args:
        last: The rank that joined last.

    Returns:
        The same.
    """
    door.joined()
    return last


_Entry: TypeAlias = tuple[tuple[int, ...], Any, Finish]
"""The members of an operation that is not awaited yet, the objects that it keeps, and the function
of its result. A tuple, because there may be hundreds at a time, and each further object makes the
garbage collector run more often."""


class _Whole:
    """Makes the result of an operation whose wait was interrupted, or of which a member failed."""

    def __init__(self, finish: Finish, before: list[Any]) -> None:
        self._finish = finish
        self._before = before

    def after(self, outcomes: list[Any]) -> _Whole:
        """The same, when these members are over too."""
        return _Whole(self._finish, self._before + outcomes)

    def __call__(self, outcomes: list[Any]) -> Any:
        """Returns the result, or the first failure."""
        outcomes = self._before + outcomes
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return self._finish(outcomes)


class HandleTable:
    """The operations one framework's module has in progress, and the numbers of those it gave no
    name.

    Args:
        family: Keeps the numbered names of one module apart from those of others.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._entries: dict[int, _Entry] = {}
        self._boarding: dict[int, Any] = {}
        self._tickets = itertools.count()
        self._numbers: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(
            itertools.count
        )
        self._joins = 0
        basics.on_init(self._reset)

    def _reset(self) -> None:
        self._entries.clear()
        self._boarding.clear()
        self._numbers.clear()
        self._joins = 0

    def name(self, operation: str, name: str | None, process_set: ProcessSet | None = None) -> str:
        """Returns the name ranks agree on: the user's, or a number that counts the unnamed
        operations of this module.

        Members of a set issue its unnamed operations in the same order, so the numbers agree; every
        set has its own, since ranks are members of different ones. If the operations differ, their
        names do not, so that ranks hear of it. Call this after all checks: a refused operation must
        not use up a number.
        """
        if name is not None:
            return f"{operation}.{name}"
        if self._joins != (joins := door.joins()):
            self._joins = joins
            self._numbers.pop((), None)
        ranks = (
            ()
            if process_set is None or process_set.process_set_id == 0
            else tuple(process_set.ranks or ())
        )
        family = f"{self._family}.{self._joins}" if self._joins and not ranks else self._family
        return f"{family}.{next(self._numbers[ranks])}"

    def names(
        self, operation: str, name: str | None, count: int, process_set: ProcessSet | None = None
    ) -> list[str]:
        """Returns the names of a group's members: `<name>`, then `<name>_<i>of<n>` from the second
        on.

        The first does not tell how many there are, so ranks whose groups differ in size meet in it,
        and hear of that.

        Raises:
            ValueError: When there are none.
        """
        if count == 0:
            raise ValueError("a group must have at least one member")
        base = self.name(operation, name, process_set)
        return [base, *(f"{base}_{i}of{count}" for i in range(2, count + 1))]

    def submit(
        self, keep: Any, finish: Finish, call: Callable[..., int | list[int]], *arguments: Any
    ) -> int:
        """Starts an operation or a group of them, and keeps `keep` alive until the returned handle
        is consumed.

        From before the engine knows the first address: Ctrl-C may come between its call and the
        next line. Then the memory is kept as long as the world.

        Args:
            keep: Whatever owns the memory the engine works on.
            finish: Gets the outcomes in the order of members, one if there is no group, and makes
                the result.
            call: A function of the engine that returns a handle or several.
            *arguments: Its arguments.
        """
        ticket = next(self._tickets)
        self._boarding[ticket] = keep
        try:
            started = call(*arguments)
        except Exception:
            del self._boarding[ticket]  # refused, so not started
            raise
        members = (started,) if isinstance(started, int) else tuple(started)
        handle = members[0]
        self._entries[handle] = members, keep, finish
        del self._boarding[ticket]
        return handle

    def poll(self, handle: int) -> bool:
        """Returns whether `synchronize(handle)` would return at once.

        Raises:
            ValueError: When the handle was consumed already, or never given out.
        """
        return all(map(engine.poll, (self._entries.get(handle) or _unknown(handle))[0]))

    def synchronize(self, handle: int) -> Any:
        """Waits for an operation and returns its result.

        The handle is consumed, whether the operation succeeded or failed; Ctrl-C interrupts the
        wait and leaves it valid. Of a group whose members failed, the first failure is raised.

        Raises:
            ValueError: When the handle was consumed already, or never given out; or when ranks
                disagree about the operation.
            FarandoleInternalError: When a peer failed or the session was shut down.
        """
        members, keep, finish = self._entries.get(handle) or _unknown(handle)
        outcomes: list[Any] = []
        for member in members:
            try:
                outcome = engine.wait(member)
            except BaseException as error:
                finish = finish if isinstance(finish, _Whole) else _Whole(finish, [])
                # A failed operation is over; an interrupted wait is not, and its memory is still
                # being written.
                if not isinstance(error, Exception) or engine.is_pending(member):
                    self._entries[handle] = members[len(outcomes) :], keep, finish.after(outcomes)
                    raise
                outcome = error
            outcomes.append(self.reach(outcome) if isinstance(outcome, _Reached) else outcome)
        self._entries.pop(handle, None)
        return finish(outcomes)

    def reach(self, reached: engine.Reached) -> Outcome:
        """Waits for what a GPU is still at work on; modules with streams have their stream wait
        instead.

        Args:
            reached: What the engine returned.
        """
        while not reached.is_ready():
            time.sleep(_LOOK)
        return reached.outcome


def _unknown(handle: int) -> NoReturn:
    raise ValueError(f"no operation has this handle; each can be synchronized once: {handle!r}")


def set_number(process_set: ProcessSet) -> int:
    """Returns the engine's number of a process set.

    Raises:
        ValueError: When it is not registered.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"process set is not registered: {process_set!r}")
    return process_set.process_set_id


def members_of(process_set: ProcessSet) -> list[int]:
    """Returns the global ranks of a registered process set, ascending.

    Raises:
        ValueError: When it is not registered, or before `init`.
    """
    set_number(process_set)
    ranks = process_set.ranks
    return list(range(basics.size())) if ranks is None else ranks


def own_rows(rows: int, process_set: ProcessSet) -> int:
    """Returns this rank's share of `rows`: the same for all ranks, plus one on the first ranks if
    rows remain.

    Raises:
        ValueError: When the set is not registered, or this rank is not a member.
    """
    members = members_of(process_set)
    rank = basics.rank()
    if rank not in members:
        raise ValueError(f"rank {rank} is not a member of {process_set!r}")
    base, extra = divmod(rows, len(members))
    return base + (members.index(rank) < extra)
