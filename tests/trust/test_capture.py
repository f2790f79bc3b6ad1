# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Everything that a job sends, captured packet by packet: no pickle in clear, and no tensor."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from contextlib import contextmanager

import pytest
from tests.needs import skipped_without
from tests.programs import program_path
from tests.started import on_host, together

from farandole.spark.common import LocalBackend

pytestmark = pytest.mark.timeout(200)
ALL_PROTOCOLS = 0x0003
RCVBUFFORCE = 33
"""Constant of Linux; Python has no name for it."""
SOL_PACKET = 263
PACKET_STATISTICS = 6
"""Packets that the kernel has put into the buffer, and those that it dropped because that was
full.
"""
ROOM = 64 << 20
MARK = "a mark that no packet may hold"
RESULT = 4000
"""Marks in a result."""
PATTERN = bytes.fromhex("40490fdb2df854413f8020c44048f5c3")
"""Four floats that no chance brings."""
TENSOR = len(PATTERN) * 4096

# Two ranks with the names of two hosts, so that links between them are TCP.
RANKS = program_path(__file__, "send_marks")


@contextmanager
def captured():
    """Yields the packets that cross the loopback meanwhile."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, ROOM)
        tap.bind(("lo", 0))
        tap.settimeout(0.1)
        packets, ended = [], threading.Event()

        def capture_packets():
            while True:
                try:
                    packets.append(tap.recv(1 << 17))
                except TimeoutError:
                    if ended.is_set():
                        return

        thread = threading.Thread(target=capture_packets)
        thread.start()
        try:
            yield packets
        finally:
            ended.set()
            thread.join(60)
        assert not thread.is_alive()
        _, dropped = struct.unpack("2I", tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        assert dropped == 0, "the capture has no room for all packets"


needs = skipped_without(None if os.geteuid() == 0 else "needs root, to capture packets")


def bytes_on_the_way(packets):
    """Bytes that have crossed, of which headers are some; the loopback shows a packet where it
    leaves and arrives.
    """
    return sum(map(len, packets)) / 2


def holds(packets, what):
    """Returns whether one of the packets has these bytes."""
    return any(what in packet for packet in packets)


@needs
def test_the_capture_sees_what_is_in_clear():
    with (
        captured() as packets,
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as dialed,
        door.accept()[0] as taken,
    ):
        dialed.sendall(MARK.encode() + PATTERN)
        assert taken.recv(1 << 10)
    assert holds(packets, MARK.encode())
    assert holds(packets, PATTERN)


@needs
def test_between_hosts_no_object_and_no_tensor_is_in_clear():
    told = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
    }
    with captured() as packets:
        environments = [{"HOROVOD_RANK": str(rank), **told} for rank in range(2)]
        prefixes = [on_host(f"host-{rank}") for rank in range(2)]
        ended = together(environments, RANKS, prefixes, [MARK, PATTERN.hex()])
    assert [one.status for one in ended] == [0, 0], ended
    assert bytes_on_the_way(packets) > 3 * TENSOR, "a broadcast, and one tensor of each rank"
    assert not holds(packets, MARK.encode())
    assert not holds(packets, PATTERN)


@needs
def test_a_local_jobs_function_records_and_results_are_not_in_clear():
    mark = MARK

    def function(given):
        from farandole.spark import task

        assert given == mark
        task.report({"kind": mark})
        print(mark)
        return mark * RESULT

    with captured() as packets:
        assert LocalBackend(2, verbose=0, warm=False).run(function, (mark,)) == [mark * RESULT] * 2
    assert bytes_on_the_way(packets) > 2 * RESULT * len(mark), "the results crossed"
    assert not holds(packets, mark.encode())


def floods_the_loopback():
    """Sends more than a capture without room takes."""
    piece = bytes(1 << 15)
    with (
        captured(),
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as dialed,
        door.accept()[0] as taken,
    ):
        for _ in range(200):
            dialed.sendall(piece)
            left = len(piece)
            while left:
                left -= len(taken.recv(left))


@needs
def test_a_capture_that_loses_packets_fails(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOM", 1)
    with pytest.raises(AssertionError, match="no room for all packets"):
        floods_the_loopback()
