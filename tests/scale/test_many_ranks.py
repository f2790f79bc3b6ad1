# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sixty-four processes on eight hosts, which are namespaces of this machine."""

from __future__ import annotations

import os
from typing import Final

import pytest
from tests.started import on_host, together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes other host names"),
]
HOSTS: Final = 8
RANKS: Final = 64
BEGIN: Final = """
import os, signal, sys, time
import numpy as np
import farandole.numpy as hvd
hosts, ranks = map(int, sys.argv[1:])
even = hvd.ProcessSet(range(0, ranks, 2))
hvd.init(process_sets=[even])
rank, size = hvd.rank(), hvd.size()
assert (size, hvd.local_size(), hvd.cross_size()) == (ranks, ranks // hosts, hosts)
"""
COLLECTIVES: Final = (
    BEGIN
    + """
def sockets():
    descriptors = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one).startswith("socket:") for one in descriptors if os.path.lexists(one))

# Rank 0 holds the registrar, to which all ranks are connected.
assert rank == 0 or sockets() <= 32, sockets()
hvd.allreduce(np.ones(300_000, dtype=np.float32))
assert rank == 0 or sockets() <= 40, sockets()
for count in (1, 1000, 300_000):
    total = hvd.allreduce(np.arange(count, dtype=np.float32) % 100 + rank, op=hvd.Sum)
    assert np.array_equal(total, size * (np.arange(count) % 100) + size * (size - 1) // 2), count
assert hvd.allreduce(np.full(7, rank, dtype=np.int64), op=hvd.Max).tolist() == [size - 1] * 7
rows = hvd.allgather(np.full((rank % 3, 2), rank))
assert rows[:, 0].tolist() == [other for other in range(size) for _ in range(other % 3)]
assert hvd.broadcast(np.full(5, rank), root_rank=size // 2).tolist() == [size // 2] * 5
for turn in range(3):
    splits = [(rank + to + turn) % 4 for to in range(size)]
    sent = np.repeat(np.arange(size), splits) + 100 * rank
    received, counts = hvd.alltoall(sent, splits, name="exchange")
    assert counts.tolist() == [(other + rank + turn) % 4 for other in range(size)]
    rows = [100 * other + rank for other in range(size) for _ in range((other + rank + turn) % 4)]
    assert received.tolist() == rows
part = hvd.reducescatter(np.arange(100 * size, dtype=np.float64), op=hvd.Sum)
assert np.array_equal(part, float(size) * np.arange(100 * rank, 100 * rank + 100))
if even.included():
    assert hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=even).tolist() == [size / 2] * 3
hvd.barrier()
sys.stdout.write("right")
hvd.shutdown()
"""  # noqa: E501
)
DEATH: Final = (
    BEGIN
    + """
began = time.monotonic()
try:
    # Some ranks leave the barrier, and one of these is killed, before others do.
    hvd.barrier()
    if rank == size // 2 - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(np.ones(100_000, dtype=np.float32), op=hvd.Sum)
except hvd.HorovodInternalError as error:
    assert f"rank {size // 2 - 1}" in str(error), error
sys.stdout.write(f"{time.monotonic() - began}")
"""
)


def run(script: str) -> list[str]:
    """Returns the output of each rank, the error of a rank that failed, and `None` for the one
    that was killed.
    """
    told = {
        "HOROVOD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(os.getpid()),
        "FARANDOLE_START_TIMEOUT": "110",
        # Many more ranks than cores: a rank may not run for a while.
        "FARANDOLE_PEER_TIMEOUT": "30",
        "FARANDOLE_SHARED_MEMORY_BYTES": "32MiB",
        "FARANDOLE_LINKS_AT_START": "16",
    }
    ranks = [{**told, "HOROVOD_RANK": str(rank)} for rank in range(RANKS)]
    prefixes = [on_host(f"host-{rank // (RANKS // HOSTS)}") for rank in range(RANKS)]
    script = f"import sys\nsys.argv[1:] = ['{HOSTS}', '{RANKS}']\n{script}"
    ended = together(ranks, script, prefixes)
    return [one.out if one.status == 0 else f"{one.status}: {one.err[-2000:]}" for one in ended]


def test_every_collective_of_64_ranks_on_8_hosts_is_right() -> None:
    assert run(COLLECTIVES) == ["right"] * RANKS


def test_63_ranks_name_the_one_that_was_killed() -> None:
    ended = run(DEATH)
    assert ended.pop(RANKS // 2 - 1).startswith("-9")
    assert all(float(seconds) < 60 for seconds in ended)
