# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A program with groups that the engine cannot have: Gloo must make them. Takes a directory."""

import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 - registers "fake"

dist.init_process_group("cpu:gloo,cuda:fake")
rank = dist.get_rank()
total = torch.ones(2)
work = dist.all_reduce(total, async_op=True)
work.wait()
assert work.is_completed()
assert total.tolist() == [2, 2]
subgroup = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(total, group=subgroup)
assert total.tolist() == [4, 4]
dist.destroy_process_group()

# A group of two ranks on the engine, and after it a group of each rank alone.
dist.init_process_group("gloo")
dist.all_reduce(total)
assert total.tolist() == [8, 8]
print(f"engine {type(dist.group.WORLD).__name__}", flush=True)
dist.destroy_process_group()
alone = dist.FileStore(f"{sys.argv[1]}/{rank}", 1)
dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
dist.all_reduce(total)
assert total.tolist() == [8, 8]
dist.destroy_process_group()
