# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""An HTTP proxy in front of an emulator that has the troubles of real services and networks."""

import contextlib
import http.client
import select
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler

TROUBLES = ("busy", "refused", "reset", "silent", "stalled", "trickle", "lost")
"""`stalled`: the service takes a half of what the request sends, and then nothing. `lost`: the
service carries the request out, and its answer does not arrive."""
_REFUSALS = {
    "busy": (
        503,
        b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>",
    ),
    "expired": (
        403,
        b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>",
    ),
}
_CHUNK = 64 << 10


class TroubleProxy:
    """Listens on a free port of the loopback and forwards requests to `upstream`, `host:port`.

    Attributes:
        hits: number of requests or connections that met a trouble.
        rate: bytes a second of all connections together in each direction; `None` for no limit.
    """

    def __init__(self, upstream):
        self.upstream = upstream
        self.hits = 0
        self.requests = 0
        self.rate = None
        self._trouble, self._until, self._skip, self._limit = None, 0.0, 0, None
        self._sent = {}
        self._lock = threading.Lock()
        self._ended = False
        self._connections = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def begin(self, trouble, seconds, *, skip=0, limit=None):
        """Begins a trouble after `skip` further requests have passed. At most `limit` requests meet
        it.
        """
        with self._lock:
            self._limit = limit
            self.hits = 0
            self._trouble, self._skip, self._seconds = trouble, skip, seconds
            self._until = None
        if trouble == "refused":
            self._start_clock()
            while self._listener.fileno() != -1:
                time.sleep(0.01)

    def _start_clock(self):
        if self._until is None:
            self._until = time.monotonic() + self._seconds

    def lasts(self):
        """Returns whether the trouble has begun and not ended."""
        return self._until is not None and time.monotonic() < self._until and not self._ended

    def current_trouble(self):
        """Returns the trouble that a new request meets."""
        with self._lock:
            self.requests += 1
            if self._trouble is None:
                return None
            if self._skip > 0:
                self._skip -= 1
                return None
            self._start_clock()
            if not self.lasts():
                self._trouble = None
                return None
            if self._limit is not None and self.hits >= self._limit:
                return None
            self.hits += 1
            return self._trouble

    def find_refusal(self, request, body):
        """Returns status and text with which a request is answered, or `None` to pass it on."""

    def throttle(self, direction, count):
        """Waits until `count` more bytes may pass."""
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            free = max(self._sent.get(direction, now), now) + count / self.rate
            self._sent[direction] = free
        time.sleep(max(0.0, free - now))

    def _accept(self):
        while not self._ended:
            if self._trouble == "refused" and self.lasts():
                self._listener.close()
                for connection in list(self._connections):
                    reset(connection)
                while self.lasts() and not self._ended:
                    time.sleep(0.02)
                self.hits += 1
                self._trouble = None
                self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
            if not select.select([self._listener], [], [], 0.02)[0]:
                continue
            with contextlib.suppress(OSError):
                connection, address = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(
                    target=self._serve, args=(connection, address), daemon=True
                ).start()

    def _serve(self, connection, address):
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            _Handler(connection, address, self)
        self._connections.discard(connection)
        with contextlib.suppress(OSError):
            connection.close()

    def close(self):
        """Ends the proxy and its connections."""
        self._ended = True
        self._thread.join(5)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.close()


def reset(connection):
    """Closes a connection by a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def log_message(self, *_):
        pass

    def _read_body(self, part=1.0):
        left = int(part * int(self.headers.get("content-length", 0)))
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        pieces = []
        while left:
            piece = self.rfile.read(min(left, _CHUNK))
            if not piece:
                raise ConnectionError("the client has left")
            self.server.throttle("up", len(piece))
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _forward(self):
        trouble = self.server.current_trouble()
        if trouble == "reset":
            self.close_connection = True
            # The reset must reach the client, although a part of its request was not read.
            reset(self.connection)
            return
        body = self._read_body(0.5 if trouble == "stalled" else 1.0)
        refusal = _REFUSALS.get(trouble) or self.server.find_refusal(self, body)
        if refusal is not None:
            self._refuse(*refusal)
            return
        if trouble in ("silent", "stalled"):
            self.close_connection = True
            while self.server.lasts() and not self._has_left():
                time.sleep(0.02)
            return
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            head = [f"HTTP/1.1 {answer.status} {answer.reason}"]
            head += [
                f"{name}: {value}"
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "keep-alive")
            ]
            content = answer.read()
            if trouble == "lost":
                self.close_connection = True
                reset(self.connection)
                return
            if self.command != "HEAD" and answer.getheader("content-length") is None:
                head.append(f"Content-Length: {len(content)}")
            self._answer("\r\n".join([*head, "", ""]).encode() + content, trouble)
        finally:
            upstream.close()

    def _refuse(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _answer(self, text, trouble):
        start = 0
        while trouble == "trickle" and self.server.lasts() and start < len(text):
            self.wfile.write(text[start : start + 1])
            start += 1
            time.sleep(0.1)
        while start < len(text):
            piece = text[start : start + _CHUNK]
            self.server.throttle("down", len(piece))
            self.wfile.write(piece)
            start += len(piece)

    def _has_left(self):
        readable = select.select([self.connection], [], [], 0)[0]
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - as the base class calls them
