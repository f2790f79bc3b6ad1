# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Checks every collective, and how many sockets a rank has."""

import os
import sys

import numpy as np
from ranks_of_hosts import even, rank, size

import farandole.numpy as hvd


def sockets():
    descriptors = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum(
        os.readlink(one).startswith("socket:") for one in descriptors if os.path.lexists(one)
    )


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
