# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Prints where a member of a group listens, after the group was reconfigured."""

import os
from datetime import timedelta

import torch.distributed as dist
from tests.sockets import listening

import farandole.torch.distributed  # noqa: F401 - registers the backend

rank, limit = int(os.environ["MEMBER"]), timedelta(seconds=60)
store = dist.FileStore(os.environ["MEETING"], -1)
dist.init_process_group(
    "farandole", store=store, rank=rank, world_size=2, timeout=limit, enable_reconfigure=True
)
store.set(f"handle/{rank}", dist._get_reconfigure_handle())
handles = [store.get(f"handle/{one}").decode() for one in range(2)]
before = listening()
assert dist._reconfigure(1, handles, timeout=limit).wait()
dist.barrier()
print("listens", sorted(listening() - before), flush=True)
dist.barrier()
