# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sums 16 bits over two hosts with torch, and prints whether the partial sums were rounded."""

import json
import sys

import torch

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
sys.stdout.write(
    json.dumps({name: sorted(set(result.tolist())) for name, result in results.items()})
)
