# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compressors to 16 bits round partial sums between hosts, unless configured otherwise."""

from __future__ import annotations

import json
import os
from typing import Final

import pytest
from tests.started import on_host, together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes other host names"),
]
# The ranks of the first host bring 256 and 1, which bfloat16 rounds to 256, as float16 does with
# 2048 and 1; the second host brings the same with the other sign, without the 1. Rounded between
# hosts the sum is 0, else it is 1.
TORCH: Final = """
import json, sys, torch
import farandole.torch as hvd
from farandole.torch.compress import Bf16
hvd.init()
assert (hvd.cross_size(), hvd.local_size()) == (2, 2)

class Exact(hvd.Compression.bf16):
    rounds_partial_sums = False

def brought(large, dtype=torch.float32):
    return torch.full((4,), [large, 1.0, -large, 0.0][hvd.rank()], dtype=dtype)

def trained(compression):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    named = [("weight", weight)]
    optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression, op=hvd.Sum)
    (weight * brought(256.0)).sum().backward()
    optimizer.step()
    return -weight.detach()

fp16, bf16 = hvd.Compression.fp16, hvd.Compression.bf16
results = {
    "fp16": hvd.allreduce(brought(2048.0), op=hvd.Sum, compression=fp16),
    "bf16": hvd.allreduce(brought(256.0), op=hvd.Sum, compression=bf16),
    "average": 4 * hvd.allreduce(brought(256.0), op=hvd.Average, compression=bf16),
    "grouped": hvd.grouped_allreduce([brought(256.0)] * 2, op=hvd.Sum, compression=bf16)[1],
    "scattered": hvd.reducescatter(brought(256.0), op=hvd.Sum, compression=bf16),
    "large": hvd.allreduce(brought(256.0).repeat(100_000), op=hvd.Sum, compression=bf16),
    "optimizer": trained(bf16),
    "stateful": trained(Bf16()),
    "exact": hvd.allreduce(brought(256.0), op=hvd.Sum, compression=Exact),
    "exact optimizer": trained(Exact),
    "exact stateful": trained(Bf16(rounds_partial_sums=False)),
    "uncompressed": hvd.allreduce(brought(256.0, torch.bfloat16), op=hvd.Sum),
}
sys.stdout.write(json.dumps({name: sorted(set(result.tolist())) for name,
    result in results.items()}))
"""
TENSORFLOW: Final = """
import json, sys
import tensorflow as tf
import farandole.tensorflow as hvd
hvd.init()
assert (hvd.cross_size(), hvd.local_size()) == (2, 2)

class Exact(hvd.Compression.bf16):
    rounds_partial_sums = False

mine = tf.fill([4], [256.0, 1.0, -256.0, 0.0][hvd.rank()])
bf16 = hvd.Compression.bf16

@tf.function
def graph(value):
    return hvd.allreduce(value, op=hvd.Sum, compression=bf16, name="graph")

with hvd.DistributedGradientTape(tf.GradientTape(), compression=bf16, op=hvd.Sum) as tape:
    weight = tf.Variable(tf.zeros([4]))
    loss = tf.reduce_sum(weight * mine)
results = {
    "eager": hvd.allreduce(mine, op=hvd.Sum, compression=bf16),
    "graph": graph(mine),
    "tape": tape.gradient(loss, weight),
    "scattered": hvd.reducescatter(mine, op=hvd.Sum, compression=bf16),
    "exact": hvd.allreduce(mine, op=hvd.Sum, compression=Exact),
}
sys.stdout.write(json.dumps({name: sorted(set(result.numpy().tolist())) for name,
    result in results.items()}))
"""


def sums(script: str) -> dict[str, list[float]]:
    """Returns the sum of each name, which is the same on all four ranks of two hosts."""
    told = {"HOROVOD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    ranks = [{"HOROVOD_RANK": str(rank), **told} for rank in range(4)]
    ended = together(ranks, script, [on_host(name) for name in "aabb"])
    assert [one.status for one in ended] == [0] * 4, ended[0].err
    results = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert all(result == results[0] for result in results)
    return results[0]


def test_torch_rounds_partial_sums_where_the_compressor_says_so() -> None:
    for name, values in sums(TORCH).items():
        assert values == ([1.0] if name.startswith(("exact", "uncompressed")) else [0.0]), name


def test_tensorflow_rounds_partial_sums_where_the_compressor_says_so() -> None:
    for name, values in sums(TENSORFLOW).items():
        assert values == ([1.0] if name.startswith("exact") else [0.0]), name
