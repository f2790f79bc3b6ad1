# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Where dispatchers, workers and trainers of tf.data find each other: a small server, and its client.

A request is one connection: both sides prove that they know the key, one message of JSON goes each way. Nothing that
comes in is unpickled. The server answers when what is asked for has happened, or says that it has not in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

SLICE = 30.0
"""Seconds that one request waits at most; a longer wait asks again."""
REACH = 5.0
"""Seconds for connecting to one address, and for the proofs."""
PAUSE = 0.1
"""Seconds before the next try to accept."""
CROWD = 1024
"""Requests that wait at the same time."""
LARGEST = 1 << 16
"""Bytes of one message."""


def addresses_of_this_host() -> list[str]:
    """Addresses by which others may reach this host, the likeliest first, its own loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Sends nothing; asks for the way there.
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _listen() -> tuple[Listener, str | None]:
    """What accepts, where the job's settings allow it; and the address that they name, if they do."""
    from farandole._native import hosts  # noqa: PLC0415 - clients do without

    address, first, last = hosts.listening()
    family = "AF_INET6" if address is not None and ":" in address else "AF_INET"
    failure: OSError | None = None
    for port in range(first, last + 1):
        try:
            return Listener((address or "", port), family, backlog=64), address
        except OSError as error:
            failure = error
    raise OSError(f"no port from {first} to {last} of FARANDOLE_PORT_RANGE can be listened on: {failure}")


class MeetingServer:
    """Knows the dispatchers and workers of one data service. Ends with `close`, or with its process.

    Args:
        dispatchers: How many there will be.
        workers_per_dispatcher: How many workers each will have.
        key: Proves who belongs here; a new one by default.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(32)
        self._dispatchers: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {number: set() for number in range(dispatchers)}
        self._workers_per_dispatcher = workers_per_dispatcher
        self._is_shut_down = False
        self._changed = threading.Condition()
        self._listener, self._address = _listen()
        self._closed = False
        self._places = threading.BoundedSemaphore(CROWD)
        self._thread = threading.Thread(target=self._serve, name="farandole-data-meeting", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        port = int(self._listener.address[1])
        return [(host, port) for host in ([self._address] if self._address else addresses_of_this_host())]

    def close(self) -> None:
        """Takes no more requests; those that wait are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Wakes the thread that accepts.
        with contextlib.suppress(OSError):
            socket.create_connection((self._address or "127.0.0.1", int(self._listener.address[1])), REACH).close()
        self._thread.join(REACH)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                # A stranger that went away, or no descriptor is left: the next try may come too early.
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, PAUSE)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection[Any, Any]) -> None:
        with connection:
            try:
                _limit(connection, REACH)
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
                _limit(connection, SLICE + REACH)
                request = json.loads(connection.recv_bytes(LARGEST))
                connection.send_bytes(json.dumps(self._result(request)).encode())
            except (AuthenticationError, OSError, EOFError, ValueError, KeyError, TypeError):
                # Whoever it was gets no answer, which is one.
                return
            finally:
                self._places.release()

    def _result(self, request: dict[str, Any]) -> dict[str, Any]:
        call, number = request["call"], request.get("dispatcher")
        until = time.monotonic() + min(float(request.get("timeout", 0.0)), SLICE)
        if call in ("dispatcher", "worker", "await_dispatcher", "await_workers") and number not in self._workers:
            return {"error": f"there is no dispatcher {number}: there are {len(self._workers)}"}
        with self._changed:
            if call == "dispatcher":
                address = str(request["address"])
                if self._dispatchers.setdefault(int(number or 0), address) != address:
                    return {"error": f"dispatcher {number} is registered already: {self._dispatchers[number or 0]}"}
            elif call == "worker":
                self._workers[int(number or 0)].add(int(request["worker"]))
            elif call == "shutdown":
                self._is_shut_down = True
            else:
                return self._awaited(call, int(number or 0), until)
            self._changed.notify_all()
            return {}

    def _awaited(self, call: str, number: int, until: float) -> dict[str, Any]:
        conditions = {
            "await_dispatcher": lambda: number in self._dispatchers,
            "await_workers": lambda: len(self._workers[number]) >= self._workers_per_dispatcher,
            "await_shutdown": lambda: self._is_shut_down,
        }
        happened = conditions[call]
        self._changed.wait_for(lambda: happened() or self._closed, max(0.0, until - time.monotonic()))
        if happened():
            return {"address": self._dispatchers.get(number)}
        return {"closed": True} if self._closed else {"waiting": True}


class MeetingClient:
    """Asks a `MeetingServer`.

    Args:
        addresses: Where it may be reached.
        key: What it expects.
        timeout: Seconds that a wait lasts at most.
    """

    def __init__(self, addresses: list[tuple[str, int]], key: bytes, timeout: float) -> None:
        self._addresses = list(addresses)
        self._key = key
        self._timeout = timeout

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Makes a dispatcher known."""
        self._ask({"call": "dispatcher", "dispatcher": dispatcher_id, "address": dispatcher_address})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float | None = None) -> str:
        """Waits for a dispatcher and returns its address.

        Raises:
            TimeoutError: When it does not come in time.
        """
        return self._wait({"call": "await_dispatcher", "dispatcher": dispatcher_id}, timeout)["address"]

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Makes a worker of a dispatcher known."""
        self._ask({"call": "worker", "dispatcher": dispatcher_id, "worker": worker_id})

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float | None = None) -> None:
        """Waits until a dispatcher has all its workers.

        Raises:
            TimeoutError: When they do not come in time.
        """
        self._wait({"call": "await_workers", "dispatcher": dispatcher_id}, timeout)

    def shutdown(self) -> None:
        """Tells all workers to end."""
        self._ask({"call": "shutdown"})

    def wait_for_shutdown(self, timeout: float | None = None) -> None:
        """Waits until somebody calls `shutdown`; for ever without `timeout`, but not longer than the server lives.

        Raises:
            TimeoutError: When nobody does in time.
            ConnectionError: When the server is gone.
        """
        self._wait({"call": "await_shutdown"}, float("inf") if timeout is None else timeout)

    def here(self) -> str:
        """This host's address on the way to the server."""
        with self._connect() as connection, socket.socket(fileno=os.dup(connection.fileno())) as used:
            return used.getsockname()[0]

    def _wait(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        timeout = self._timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        while True:
            remaining = max(0.0, end - time.monotonic())
            answer = self._ask({**request, "timeout": min(remaining, SLICE)})
            if answer.get("closed"):
                raise ConnectionError(f"the data service has been closed; asked for {request}")
            if not answer.get("waiting"):
                return answer
            if time.monotonic() >= end:
                raise TimeoutError(f"the data service waited {timeout:g} s in vain: {request}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._connect() as connection:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
            connection.send_bytes(json.dumps(request).encode())
            try:
                answer = json.loads(connection.recv_bytes(LARGEST))
            except (EOFError, BlockingIOError) as error:
                raise ConnectionError(f"the data service at {self._addresses[0]} gave no answer: {request}") from error
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _connect(self) -> Connection[Any, Any]:
        """A connection to the first address that takes one; that is tried first from then on."""
        failure: Exception | None = None
        for index, (host, port) in enumerate(self._addresses):
            try:
                with socket.create_connection((host, port), REACH) as reached:
                    reached.setblocking(True)
                    connection = Connection(reached.detach())
            except OSError as error:
                failure = error
                continue
            self._addresses.insert(0, self._addresses.pop(index))
            _limit(connection, SLICE + REACH)
            return connection
        raise ConnectionError(f"the data service cannot be reached at any of {self._addresses}: {failure}")


def _limit(connection: Connection[Any, Any], seconds: float) -> None:
    """Gives the other side so long for every message, and no longer."""
    packed = struct.pack("@ll", int(seconds), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
