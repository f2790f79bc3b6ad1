# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks that send each other a mark and a pattern, in every way there is."""

import sys

import torch
import torch.distributed as dist

import farandole.torch as hvd
import farandole.torch.distributed  # noqa: F401 - registers the backend

hvd.init(process_sets="dynamic")
assert hvd.cross_size() == 2
mark, pattern = sys.argv[1], bytes.fromhex(sys.argv[2])
assert (
    hvd.broadcast_object({"told": mark} if hvd.rank() == 0 else None, root_rank=0)["told"] == mark
)
assert hvd.allgather_object([mark, hvd.rank()]) == [[mark, 0], [mark, 1]]
pattern = torch.frombuffer(bytearray(pattern * 4096), dtype=torch.float32)
assert torch.equal(
    hvd.broadcast(pattern if hvd.rank() == 0 else torch.zeros_like(pattern), root_rank=0), pattern
)
assert torch.equal(hvd.allgather(pattern), torch.cat([pattern, pattern]))
dist.init_process_group("farandole", init_method="farandole://")
store = dist.distributed_c10d._get_default_store()
store.set(mark + str(hvd.rank()), mark)
assert store.get(mark + str(1 - hvd.rank())) == mark.encode()
dist.destroy_process_group()
hvd.shutdown()
