# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups whose members change: `init_process_group("farandole", enable_reconfigure=True)`, since
torch 2.15.

The program must find the members. They exchange handles and agree on a number that was not used
before. Each then calls `reconfigure` with the number and all handles, and forms a new world with
the others:

    member 0    claims the number, holds a registrar ── ticket, by the group's store ──┐
    the others  wait for the ticket ◀──────────────────────────────────────────────────┘
    all         leave their world, form that of the registrar, whose ranks are the positions of the
                handles

Invariants:

- RC-1: A number names one world. Member 0 claims it in the store, so a second list of members
  cannot use it.
- RC-2: A member joins only a world of the list that it was given: the ticket comes with a digest of
  the list.
- RC-3: The registrar admits each rank once, so no other process is in the world.
- RC-4: A call that is refused before the ticket has come leaves the world as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleEnvironmentError, FarandoleUsageError
from farandole.common.process_sets import global_process_set
from farandole.torch.distributed._backend import FarandoleBackend
from farandole.torch.distributed._work import Done

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._C._distributed_c10d import Work

_NAME: Final = "farandole"
_NEVER: Final = -1
"""The number of a process that was in no world yet."""
_SLICE: Final = 1.0
"""Seconds of one look into the store: between two of them a signal is noticed."""


@dataclass(frozen=True)
class Handle:
    """The data about each other that the members of the next world have.

    Attributes:
        uuid: Number of the world that the process is in; -1 before its first one.
        rank: Its rank there.
        instance: Tells it from all other processes.
        host: Where it is.
    """

    uuid: int
    rank: int
    instance: str
    host: str

    def __str__(self) -> str:
        """Returns the text that torch passes on."""
        return f"{_NAME}:{self.uuid}:{self.rank}:{self.instance}:{self.host}"

    @staticmethod
    def parse(text: str) -> Handle:
        """Inverts `str`.

        Raises:
            FarandoleUsageError: It is no handle of this backend.
        """
        parts = text.split(":", 4)
        try:
            name, uuid, rank, instance, host = parts
            handle = Handle(int(uuid), int(rank), instance, host)
        except ValueError:
            raise FarandoleUsageError(
                f"not a reconfigure handle of backend {_NAME}: {text!r}"
            ) from None
        if name != _NAME:
            raise FarandoleUsageError(f"not a reconfigure handle of backend {_NAME}: {text!r}")
        return handle


def ordered(handles: Iterable[str]) -> list[str]:
    """Returns the members by rank: the order of a list; for a set, old members first, by their
    ranks.

    Raises:
        FarandoleUsageError: There are none, one is there twice, or is no handle of this backend.
    """
    members = list(handles)
    parsed = {text: Handle.parse(text) for text in members}
    if not members:
        raise FarandoleUsageError("reconfigure needs at least one handle")
    if len(parsed) != len(members):
        raise FarandoleUsageError(f"reconfigure needs different handles: {members}")
    if isinstance(handles, set | frozenset):
        members.sort(
            key=lambda text: (parsed[text].uuid == _NEVER, parsed[text].rank, parsed[text].instance)
        )
    return members


class ReconfigurableBackend(FarandoleBackend):
    """A group that has no world before its first `reconfigure`, and another one after each.

    Args:
        rank: As given to torch.
        size: As given to torch.
        name: Keeps the names of this group's operations apart.
        store: Carries tickets; every member reaches it, whatever the world.
        timeout: Limit of `reconfigure` for the wait for other members, unless the call gives one.
    """

    def __init__(self, rank: int, size: int, name: str, store: Any, timeout: timedelta) -> None:
        super().__init__(rank, size, global_process_set, name)
        self._options.enable_reconfigure = True
        self._store = store
        self._limit = timeout
        self._uuid = _NEVER
        self._instance = secrets.token_hex(8)
        self._linked = False
        self._change = threading.Lock()

    def rank(self) -> int:
        """This process's rank in the present world; before the first one, the one given to
        torch.
        """
        return self._rank

    def size(self) -> int:
        """Returns the size of the present world; before the first one, the one given to torch."""
        return self._size

    @property
    def supports_reconfigure(self) -> bool:
        """Yes."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns this process's description, which the other members need for the next
        `reconfigure`.
        """
        return str(Handle(self._uuid, self._rank, self._instance, engine.here()))

    def reconfigure(self, opts: Any) -> Work:
        """Leaves the world and forms that of the given members; returns when it is there.

        Args:
            opts: torch's `ReconfigureOptions`: a number that was not used before, and a handle for
                each member.

        Returns:
            Work that is done.

        Raises:
            FarandoleUsageError: The number was used before, or the handles are wrong. The world
                stays as it is.
            FarandoleEnvironmentError: The members did not meet in time; there is no world then.
            FarandoleInternalError: A member failed meanwhile; as above.
        """
        members = ordered(opts.handles)
        own = self.get_reconfigure_handle()
        if own not in members:
            raise FarandoleUsageError(
                f"the handle of this process is not among those of the new group: {own}"
            )
        rank, deadline = (
            members.index(own),
            time.monotonic() + (opts.timeout or self._limit).total_seconds(),
        )
        with self._change:
            meeting = _Meeting(self._store, opts.uuid, members, deadline)
            if rank == 0:
                meeting.claim()
                ticket = meeting.hold()
            else:
                ticket = meeting.ticket()
            # The members of one world leave it together: each waits a moment for the others'
            # announcement.
            self._leave()
            basics.take_place(ticket, rank)
            with _start_timeout(deadline - time.monotonic()):
                basics.init(process_sets="dynamic")
            self._uuid, self._rank, self._size = opts.uuid, rank, len(members)
            self._members = list(range(len(members)))
            self._numbers = itertools.count()
            self._linked = True
        return Done()

    def abort(self) -> None:
        """Leaves the world, which fails operations in progress; `reconfigure` forms the next
        one.
        """
        self._linked = False
        super().abort()

    def _leave(self) -> None:
        self._linked = False
        basics.shutdown()

    def _next_name(self) -> str:
        if not self._linked:
            raise FarandoleUsageError(
                "the group has no members yet, or has lost them: call reconfigure() before a "
                "collective, as enable_reconfigure=True requires"
            )
        return super()._next_name()


class ReconfigurableGroup(dist.ProcessGroup):
    """Tells torch rank and size of the present world: its own groups know those of their beginning
    alone.

    Args:
        backend: Does the work.
    """

    def __init__(self, backend: ReconfigurableBackend) -> None:
        super().__init__(backend.rank(), backend.size())
        self._backend = backend
        # If a group is bound to a device, torch splits other groups from it, and calls the
        # processes that are no members, too.
        self.bound_device_id = torch.device("cpu", 0)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, backend)

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This process's rank in the present world."""
        return self._backend.rank()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Returns the size of the present world."""
        return self._backend.size()

    @property
    def supports_reconfigure(self) -> bool:
        """Yes."""
        return self._backend.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Like `ReconfigurableBackend.get_reconfigure_handle`."""
        return self._backend.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Work:
        """Like `ReconfigurableBackend.reconfigure`."""
        return self._backend.reconfigure(opts)


class _Meeting:
    """Publishes and finds the registrar of a new world through the store."""

    def __init__(self, store: Any, uuid: int, members: list[str], deadline: float) -> None:
        self._store = store
        self._uuid = uuid
        self._members = members
        self._digest = hashlib.sha256("\n".join(members).encode()).hexdigest()
        self._deadline = deadline

    def _key(self, what: str) -> str:
        return f"reconfigure/{self._uuid}/{what}"

    def claim(self) -> None:
        """Member 0 takes the number.

        Raises:
            FarandoleUsageError: It was taken before.
        """
        mine = secrets.token_hex(8)
        held = self._store.compare_set(self._key("claimed"), "", mine)
        if held not in (mine, mine.encode()):
            raise FarandoleUsageError(
                f"uuid {self._uuid} was already used: each reconfigure() needs its own number"
            )

    def hold(self) -> str:
        """Member 0 holds the registrar and publishes its ticket; the ticket."""
        hosts = {Handle.parse(member).host for member in self._members}
        try:
            ticket = engine.host(len(self._members), len(hosts) == 1)
        except Exception as error:
            self._publish(failure=str(error))
            raise
        self._publish(ticket=ticket)
        return ticket

    def _publish(self, **what: str) -> None:
        self._store.set(self._key("place"), json.dumps({"members": self._digest, **what}))

    def ticket(self) -> str:
        """The others wait for the ticket.

        Raises:
            FarandoleUsageError: The number is one of another list of members.
            FarandoleEnvironmentError: It does not come in time, or member 0 holds no registrar.
        """
        key = self._key("place")
        while not self._is_there(key):
            if time.monotonic() >= self._deadline:
                raise FarandoleEnvironmentError(
                    f"member 0 of the new group did not call reconfigure({self._uuid}) in time: "
                    f"{self._members[0]}"
                )
        told = json.loads(self._store.get(key))
        if told["members"] != self._digest:
            raise FarandoleUsageError(
                f"uuid {self._uuid} belongs to a group with other members: all members must pass "
                "the "
                "same handles in the same "
                "order"
            )
        if "failure" in told:
            raise FarandoleEnvironmentError(
                f"member 0 of the new group holds no registrar: {told['failure']}"
            )
        return told["ticket"]

    def _is_there(self, key: str) -> bool:
        left = max(0.001, min(_SLICE, self._deadline - time.monotonic()))
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            # Stores have no class of their own for it.
            if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
                raise
            return False
        return True


@contextlib.contextmanager
def _start_timeout(seconds: float) -> Iterator[None]:
    """Sets the session's limit for forming a world."""
    name = "FARANDOLE_START_TIMEOUT"
    before = os.environ.get(name)
    os.environ[name] = f"{max(seconds, 0.001):.3f}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
