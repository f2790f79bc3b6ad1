# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The rendezvous of a gang whose tasks cannot reach the driver, such as a Spark Connect client
behind a firewall.

Every task tries the driver's addresses and sends the result to the other tasks by Spark's
`allGather`. The first task starts a registrar, and also sends a ticket for it. Unless all tasks
have reached the driver, the gang uses this registrar. If there is a store, the first task then
writes events to numbered files in the job's directory, and the driver reads the files. Without a
store, the driver gets progress and output when the job is over, or not at all.
"""

from __future__ import annotations

import base64
import json
import logging
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
    from farandole.runner.agent import WorkerSpec
    from farandole.spark.job.spill import JobSpillDirectory

_DIAL_TIMEOUT: Final = 3.0
_EVENT_INTERVAL: Final = 0.5
_GRACE_AFTER_ABORT: Final = 5.0
_LAST_WRITE_TIMEOUT: Final = 30.0
"""Seconds for which the last events are written again when the store fails."""
_MAX_WAITING_LINES: Final = 20_000
"""Number of events that wait for the store."""
_EVENT_FIELDS: Final = (
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
_log = logging.getLogger("farandole")


@dataclass(frozen=True)
class TaskRendezvous:
    """The data with which tasks find each other, sent in Spark's closure.

    Attributes:
        addresses: Addresses on which the driver listens.
        size: Number of tasks.
        spill: The job's directory in a store, if it was given one.
    """

    addresses: tuple[str, ...]
    size: int
    spill: JobSpillDirectory | None = None


class RendezvousHost:
    """The first task's part while the gang meets there: keeps the registrar, and writes its
    events to the store.
    """

    def __init__(self, registrar: Registrar, rendezvous: TaskRendezvous) -> None:
        self._registrar = registrar
        self._rendezvous = rendezvous
        self._ended_tasks: set[int] = set()
        self._record_until = float("inf")
        self._thread = threading.Thread(
            target=self._record_events, name="farandole-host", daemon=True
        )
        self._thread.start()

    def wait_and_close(self) -> None:
        """Waits until every worker has ended, or until the grace period after an abort is over;
        then closes the registrar.
        """
        self._thread.join()
        self._registrar.close()

    def _record_events(self) -> None:
        # Spark may start the gang again, with another first task. Its files have a later name, so
        # that the driver reads them as new events.
        files = _SpillEventWriter(self._rendezvous.spill, f"{time.time_ns():020d}")
        written = time.monotonic()
        while (
            len(self._ended_tasks) < self._rendezvous.size and time.monotonic() < self._record_until
        ):
            for event in self._registrar.events(_EVENT_INTERVAL):
                files.add_event(self._event_to_fields(event))
            if time.monotonic() - written >= _EVENT_INTERVAL:
                files.write_queued_events()
                written = time.monotonic()
        for event in self._registrar.events(0.0):
            files.add_event(self._event_to_fields(event))
        deadline = time.monotonic() + _LAST_WRITE_TIMEOUT
        while not files.write_queued_events() and time.monotonic() < deadline:
            time.sleep(_EVENT_INTERVAL)

    def _event_to_fields(self, event: Event) -> dict[str, Any]:
        if event.kind == "exit" and event.task is not None:
            self._ended_tasks.add(event.task)
        if event.kind == "aborted":
            self._record_until = min(self._record_until, time.monotonic() + _GRACE_AFTER_ABORT)
        fields: dict[str, Any] = {name: getattr(event, name) for name in _EVENT_FIELDS}
        # Results are not written: Spark's rows contain them.
        if event.kind == "metric":
            fields["data"] = base64.b64encode(event.data or b"").decode()
        if event.kind == "assigned":
            fields["seats"] = self._registrar.rank_assignment()
        return fields


class _SpillEventWriter:
    """The numbered files of one host. If a write fails, its file is written again with the same
    content, because the store may have it although the answer was lost. New events wait.

    Args:
        spill: The job's directory in a store; `None` if there is no store.
        name: Begin of the names of the files.
    """

    def __init__(self, spill: JobSpillDirectory | None, name: str) -> None:
        self._spill = spill
        self._name = name
        self._number = 0
        self._waiting: list[dict[str, Any]] = []
        self._dropped = 0
        self._unwritten: bytes | None = None
        self._has_warned = False

    def add_event(self, fields: dict[str, Any]) -> None:
        """Takes an event for the next file. If very many wait, the oldest output, then the oldest
        progress, is dropped.
        """
        if self._spill is None:
            return
        self._waiting.append(fields)
        if len(self._waiting) > _MAX_WAITING_LINES:
            for kind in ("log", "metric"):
                found = next((one for one in self._waiting if one["kind"] == kind), None)
                if found is not None:
                    self._waiting.remove(found)
                    self._dropped += kind == "log"
                    return

    def write_queued_events(self) -> bool:
        """Writes all events; returns whether all are written."""
        if self._spill is None:
            return True
        while self._waiting or self._unwritten is not None:
            if self._unwritten is None:
                self._unwritten = self._encode_queued_events()
            try:
                self._spill.write_file(
                    f"events/{self._name}-{self._number:08d}.jsonl", self._unwritten
                )
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("events of the job wait for the store: %s", error)
                return False
            self._number, self._unwritten = self._number + 1, None
        return True

    def _encode_queued_events(self) -> bytes:
        lines, self._waiting = self._waiting, []
        log = next((one for one in lines if one["kind"] == "log"), None)
        if log is not None and self._dropped:
            log["dropped"], self._dropped = (log["dropped"] or 0) + self._dropped, 0
        return "\n".join(map(json.dumps, lines)).encode()


class StoredEventReader:
    """The driver's reader of the events that a `RendezvousHost` has written."""

    def __init__(self, spill: JobSpillDirectory) -> None:
        self._spill = spill
        self._read_names: set[str] = set()
        self._next_read = 0.0

    def new_events(self) -> Iterator[Any]:
        """Yields events like a registrar; an assignment event contains the rank placements."""
        if time.monotonic() < self._next_read:
            return
        self._next_read = time.monotonic() + _EVENT_INTERVAL
        try:
            names = self._spill.list_files("events")
        except OSError:
            return
        for name in names:
            if name not in self._read_names:
                try:
                    text = self._spill.read_file(name).decode()
                except OSError:
                    return  # the store is briefly unreachable
                self._read_names.add(name)
                for line in text.splitlines():
                    yield _parse_event(json.loads(line))


def agree_on_registrar(
    work: WorkerSpec, rendezvous: TaskRendezvous, task: int, context: Any
) -> tuple[WorkerSpec, RendezvousHost | None]:
    """Decides with the other tasks which registrar the gang uses.

    Args:
        work: Work of the task.
        rendezvous: Rendezvous of the gang.
        task: Number of this task.
        context: Spark's barrier context.

    Returns:
        The work, with a ticket for the registrar; in the first task also the host, if the gang uses
        the registrar of this task.
    """
    from farandole._native.registrar import Registrar  # noqa: PLC0415 - starts its threads here

    own = Registrar(rendezvous.size, start_timeout=work.start_timeout) if task == 0 else None
    answers = [
        json.loads(message)
        for message in context.allGather(
            json.dumps(
                {
                    "reaches": _can_dial_any(rendezvous.addresses),
                    "ticket": own.ticket if own is not None else None,
                }
            )
        )
    ]
    if all(one["reaches"] for one in answers):
        if own is not None:
            own.close()
        return work, None
    ticket = next(one["ticket"] for one in answers if one["ticket"] is not None)
    work_at_host = replace(work, ticket=ticket, keys=None if work.keys else False)
    return work_at_host, RendezvousHost(own, rendezvous) if own is not None else None


def _can_dial_any(addresses: Sequence[str]) -> bool:
    """Returns whether one of the addresses can be dialled from here."""

    def can_dial(address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_DIAL_TIMEOUT).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return any(pool.map(can_dial, addresses))


def _parse_event(fields: dict[str, Any]) -> Any:
    data = fields.pop("data", None)
    fields.setdefault("seats", None)
    return SimpleNamespace(data=base64.b64decode(data) if data is not None else None, **fields)
