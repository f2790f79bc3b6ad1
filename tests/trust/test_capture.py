# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Everything that a job sends, captured packet by packet: no pickle in clear, and no tensor."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

import pytest
from tests.started import on_host, together

from farandole.spark.common import LocalBackend

pytestmark = pytest.mark.timeout(200)
ALL_PROTOCOLS = 0x0003
RCVBUFFORCE = 33
"""Constant of Linux; Python has no name for it."""
ROOM = 64 << 20
MARK = "a mark that no packet may hold"
PATTERN = bytes.fromhex("40490fdb2df854413f8020c44048f5c3")
"""Four floats that no chance brings."""

# Two ranks with the names of two hosts, so that links between them are TCP.
RANKS = f"""
import sys
import numpy as np
import torch
import torch.distributed as dist
import farandole.torch as hvd
import farandole.torch.distributed
from farandole.torch.distributed import _rendezvous
hvd.init(process_sets="dynamic")
assert hvd.cross_size() == 2
mark = {MARK!r}
assert hvd.broadcast_object({{"told": mark}} if hvd.rank() == 0 else None, root_rank=0)["told"] == mark
assert hvd.allgather_object([mark, hvd.rank()]) == [[mark, 0], [mark, 1]]
pattern = torch.frombuffer(bytearray({PATTERN!r} * 4096), dtype=torch.float32)
assert torch.equal(hvd.broadcast(pattern if hvd.rank() == 0 else torch.zeros_like(pattern), root_rank=0), pattern)
assert torch.equal(hvd.allgather(pattern), torch.cat([pattern, pattern]))
dist.init_process_group("farandole", init_method="farandole://")
store = dist.distributed_c10d._get_default_store()
store.set(mark + str(hvd.rank()), mark)
assert store.get(mark + str(1 - hvd.rank())) == mark.encode()
dist.destroy_process_group()
hvd.shutdown()
"""


@contextmanager
def captured():
    """Yields the packets that cross the loopback meanwhile."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, ROOM)
        tap.bind(("lo", 0))
        tap.settimeout(0.1)
        packets, ended = [], threading.Event()

        def take():
            while True:
                try:
                    packets.append(tap.recv(1 << 17))
                except TimeoutError:
                    if ended.is_set():
                        return

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield packets
        finally:
            ended.set()
            thread.join(60)


needs = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to capture packets")


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
    told = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    with captured() as packets:
        environments = [{"HOROVOD_RANK": str(rank), **told} for rank in range(2)]
        ended = together(environments, RANKS, [on_host(f"host-{rank}") for rank in range(2)])
    assert [one.status for one in ended] == [0, 0], ended
    assert sum(map(len, packets)) > len(PATTERN) * 4096, "the tensors crossed"
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
        return mark

    with captured() as packets:
        assert LocalBackend(2, verbose=0, warm=False).run(function, (mark,)) == [mark, mark]
    assert packets
    assert not holds(packets, mark.encode())
