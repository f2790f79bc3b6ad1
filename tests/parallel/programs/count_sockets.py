# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts the sockets of a rank after operations of several kinds."""

import json
import os
import sys

import numpy as np

import farandole.numpy as hvd


def sockets():
    descriptors = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum(
        os.readlink(one).startswith("socket:") for one in descriptors if os.path.lexists(one)
    )


hvd.init()
rank, size = hvd.rank(), hvd.size()
assert (hvd.cross_size(), hvd.local_size()) == (6, 2)
counts = [sockets()]
total = hvd.allreduce(np.arange(300_000, dtype=np.float32) % 100 + rank, op=hvd.Sum)
assert np.array_equal(total, size * (np.arange(300_000) % 100) + size * (size - 1) // 2)
counts.append(sockets())
received = hvd.alltoall(np.arange(size) + 100 * rank)
assert received.tolist() == [100 * other + rank for other in range(size)]
counts.append(sockets())
for root in range(size):
    assert hvd.broadcast(np.full(5, rank), root_rank=root).tolist() == [root] * 5
hvd.barrier()
counts.append(sockets())
sys.stdout.write(json.dumps(counts))
hvd.shutdown()
