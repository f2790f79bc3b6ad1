# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The meeting of a gang whose tasks cannot reach the driver, such as a Spark Connect client behind
a firewall.

Every task tries the driver's addresses and sends the result to the others by Spark's `allGather`.
The first task also sends a ticket of its own registrar. Unless all tasks have reached the driver,
the gang meets at that registrar. If there is a store, events are then written to the job's
directory there, in numbered files, and the driver reads them instead of receiving them. Without a
store, the driver gets progress and output when the job is over, or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farandole._native.registrar import Event, Registrar
    from farandole.runner.agent import Work
    from farandole.spark.job.spill import Spill

_TRY: Final = 3.0
_EVERY: Final = 0.5
_GRACE: Final = 5.0
_FIELDS: Final = (
    "kind",
    "task",
    "rank",
    "stream",
    "text",
    "exit_code",
    "signal",
    "stderr_tail",
    "dropped",
)


@dataclass(frozen=True)
class Meeting:
    """The data with which tasks find each other, sent in Spark's closure.

    Attributes:
        addresses: Where the driver listens.
        size: Number of tasks.
        spill: The job's directory in a store, if it was given one.
    """

    addresses: tuple[str, ...]
    size: int
    spill: Spill | None = None


class Host:
    """The first task's part while the gang meets there: keeps the registrar, and writes its
    events to the store.
    """

    def __init__(self, registrar: Registrar, meeting: Meeting) -> None:
        self._registrar = registrar
        self._meeting = meeting
        self._ended: set[int] = set()
        self._over_at = float("inf")
        self._thread = threading.Thread(target=self._keep, name="farandole-host", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until every worker has ended, or has had the time to after a verdict; then
        closes the registrar.
        """
        self._thread.join()
        self._registrar.close()

    def _keep(self) -> None:
        # Spark may start the gang again, with another host: what that one writes down is new, and
        # comes later.
        self._name = f"{time.time_ns():020d}"
        number, waiting, written = 0, [], time.monotonic()
        while len(self._ended) < self._meeting.size and time.monotonic() < self._over_at:
            waiting += [self._line(event) for event in self._registrar.events(_EVERY)]
            if waiting and time.monotonic() - written >= _EVERY:
                number, waiting, written = number + 1, [], self._write(number, waiting)
        waiting += [self._line(event) for event in self._registrar.events(0.0)]
        self._write(number, waiting)

    def _line(self, event: Event) -> str:
        if event.kind == "exit" and event.task is not None:
            self._ended.add(event.task)
        if event.kind == "aborted":
            self._over_at = min(self._over_at, time.monotonic() + _GRACE)
        told: dict[str, Any] = {name: getattr(event, name) for name in _FIELDS}
        # A result comes by Spark's rows; here it would only be carried twice.
        if event.kind == "metric":
            told["data"] = base64.b64encode(event.data or b"").decode()
        if event.kind == "assigned":
            told["seats"] = self._registrar.assignment()
        return json.dumps(told)

    def _write(self, number: int, lines: list[str]) -> float:
        if lines and self._meeting.spill is not None:
            # A store that is away for a moment costs a piece of the story, not the job.
            with contextlib.suppress(OSError):
                self._meeting.spill.write(
                    f"events/{self._name}-{number:08d}.jsonl", "\n".join(lines).encode()
                )
        return time.monotonic()


class Tail:
    """The driver's part: reads the new records of the host."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._seen: set[str] = set()
        self._look_at = 0.0

    def events(self) -> Iterator[Any]:
        """Events, as a registrar's; those of an assignment carry its seats."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _EVERY
        try:
            names = self._spill.names("events")
        except OSError:
            return
        for name in names:
            if name not in self._seen:
                try:
                    told = self._spill.read(name).decode()
                except OSError:
                    return  # the store is away for a moment
                self._seen.add(name)
                for line in told.splitlines():
                    yield _event(json.loads(line))


def settle(work: Work, meeting: Meeting, task: int, context: Any) -> tuple[Work, Host | None]:
    """Decides with the other tasks where the gang meets.

    Args:
        work: What to run.
        meeting: How to decide.
        task: This task.
        context: Spark's barrier context.

    Returns:
        The work, with the ticket that leads there; in the first task also the host, where the gang
        meets there.
    """
    from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

    own = Registrar(meeting.size, start_timeout=work.start_timeout) if task == 0 else None
    told = [
        json.loads(message)
        for message in context.allGather(
            json.dumps(
                {
                    "reaches": _reaches(meeting.addresses),
                    "ticket": own.ticket if own is not None else None,
                }
            )
        )
    ]
    if all(one["reaches"] for one in told):
        if own is not None:
            own.close()
        return work, None
    ticket = next(one["ticket"] for one in told if one["ticket"] is not None)
    there = replace(work, ticket=ticket, keys=None if work.keys else False)
    return there, Host(own, meeting) if own is not None else None


def _reaches(addresses: Sequence[str]) -> bool:
    """Returns whether one of the addresses can be dialled from here."""

    def one(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_TRY).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return any(pool.map(one, addresses))


def _event(told: dict[str, Any]) -> Any:
    data = told.pop("data", None)
    told.setdefault("seats", None)
    return SimpleNamespace(data=base64.b64decode(data) if data is not None else None, **told)
