# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The meeting point of dispatchers, workers and trainers of tf.data: a small server, and its
client.

A request is one connection. Numbers are 4 bytes, big endian; `HMAC` is HMAC-SHA256 under the
service's key:

    server: 32 random bytes
    client: length, 32 random bytes, HMAC("request" | both random parts | JSON), JSON
    server: length, HMAC("answer" | HMAC of the request | JSON), JSON

So each side proves that it has the key, and a message cannot be changed on its way. Messages are
not encrypted, because they contain only addresses. Received data is never unpickled. The server
answers when the requested event has happened, or after a timeout. A client that does not prove the
key in time is disconnected, and it is the first to be disconnected if all places are taken.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import resource
import secrets
import socket
import struct
import threading
import time
from typing import Any

MAX_REQUEST_WAIT_SECONDS = 30.0
"""Seconds that one request waits at most; a longer wait asks again."""
REQUEST_TIMEOUT_SECONDS = 5.0
"""Seconds for connecting to one address, and for all of a request."""
ACCEPT_RETRY_SECONDS = 0.1
"""Seconds before the next try to accept."""
MAX_WAITING_REQUESTS = 1024
"""Requests that wait at the same time, at most; a process that may open few files has fewer."""
MAX_MESSAGE_BYTES = 1 << 16
"""Bytes of one message."""
_FAR_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that are reserved for documentation: the route to them is the route to other hosts."""
_LOOPBACK_ADDRESSES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_NONCE_BYTES = 32
_HMAC_BYTES = 32


def local_host_addresses() -> list[str]:
    """Returns addresses at which other hosts may reach this host, the likeliest first, its own
    loopback last.

    The host's name may stand for a loopback address only (127.0.1.1 on Debian), or for none. Other
    hosts cannot use loopback addresses, nor link-local addresses of a single cable.
    """
    found = []
    for family, far in _FAR_ADDRESSES.items():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing; asks for the way there.
            probe.connect((far, 9))
            found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in infos]
    reachable = [text for text in found if _is_reachable_address(text)]
    loopback = [_LOOPBACK_ADDRESSES[family] for family in _FAR_ADDRESSES if _has_loopback(family)]
    return list(dict.fromkeys([*reachable, *loopback]))


def _is_reachable_address(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _has_loopback(family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((_LOOPBACK_ADDRESSES[family], 0))
    except OSError:
        return False
    return True


def _open_listener() -> tuple[socket.socket, str | None]:
    """Returns a listening socket within the job's settings, and the address if they name one."""
    from farandole._native import hosts  # noqa: PLC0415 - clients do without

    address, first, last = hosts.listen_address_and_ports()
    # Without an address, one socket takes connections of both protocols.
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    failure: OSError | None = None
    for port in range(first, last + 1):
        try:
            listener = socket.create_server(
                (address or "", port), family=family, backlog=64, dualstack_ipv6=both
            )
        except OSError as error:
            failure = error
        else:
            return listener, address
    raise OSError(
        f"no port from {first} to {last} of FARANDOLE_PORT_RANGE can be listened on: {failure}"
    )


class DataServiceRegistryServer:
    """Knows the dispatchers and workers of one data service. Ends with `close`, or with its
    process.

    Args:
        dispatchers: Number of dispatchers.
        workers_per_dispatcher: Number of workers of each dispatcher.
        key: Proves membership; a new one by default.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes | None = None
    ) -> None:
        self.key = key or secrets.token_bytes(32)
        self._dispatchers: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {number: set() for number in range(dispatchers)}
        self._workers_per_dispatcher = workers_per_dispatcher
        self._is_shut_down = False
        self._changed = threading.Condition()
        self._listener, self._address = _open_listener()
        self._closed = False
        self._max_connections = min(
            MAX_WAITING_REQUESTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        )
        self._unproven_connections: dict[socket.socket, None] = {}
        self._proven_count = 0
        self._thread = threading.Thread(
            target=self._accept_connections, name="farandole-data-meeting", daemon=True
        )
        self._thread.start()

    @property
    def listen_addresses(self) -> list[tuple[str, int]]:
        """The addresses on which the server listens."""
        port = int(self._listener.getsockname()[1])
        return [
            (host, port) for host in ([self._address] if self._address else local_host_addresses())
        ]

    def close(self) -> None:
        """Stops accepting requests; waiting requests are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Wakes the thread that accepts connections.
        with contextlib.suppress(OSError):
            socket.create_connection(
                (self._address or local_host_addresses()[-1], self._listener.getsockname()[1]),
                REQUEST_TIMEOUT_SECONDS,
            ).close()
        self._thread.join(REQUEST_TIMEOUT_SECONDS)
        self._listener.close()

    def _accept_connections(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:
                # A stranger that went away, or no descriptor is left: the next try may come too
                # early.
                self._evict_oldest_unproven_connection()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, ACCEPT_RETRY_SECONDS)
                continue
            with self._changed:
                full = len(self._unproven_connections) + self._proven_count >= self._max_connections
            if full and not self._evict_oldest_unproven_connection():
                line.close()
                continue
            with self._changed:
                self._unproven_connections[line] = None
            try:
                threading.Thread(target=self._handle_connection, args=(line,), daemon=True).start()
            except RuntimeError:  # no thread is left
                self._forget_unproven_connection(line)
                line.close()

    def _evict_oldest_unproven_connection(self) -> bool:
        """Closes the connection that has waited longest for a proof of the key; whether there
        was one.
        """
        with self._changed:
            oldest = next(iter(self._unproven_connections), None)
            if oldest is None:
                return False
            del self._unproven_connections[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _forget_unproven_connection(self, line: socket.socket) -> None:
        with self._changed:
            self._unproven_connections.pop(line, None)

    def _handle_connection(self, line: socket.socket) -> None:
        proven = False
        try:
            with line:
                request, proof = _receive_authenticated(line, self.key)
                with self._changed:
                    self._unproven_connections.pop(line, None)
                    self._proven_count += 1
                    proven = True
                answer = json.dumps(self._process_request(json.loads(request))).encode()
                _send_message(
                    line,
                    _compute_hmac(self.key, b"answer", proof, answer) + answer,
                    time.monotonic() + REQUEST_TIMEOUT_SECONDS,
                )
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            # An invalid request gets no answer. The caller notices the closed connection.
            return
        finally:
            self._forget_unproven_connection(line)
            with self._changed:
                self._proven_count -= proven

    def _process_request(self, request: dict[str, Any]) -> dict[str, Any]:
        call, number = request["call"], request.get("dispatcher")
        until = time.monotonic() + min(float(request.get("timeout", 0.0)), MAX_REQUEST_WAIT_SECONDS)
        if (
            call in ("dispatcher", "worker", "await_dispatcher", "await_workers")
            and number not in self._workers
        ):
            return {"error": f"there is no dispatcher {number}: there are {len(self._workers)}"}
        with self._changed:
            if call == "dispatcher":
                address = str(request["address"])
                if self._dispatchers.setdefault(int(number or 0), address) != address:
                    return {
                        "error": (
                            f"dispatcher {number} is registered already: "
                            f"{self._dispatchers[number or 0]}"
                        )
                    }
            elif call == "worker":
                self._workers[int(number or 0)].add(int(request["worker"]))
            elif call == "shutdown":
                self._is_shut_down = True
            else:
                return self._wait_for_count(call, int(number or 0), until)
            self._changed.notify_all()
            return {}

    def _wait_for_count(self, call: str, number: int, until: float) -> dict[str, Any]:
        conditions = {
            "await_dispatcher": lambda: number in self._dispatchers,
            "await_workers": lambda: len(self._workers[number]) >= self._workers_per_dispatcher,
            "await_shutdown": lambda: self._is_shut_down,
        }
        happened = conditions[call]
        self._changed.wait_for(
            lambda: happened() or self._closed, max(0.0, until - time.monotonic())
        )
        if happened():
            return {"address": self._dispatchers.get(number)}
        return {"closed": True} if self._closed else {"waiting": True}


class DataServiceRegistryClient:
    """A client of a `DataServiceRegistryServer`.

    Args:
        addresses: The addresses of the server.
        key: The key that the server expects.
        timeout: Maximum time of a wait in seconds.
    """

    def __init__(self, addresses: list[tuple[str, int]], key: bytes, timeout: float) -> None:
        self._addresses = list(addresses)
        self._key = key
        self._timeout = timeout

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Makes a dispatcher known."""
        self._send_request(
            {"call": "dispatcher", "dispatcher": dispatcher_id, "address": dispatcher_address}
        )

    def wait_for_dispatcher_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> str:
        """Waits for a dispatcher and returns its address.

        Raises:
            TimeoutError: When it does not come in time.
        """
        return self._wait_for_event(
            {"call": "await_dispatcher", "dispatcher": dispatcher_id}, timeout
        )["address"]

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Makes a worker of a dispatcher known."""
        self._send_request({"call": "worker", "dispatcher": dispatcher_id, "worker": worker_id})

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> None:
        """Waits until a dispatcher has all its workers.

        Raises:
            TimeoutError: When they do not come in time.
        """
        self._wait_for_event({"call": "await_workers", "dispatcher": dispatcher_id}, timeout)

    def shutdown(self) -> None:
        """Asks all workers to end."""
        self._send_request({"call": "shutdown"})

    def wait_for_shutdown(self, timeout: float | None = None) -> None:
        """Waits for a call of `shutdown`: at most `timeout` seconds if given, and at most until the
        server ends.

        Raises:
            TimeoutError: There was no call in time.
            ConnectionError: When the server is gone.
        """
        self._wait_for_event(
            {"call": "await_shutdown"}, float("inf") if timeout is None else timeout
        )

    def local_host(self) -> str:
        """This host's address on the way to the server, as it stands before a port."""
        with self._open_connection() as line:
            address = str(line.getsockname()[0])
        return f"[{address}]" if ":" in address else address

    def _wait_for_event(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        timeout = self._timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        while True:
            remaining = max(0.0, end - time.monotonic())
            answer = self._send_request(
                {**request, "timeout": min(remaining, MAX_REQUEST_WAIT_SECONDS)}
            )
            if answer.get("closed"):
                raise ConnectionError(f"the data service has been closed; asked for {request}")
            if not answer.get("waiting"):
                return answer
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"no result from the data service within {timeout:g} s: {request}"
                )

    def _send_request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._open_connection() as line:
            until, message = (
                time.monotonic() + REQUEST_TIMEOUT_SECONDS,
                json.dumps(request).encode(),
            )
            try:
                randoms = _receive_exactly(line, _NONCE_BYTES, until) + secrets.token_bytes(
                    _NONCE_BYTES
                )
                proof = _compute_hmac(self._key, b"request", randoms, message)
                _send_message(line, randoms[_NONCE_BYTES:] + proof + message, until)
                answer = _receive_message(
                    line,
                    _HMAC_BYTES,
                    time.monotonic() + MAX_REQUEST_WAIT_SECONDS + REQUEST_TIMEOUT_SECONDS,
                )
            except (EOFError, OSError) as error:
                reason = (
                    f"{self._addresses[0]} gave no answer, as to a client with another key: "
                    f"{request}"
                )
                raise ConnectionError(f"the data service at {reason}") from error
        if not hmac.compare_digest(
            answer[:_HMAC_BYTES], _compute_hmac(self._key, b"answer", proof, answer[_HMAC_BYTES:])
        ):
            raise ConnectionError(
                f"the process at {self._addresses[0]} does not have the key of the data service"
            )
        reply = json.loads(answer[_HMAC_BYTES:])
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _open_connection(self) -> socket.socket:
        """Returns a connection to the first address that takes one; that is tried first from
        then on.
        """
        failure: Exception | None = None
        for index, (host, port) in enumerate(self._addresses):
            try:
                line = socket.create_connection((host, port), REQUEST_TIMEOUT_SECONDS)
            except OSError as error:
                failure = error
                continue
            self._addresses.insert(0, self._addresses.pop(index))
            return line
        raise ConnectionError(
            f"the data service cannot be reached at any of {self._addresses}: {failure}"
        )


def _compute_hmac(key: bytes, role: bytes, context: bytes, message: bytes) -> bytes:
    return hmac.digest(key, role + context + message, "sha256")


def _receive_authenticated(line: socket.socket, key: bytes) -> tuple[bytes, bytes]:
    """Receives a request and the proof that its sender knows the key.

    Returns:
        The request and the proof.

    Raises:
        ValueError: The sender does not know the key.
        OSError: The sender has not sent a complete request in time.
    """
    until, random = time.monotonic() + REQUEST_TIMEOUT_SECONDS, secrets.token_bytes(_NONCE_BYTES)
    _send_bytes(line, random, until)
    message = _receive_message(line, _NONCE_BYTES + _HMAC_BYTES, until)
    theirs, proof, request = (
        message[:_NONCE_BYTES],
        message[_NONCE_BYTES : _NONCE_BYTES + _HMAC_BYTES],
        message[_NONCE_BYTES + _HMAC_BYTES :],
    )
    if not hmac.compare_digest(proof, _compute_hmac(key, b"request", random + theirs, request)):
        raise ValueError("the sender has another key")
    return request, proof


def _send_bytes(line: socket.socket, message: bytes, until: float) -> None:
    line.settimeout(max(until - time.monotonic(), 1e-3))
    line.sendall(message)


def _send_message(line: socket.socket, message: bytes, until: float) -> None:
    """Sends a message with its length."""
    _send_bytes(line, struct.pack("!I", len(message)) + message, until)


def _receive_message(line: socket.socket, min_bytes: int, until: float) -> bytes:
    """Returns a message with its length, of at least so many bytes."""
    (length,) = struct.unpack("!I", _receive_exactly(line, 4, until))
    if not min_bytes <= length <= MAX_MESSAGE_BYTES:
        raise OSError(f"a message of {length} bytes")
    return _receive_exactly(line, length, until)


def _receive_exactly(line: socket.socket, count: int, until: float) -> bytes:
    """Receives exactly `count` bytes until the time `until`."""
    found = bytearray()
    while len(found) < count:
        line.settimeout(max(until - time.monotonic(), 1e-3))
        piece = line.recv(count - len(found))
        if not piece:
            raise ConnectionError("the other side is gone")
        found += piece
    return bytes(found)
