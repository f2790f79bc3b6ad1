# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The members of groups of torch.distributed, as process sets of the engine.

A group needs only its members, so the groups are member sets: the lowest rank reserves a channel
and publishes it in the store of the default group, and all members link themselves in a thread of
their own. So ranks may create groups in any order. Groups with the same members share a set. It
ends with the session.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from farandole._native import engine
from farandole.common import basics
from farandole.common.termination_notices import is_elastic_worker
from farandole.numpy.plain_value_exchange import broadcast_plain
from farandole.torch.distributed._work import OperationTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SHORTEST_STORE_POLL: Final = 0.0005
_LONGEST_STORE_POLL: Final = 0.05
"""Seconds between two looks at the store."""


class WorldStore:
    """The store of the default group, with keys of this world only.

    A store may outlive a world, so all keys begin with a name that no other world has.

    Args:
        store: The store of torch.
        prefix: Name of the world.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def _full_key(self, key: str) -> str:
        return f"farandole/{self._prefix}/{key}"

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        self._store.set(self._full_key(key), value)

    def add(self, key: str, value: int) -> int:
        """Adds to the number under a key, which is 0 at first; returns the sum."""
        return self._store.add(self._full_key(key), value)

    def contains(self, key: str) -> bool:
        """Returns whether a key has a value."""
        return self._store.check([self._full_key(key)])

    def get(self, key: str) -> str:
        """Returns the value of a key, which must have one."""
        return self._store.get(self._full_key(key)).decode()

    def set_if_absent(self, key: str, value: str) -> bool:
        """Sets a key if it has no value; returns whether this call has set it."""
        held = self._store.compare_set(self._full_key(key), "", value)
        return (held.decode() if isinstance(held, bytes) else held) == value

    def wait_for_key(self, key: str, end: float) -> bool:
        """Waits until a key has a value; returns whether it has one at `end`.

        The store is polled: a blocking wait of torch's stores keeps all other threads out.

        Args:
            key: The key.
            end: Latest end, in seconds of the monotonic clock.
        """
        pause = _SHORTEST_STORE_POLL
        while not self.contains(key):
            if time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_STORE_POLL)
        return True


class MemberSetOpening:
    """A process set whose members are being linked, in a thread of its own.

    Args:
        ranks: The global ranks, ascending.
        store: The store of the members.
        limit: Longest time in seconds.
    """

    def __init__(self, ranks: tuple[int, ...], store: WorldStore, limit: float) -> None:
        self._ranks = ranks
        self._store = store
        self._limit = limit
        self._number: int | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[int | Exception], None]] = []
        if len(ranks) == basics.size():
            self._number = 0
            self._over.set()
        else:
            threading.Thread(target=self._link_members, name="farandole-group", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether the number of the process set is known."""
        return self._number is not None

    def wait_for_number(self) -> int:
        """Waits for the members; returns the number of the process set.

        Raises:
            OperationTimeoutError: A member has not created the group in time.
            FarandoleInternalError: A member failed, or the session was shut down.
        """
        if self._number is None:
            self._over.wait()
        if self._failure is not None:
            raise self._failure
        assert self._number is not None  # noqa: S101 - set before `_over`
        return self._number

    def call_when_open(self, callback: Callable[[int | Exception], None]) -> None:
        """Calls a function with the number of the process set, or the error; at once if the set is
        open.
        """
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback(self._outcome())

    def _outcome(self) -> int | Exception:
        return self._number if self._number is not None else self._failure or RuntimeError()

    def _link_members(self) -> None:
        try:
            self._number = self._add_set_on_agreed_channel()
        except Exception as error:  # noqa: BLE001 - raised by all waiters
            self._failure = error
        with self._lock:
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self._outcome())

    def _add_set_on_agreed_channel(self) -> int:
        end = time.monotonic() + self._limit
        ranks = ",".join(map(str, self._ranks))
        key = f"set/{_hash_ranks(self._ranks)}"
        if basics.rank() == self._ranks[0]:
            self._store.set(key, str(engine.reserve_set_channel()))
        elif not self._store.wait_for_key(key, end):
            raise OperationTimeoutError(
                f"rank {self._ranks[0]} did not create the group of ranks {ranks}, or send to this "
                f"rank, within {self._limit:.3f} s: all members of a group must create it"
            )
        channel = int(self._store.get(key))
        try:
            return engine.add_member_set(
                list(self._ranks), channel, max(0.0, end - time.monotonic())
            )
        except Exception as error:
            if time.monotonic() < end:
                raise
            raise OperationTimeoutError(
                f"not all ranks of {ranks} created their group within {self._limit:.3f} s: {error}"
            ) from error


_openings: dict[tuple[int, ...], MemberSetOpening] = {}
_openings_lock = threading.Lock()
_group_counts: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)
_world_store: WorldStore | None = None
_world_name: str | None = None


def _forget_world() -> None:
    global _world_store, _world_name  # noqa: PLW0603 - one world a process
    _openings.clear()
    _group_counts.clear()
    _world_store = _world_name = None


basics.call_on_each_init(_forget_world)


def ensure_session_started() -> None:
    """Starts the session, with sets that can be registered any time, unless it has started
    already.
    """
    if not basics.is_initialized():
        basics.init(process_sets="dynamic")


def set_world_store(store: Any, name: str | None = None) -> WorldStore:
    """Sets the store through which the members of groups find each other. Every rank of the world
    calls it.

    Args:
        store: The store of torch.
        name: A name that no other world with this store has; by default, the ranks agree on one.
    """
    global _world_store, _world_name  # noqa: PLW0603 - one world a process
    if name is None and is_elastic_worker():
        # No collective: a rank that is lost meanwhile would end new ranks with an error.
        name = f"generation{engine.world().generation}"
    if name is None and basics.size() > 1:
        if _world_name is None:
            _world_name = broadcast_plain(
                secrets.token_hex(8) if basics.rank() == 0 else None, 0, "distributed.world"
            )
        name = _world_name
    _world_store = WorldStore(store, name or "alone")
    return _world_store


def current_world_store() -> WorldStore:
    """Returns the store of this world.

    Raises:
        ValueError: There is no default group of backend farandole.
    """
    if _world_store is None:
        raise ValueError("groups of backend farandole need a default group of backend farandole")
    return _world_store


def count_and_name_group(members: list[int]) -> str:
    """Returns the name of the next group of these members, equal on all of them.

    torch's own names count all groups of a process, so ranks with different groups disagree.
    """
    return f"{_hash_ranks(members)}.{next(_group_counts[tuple(members)])}"


def _hash_ranks(ranks: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:24]


def start_opening_member_set(ranks: tuple[int, ...], limit: float) -> MemberSetOpening:
    """Starts linking a group's members, unless it has started already.

    Args:
        ranks: The global ranks, ascending, with this one.
        limit: Longest time in seconds.
    """
    with _openings_lock:
        opening = _openings.get(ranks)
        if opening is None:
            opening = _openings[ranks] = MemberSetOpening(ranks, current_world_store(), limit)
        return opening
