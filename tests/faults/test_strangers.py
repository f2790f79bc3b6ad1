# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A process without the job's key is refused at each port of a running job, and changes nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pytest
from tests.faults.experiment import hosts
from tests.faults.job import Job
from tests.faults.table import Cell

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE: Final = 8.0
"""Seconds after which a silent stranger has been refused."""
ROUNDS: Final = 20


class Exploit:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.trace),)


def payloads(trace: Path) -> list[bytes]:
    """Returns the bytes that an attacker, a scanner or a broken program sends."""
    chance = random.Random(7)
    exploit = [pickle.dumps(Exploit(trace), protocol) for protocol in (0, 2, 5)]
    framed = [
        len(exploit[2]).to_bytes(size, order) + exploit[2]
        for size in (4, 8)
        for order in ("big", "little")
    ]
    return [
        b"",
        *exploit,
        *framed,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"\xff" * 65536,
        bytes(65536),
        *(chance.randbytes(chance.randrange(1, 3000)) for _ in range(ROUNDS)),
    ]


def refusal(address: tuple[str, int], payload: bytes, tls: bool) -> bytes:
    """Returns the bytes received until the peer closes the connection; raises `TimeoutError` if
    it stays open.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.socket(family))
        plain.settimeout(PATIENCE)
        plain.connect(address)
        heard = b""
        with contextlib.suppress(ConnectionError, BrokenPipeError, ssl.SSLError):
            stream: socket.socket = plain
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.set_alpn_protocols(["h2"])
                stream = stack.enter_context(context.wrap_socket(plain))
            stream.sendall(payload)
            while piece := stream.recv(1 << 16):
                heard += piece
        return heard


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_pickles_and_garbage_at_every_port_are_refused_and_the_world_continues(
    transport: str, tmp_path: Path
) -> None:
    cell = Cell("allreduce", "strangers", transport, 2)
    trace = tmp_path / "unpickled"
    plan = {
        "operation": "allreduce",
        "fault": "none",
        "victim": -1,
        "inside": False,
        "survivable": False,
    }
    with Job(hosts(cell), {}) as job:
        job.begin(plan)
        assert len(job.until({"working"}, range(2), 20)) == 2
        ports = job.ports
        assert len(ports) == 1 + 2, "the registrar's and each rank's"
        offers = [(address, payload, False) for address in ports for payload in payloads(trace)]
        offers += [(ports[0], payload, True) for payload in payloads(trace)]
        with ThreadPoolExecutor(len(offers)) as crowd:
            for offer, heard in zip(
                offers, crowd.map(lambda offer: refusal(*offer), offers), strict=True
            ):
                assert len(heard) < 1024, f"{offer[0]} told a stranger {heard[:100]!r}"
        for rank in range(2):
            assert [m for m in job.messages[rank] if m["what"] != "working"] == [], job.story()
        job.send_to_ranks("enough")
        done = job.until({"done"}, range(2), 20)
        assert len(done) == 2, job.story()
        assert [outcome.exit_code for outcome in job.end()] == [0, 0], job.story()
    assert not trace.exists(), "somebody unpickled what a stranger sent"
