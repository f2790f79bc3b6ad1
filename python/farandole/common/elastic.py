# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Training that survives a changed world: state that is committed, restored and spread, and the loop around it."""

from __future__ import annotations

import functools
import queue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from farandole._native import engine
from farandole.common import basics, notices
from farandole.common.exceptions import FarandoleInternalError, FarandoleUsageError, HostsUpdatedInterrupt
from farandole.common.notices import leave

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

__all__ = ["HostUpdateResult", "ObjectState", "Reader", "State", "leave", "leave_and_join", "run_fn"]

ATTEMPTS = 3
"""Worlds in a row that may fail before one of them has committed: then the failure is not of a passing kind."""


class HostUpdateResult:
    """What happened to the set of hosts: bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What training needs to go on elsewhere: kept in memory, put back after a failure, spread from rank 0.

    Args:
        bcast_object: Sends an object from rank 0 to all ranks.
        get_rank: Tells this rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Has functions called after every change of the world, e.g. to scale the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Takes note of a new world."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Takes note of a changed set of hosts; `check_host_updates` tells all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keeps the state as it is, to come back to after a failure, and looks for changed hosts.

        Raises:
            HostsUpdatedInterrupt: On all ranks, when hosts came or went.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Asks rank 0 whether the set of hosts has changed; every rank calls this equally often.

        Raises:
            HostsUpdatedInterrupt: On all ranks, when hosts came or went.
        """
        for at, change in engine.host_changes():
            self.on_hosts_updated(at, change)
        latest, changes = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest, changes = timestamp, changes | change
        previous, latest, changes = self._bcast_object((self._last_updated_timestamp, latest, changes))
        self._last_updated_timestamp = latest
        if latest > previous:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def save(self) -> None:
        """Keeps the state as it is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Puts the state back that was kept last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Spreads the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts to a new world; nothing to do by default."""


@runtime_checkable
class Reader(Protocol):
    """Deals a data set out among the ranks: a state keeps where it is, and has it follow the world."""

    def state_dict(self) -> dict[str, Any]:
        """Where training is in the data, the same on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken."""
        ...

    def follow_world(self) -> None:
        """Deals out among the ranks of the world as it is now."""
        ...


class ObjectState(State):
    """State of plain objects, one attribute for each keyword.

    Of a reader, such as a loader of `farandole.data`, its position is kept: each row of an epoch counts once, whatever
    happens to the world.

    Args:
        bcast_object: Sends an object from rank 0 to all ranks.
        get_rank: Tells this rank.
        **kwargs: Attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Keeps the attributes: the objects themselves, not copies; of readers, their positions."""
        self._saved_state = {name: _kept(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Puts the attributes back that were kept last, and readers to their positions."""
        for name, value in self._saved_state.items():
            if isinstance(value, _Position):
                getattr(self, name).load_state_dict(value.state)
            else:
                setattr(self, name, value)

    def sync(self) -> None:
        """Spreads the attributes of rank 0 as they are now, and keeps them."""
        ObjectState.save(self)
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def on_reset(self) -> None:
        """Takes note of a new world, also on behalf of readers."""
        for name in self._saved_state:
            reader = getattr(self, name)
            if isinstance(reader, Reader):
                reader.follow_world()
        super().on_reset()


class _Position:
    """Where a reader is."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def _kept(value: Any) -> Any:
    return _Position(value.state_dict()) if isinstance(value, Reader) else value


def run_fn(func: Callable[..., _Result], reset: Callable[[], None]) -> Callable[..., _Result]:
    """Wraps a training function so that it is called again in a new world when the old one fails or changes.

    While it runs, SIGTERM and SIGPWR have a worker of an elastic job leave at its next commit; a second one ends it.

    Args:
        func: Takes a `State` first; goes on from there.
        reset: Leaves the old world and joins the new one.

    Returns:
        A function of the same arguments and result.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        with notices.heeded():
            return repeated(state, *args, **kwargs)

    def repeated(state: State, *args: Any, **kwargs: Any) -> _Result:
        failures, commits = 0, state._commits  # noqa: SLF001 - its own module's
        while True:
            try:
                # Always, also when hosts only went: were newcomers to come as well, they would wait for those who skip.
                state.sync()
                return func(state, *args, **kwargs)
            except FarandoleUsageError:
                raise  # another world would refuse it too
            except FarandoleInternalError:
                if state._commits != commits:  # noqa: SLF001 - its own module's
                    failures, commits = 0, state._commits  # noqa: SLF001 - its own module's
                failures += 1
                if failures > ATTEMPTS:
                    raise
                state.restore()
            except HostsUpdatedInterrupt:
                # What was done since the last commit is not lost.
                state.save()
            reset()
            state.on_reset()

    return wrapper


def leave_and_join() -> None:
    """Leaves the world and joins the one that follows."""
    basics.shutdown()
    basics.init()
