# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Reduces float32 that is a 16-bit float on links, next to a model of it in torch, on two hosts
with two ranks each.
"""

import json
import sys

import torch

import farandole.torch as hvd

hvd.init()
assert (hvd.cross_size(), hvd.local_size()) == (2, 2)
RANKS = range(4)
# None, one, odd, a block of casts and one more, several chunks.
SIZES = [0, 1, 33, 2048, 2049, 700_001]
SPECIAL = [float("inf"), float("-inf"), float("nan"), 65520.0, 3.4e38, 1e-45, -0.0]
results, casts = {}, []


def count_casts(compression):
    original = compression.compress

    def compress(tensor):
        casts.append(tensor.dtype)
        return original(tensor)

    compression.compress = staticmethod(compress)


def brought(rank, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + size)
    tensor = torch.randn(size, generator=generator) * 100
    for place, value in enumerate(SPECIAL[: size // 8]):
        tensor[(place + rank) * 3 % size] = value
    return tensor.to(dtype)


def modelled(inputs, half, average, prescale=1.0, postscale=1.0):
    """Hosts sum in float32 and round; the sum of hosts is divided, scaled and rounded once."""
    cast = [tensor.to(half).float() * prescale for tensor in inputs]
    hosts = [(cast[first] + cast[first + 1]).to(half).float() for first in (0, 2)]
    total = hosts[0] + hosts[1]
    return ((total / 4 if average else total) * postscale).to(half).float()


def is_equal(got, expected):
    return got.dtype == expected.dtype and torch.equal(
        got.view(torch.int32)[~got.isnan()], expected.view(torch.int32)[~expected.isnan()]
    )


count_casts(hvd.Compression.bf16)
count_casts(hvd.Compression.fp16)
for half, compression in (
    (torch.bfloat16, hvd.Compression.bf16),
    (torch.float16, hvd.Compression.fp16),
):
    for size in SIZES:
        everybody = [brought(rank, size) for rank in RANKS]
        own = everybody[hvd.rank()]
        kept = own.clone()
        for op in (hvd.Sum, hvd.Average):
            got = hvd.allreduce(own, op=op, compression=compression)
            results[f"{half} {size} {op}"] = is_equal(
                got, modelled(everybody, half, op == hvd.Average)
            )
        got = hvd.allreduce(
            own, op=hvd.Sum, compression=compression, prescale_factor=0.5, postscale_factor=3.0
        )
        results[f"{half} {size} scaled"] = is_equal(got, modelled(everybody, half, False, 0.5, 3.0))
        results[f"{half} {size} input"] = is_equal(own, kept)
    together = [brought(hvd.rank(), size) for size in SIZES]
    reduced = hvd.grouped_allreduce(together, op=hvd.Sum, compression=compression)
    results[f"{half} grouped"] = all(
        is_equal(got, modelled([brought(rank, size) for rank in RANKS], half, False))
        for got, size in zip(reduced, SIZES, strict=True)
    )
results["the engine cast everything"] = not casts

whole = torch.arange(5) + hvd.rank()
results["integers"] = torch.equal(
    hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.bf16), torch.arange(5) * 4 + 6
)
wide = torch.full((3,), 1.0 + hvd.rank() / 1024, dtype=torch.float64)
got = hvd.allreduce(wide, op=hvd.Sum, compression=hvd.Compression.fp16)
results["float64 is cast by the compressor"] = got.dtype == torch.float64 and casts == [
    torch.int64,
    torch.float64,
]

weight = torch.nn.Parameter(brought(hvd.rank(), 33)[:2].clone())
hvd.allreduce(weight, op=hvd.Sum, compression=hvd.Compression.bf16).backward(torch.ones(2))
results["gradient"] = weight.grad.tolist() == [4.0, 4.0]


def trained(views):
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        [("weight", weight)],
        compression=hvd.Compression.bf16,
        op=hvd.Sum,
        gradient_as_bucket_view=views,
    )
    (weight * brought(hvd.rank(), 4)).sum().backward()
    optimizer.step()
    return -weight.detach()


casts.clear()
expected = modelled([brought(rank, 4) for rank in RANKS], torch.bfloat16, False)
results["optimizer"] = is_equal(trained(False), expected)
results["bucket views"] = is_equal(trained(True), expected)
results["the optimizer's gradients too"] = not casts

other = hvd.Compression.fp16 if hvd.rank() == 3 else hvd.Compression.bf16
try:
    hvd.allreduce(torch.ones(3), name="other", compression=other)
    results["other type on a rank"] = False
except ValueError as error:
    told = str(error)
    results["other type on a rank"] = all(
        word in told for word in ("other", "F16WireAverage", "Bf16WireAverage")
    )
sys.stdout.write(json.dumps({name: bool(value) for name, value in results.items()}))
