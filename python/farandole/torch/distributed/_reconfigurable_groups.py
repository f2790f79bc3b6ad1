# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Groups whose members change: `init_process_group("farandole", enable_reconfigure=True)`, since
torch 2.15.

The program must find the members. They exchange handles and agree on a number that was not used
before. Each then calls `reconfigure` with the number and all handles, and forms a new world with
the others:

    member 0    claims the number, holds a registrar ── ticket, by the group's store ──┐
    the others  wait for the ticket ◀──────────────────────────────────────────────────┘
    all         leave their world and form the world of the registrar; the position of a handle is
                the rank of its member

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

import torch.distributed as dist

from farandole import _variables as variables
from farandole._native import engine
from farandole.common import basics
from farandole.common.exceptions import FarandoleEnvironmentError, FarandoleUsageError
from farandole.torch.distributed._backend import FarandoleBackend
from farandole.torch.distributed._groups import set_world_store, start_opening_member_set
from farandole.torch.distributed._process_group import FarandoleGroup
from farandole.torch.distributed._work import CompletedWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._C._distributed_c10d import Work

_BACKEND_NAME: Final = "farandole"
_NO_WORLD_UUID: Final = -1
"""The number of a process that has not been in a world."""
_STORE_WAIT_SECONDS: Final = 1.0
"""Seconds of one read of the store: signals are handled between two reads."""


@dataclass(frozen=True)
class ReconfigureHandle:
    """The description of a process for the other members of the next world.

    Attributes:
        uuid: Number of the world that the process is in; -1 before its first world.
        rank: Rank of the process in that world.
        instance: Unique id of the process.
        host: Identity of the host.
    """

    uuid: int
    rank: int
    instance: str
    host: str

    def __str__(self) -> str:
        """Returns the text that torch passes on."""
        return f"{_BACKEND_NAME}:{self.uuid}:{self.rank}:{self.instance}:{self.host}"

    @staticmethod
    def from_text(text: str) -> ReconfigureHandle:
        """Inverts `str`.

        Raises:
            FarandoleUsageError: The text is no handle of this backend.
        """
        parts = text.split(":", 4)
        try:
            name, uuid, rank, instance, host = parts
            handle = ReconfigureHandle(int(uuid), int(rank), instance, host)
        except ValueError:
            raise FarandoleUsageError(
                f"not a reconfigure handle of backend {_BACKEND_NAME}: {text!r}"
            ) from None
        if name != _BACKEND_NAME:
            raise FarandoleUsageError(
                f"not a reconfigure handle of backend {_BACKEND_NAME}: {text!r}"
            )
        return handle


def members_in_order(handles: Iterable[str]) -> list[str]:
    """Returns the members by rank: the order of a list; for a set, old members first, by their
    ranks.

    Raises:
        FarandoleUsageError: There is no member, a member is there twice, or a text is no handle of
            this backend.
    """
    members = list(handles)
    parsed = {text: ReconfigureHandle.from_text(text) for text in members}
    if not members:
        raise FarandoleUsageError("reconfigure needs at least one handle")
    if len(parsed) != len(members):
        raise FarandoleUsageError(f"reconfigure needs different handles: {members}")
    if isinstance(handles, set | frozenset):
        members.sort(
            key=lambda text: (
                parsed[text].uuid == _NO_WORLD_UUID,
                parsed[text].rank,
                parsed[text].instance,
            )
        )
    return members


class ReconfigurableBackend(FarandoleBackend):
    """A group that has no world before its first `reconfigure`, and another one after each.

    Args:
        rank: As given to torch.
        size: As given to torch.
        name: Keeps the names of this group's operations apart.
        store: Transfers tickets; every member reaches it, in any world.
        timeout: Limit of `reconfigure` for the wait for other members, unless the call gives one.
    """

    def __init__(self, rank: int, size: int, name: str, store: Any, timeout: timedelta) -> None:
        super().__init__(rank, range(size), None, None, name, timeout)
        self._options.enable_reconfigure = True
        self._ticket_store = store
        self._uuid = _NO_WORLD_UUID
        self._instance = secrets.token_hex(8)
        self._has_world = False
        self._reconfigure_lock = threading.Lock()

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
        """Whether the group supports `reconfigure`: always."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns this process's description, which the other members need for the next
        `reconfigure`.
        """
        return str(
            ReconfigureHandle(
                self._uuid, self._rank, self._instance, engine.shared_memory_identity()
            )
        )

    def reconfigure(self, opts: Any) -> Work:
        """Leaves the world and forms a world of the given members; returns when it has formed.

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
        members = members_in_order(opts.handles)
        own = self.get_reconfigure_handle()
        if own not in members:
            raise FarandoleUsageError(
                f"the handle of this process is not among those of the new group: {own}"
            )
        rank, deadline = (
            members.index(own),
            time.monotonic() + (opts.timeout or self._limit).total_seconds(),
        )
        with self._reconfigure_lock:
            exchange = _TicketExchange(self._ticket_store, opts.uuid, members, deadline)
            if rank == 0:
                exchange.claim_world_number()
                ticket = exchange.host_and_publish_registrar()
            else:
                ticket = exchange.wait_for_ticket()
            # The members of one world leave it together: each waits a moment for the others'
            # announcement.
            self._leave_world()
            basics.set_world_ticket(ticket, rank)
            with _limit_formation_time(deadline - time.monotonic()):
                basics.init(process_sets="dynamic")
            self._uuid, self._rank, self._size = opts.uuid, rank, len(members)
            self._members = list(range(len(members)))
            self._store = set_world_store(self._ticket_store, f"reconfigured{opts.uuid}")
            self._opening = start_opening_member_set(
                tuple(self._members), self._limit.total_seconds()
            )
            self._messages = None
            self._operation_numbers = itertools.count()
            self._operation_count = self._barrier_count = 0
            self._has_world = True
        return CompletedWork()

    def abort(self) -> None:
        """Leaves the world, so operations in progress fail; `reconfigure` forms the next world."""
        self._has_world = False
        super().abort()

    def _leave_world(self) -> None:
        self._has_world = False
        basics.shutdown()

    def _next_name(self) -> str:
        if not self._has_world:
            raise FarandoleUsageError(
                "the group has no members yet, or has lost them: call reconfigure() before a "
                "collective, as enable_reconfigure=True requires"
            )
        return super()._next_name()


class ReconfigurableGroup(FarandoleGroup):
    """A group that reports rank and size of the present world to torch: a group of torch itself
    reports only its initial rank and size.

    Args:
        backend: The backend that runs the collectives.
    """

    def __init__(self, backend: ReconfigurableBackend) -> None:
        super().__init__(backend)
        self._backend: ReconfigurableBackend = backend

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This process's rank in the present world."""
        return self._backend.rank()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Returns the size of the present world."""
        return self._backend.size()

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group supports `reconfigure`: always."""
        return self._backend.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Like `ReconfigurableBackend.get_reconfigure_handle`."""
        return self._backend.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Work:
        """Like `ReconfigurableBackend.reconfigure`."""
        return self._backend.reconfigure(opts)


class _TicketExchange:
    """Publishes and finds the registrar of a new world through the store."""

    def __init__(self, store: Any, uuid: int, members: list[str], deadline: float) -> None:
        self._store = store
        self._uuid = uuid
        self._members = members
        self._digest = hashlib.sha256("\n".join(members).encode()).hexdigest()
        self._deadline = deadline

    def _store_key(self, name: str) -> str:
        return f"reconfigure/{self._uuid}/{name}"

    def claim_world_number(self) -> None:
        """Claims the number, on member 0.

        Raises:
            FarandoleUsageError: The number was claimed before.
        """
        mine = secrets.token_hex(8)
        held = self._store.compare_set(self._store_key("claimed"), "", mine)
        if held not in (mine, mine.encode()):
            raise FarandoleUsageError(
                f"uuid {self._uuid} was already used: each reconfigure() needs its own number"
            )

    def host_and_publish_registrar(self) -> str:
        """Hosts the registrar, on member 0; publishes and returns its ticket."""
        hosts = {ReconfigureHandle.from_text(member).host for member in self._members}
        try:
            ticket = engine.host_registrar(len(self._members), len(hosts) == 1)
        except Exception as error:
            self._publish_outcome(failure=str(error))
            raise
        self._publish_outcome(ticket=ticket)
        return ticket

    def _publish_outcome(self, **outcome: str) -> None:
        self._store.set(self._store_key("place"), json.dumps({"members": self._digest, **outcome}))

    def wait_for_ticket(self) -> str:
        """Waits for the ticket, on all other members.

        Raises:
            FarandoleUsageError: The number belongs to another list of members.
            FarandoleEnvironmentError: The ticket does not come in time, or member 0 has no
                registrar.
        """
        key = self._store_key("place")
        while not self._wait_for_key(key):
            if time.monotonic() >= self._deadline:
                raise FarandoleEnvironmentError(
                    f"member 0 of the new group did not call reconfigure({self._uuid}) in time: "
                    f"{self._members[0]}"
                )
        outcome = json.loads(self._store.get(key))
        if outcome["members"] != self._digest:
            raise FarandoleUsageError(
                f"uuid {self._uuid} belongs to a group with other members: all members must pass "
                "the "
                "same handles in the same "
                "order"
            )
        if "failure" in outcome:
            raise FarandoleEnvironmentError(
                f"member 0 of the new group holds no registrar: {outcome['failure']}"
            )
        return outcome["ticket"]

    def _wait_for_key(self, key: str) -> bool:
        wait_seconds = max(0.001, min(_STORE_WAIT_SECONDS, self._deadline - time.monotonic()))
        try:
            self._store.wait([key], timedelta(seconds=wait_seconds))
        except RuntimeError as error:
            # Stores raise no special exception for a timeout.
            if isinstance(error, dist.DistNetworkError) or "timeout" not in str(error).lower():
                raise
            return False
        return True


@contextlib.contextmanager
def _limit_formation_time(seconds: float) -> Iterator[None]:
    """Sets the session's limit for forming a world."""
    name = variables.START_TIMEOUT
    before = os.environ.get(name)
    os.environ[name] = f"{max(seconds, 0.001):.3f}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
