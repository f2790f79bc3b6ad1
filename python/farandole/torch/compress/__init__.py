# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Compressors with a state: gradients are sent in a smaller form, with error feedback.

`DistributedOptimizer(compression=...)` takes an instance, besides the classes of `Compression`. For
`DistributedDataParallel`, `farandole.torch.ddp_comm_hook.compressor_hook` takes an instance. Each
optimizer or model needs its own instance. Reductions are `Average` or `Sum`.

| compressor | bytes for n numbers of float32 | lost part |
| --- | --- | --- |
| `Fp16`, `Bf16` | 2 n | precision |
| `Int8(block)` | n + 4 n / block | precision, relative to the largest number of each block |
| `TopK(share)` | 8 share n from each rank | the small numbers, for now |
| `PowerSGD(rank)` | 4 rank (rows + columns) | the error of a product of two thin matrices |

To write one, derive from `VectorCompressor` (`encode` and `add`), or from `Compressor` (`reduce`).

Example:
    from farandole.torch.compress import PowerSGD

    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=PowerSGD(rank=4))
"""  # noqa: E501

from farandole.torch.compress._base import Compressor, VectorCompressor
from farandole.torch.compress._cast import Bf16, Cast, Fp16
from farandole.torch.compress._exchange import EngineExchange, Exchange, GroupExchange, Waiting
from farandole.torch.compress._powersgd import PowerSGD
from farandole.torch.compress._vectors import Int8, TopK

__all__ = [
    "Bf16",
    "Cast",
    "Compressor",
    "EngineExchange",
    "Exchange",
    "Fp16",
    "GroupExchange",
    "Int8",
    "PowerSGD",
    "TopK",
    "VectorCompressor",
    "Waiting",
]
