# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes worlds of communicators like those of mpi4py, made of torch's process groups."""

import numpy as np
import torch.distributed as dist

import farandole.numpy as hvd

dist.init_process_group("gloo")


class Communicator:
    def __init__(self, ranks):
        self.ranks, self.group = ranks, dist.new_group(ranks)

    def Get_rank(self):  # noqa: N802, the name of mpi4py
        return self.ranks.index(dist.get_rank())

    def Get_size(self):  # noqa: N802, the name of mpi4py
        return len(self.ranks)

    def allgather(self, given):
        taken = [None] * len(self.ranks)
        dist.all_gather_object(taken, given, group=self.group)
        return taken

    def bcast(self, given, root=0):
        box = [given]
        dist.broadcast_object_list(box, src=self.ranks[root], group=self.group)
        return box[0]


own = dist.get_rank()
# Ranks join different numbers of worlds before they all meet again.
parts = [Communicator([3, 0]), Communicator([1])]
for part, total in zip(parts, (3.0, 1.0), strict=True):
    if own in part.ranks:
        hvd.init(comm=part)
        assert (hvd.rank(), hvd.size()) == (part.Get_rank(), part.Get_size())
        assert hvd.allreduce(np.array([1.0 * own]), op=hvd.Sum)[0] == total
        hvd.shutdown()
turned = Communicator([2, 3, 0, 1])
for _ in range(2):
    hvd.init(comm=turned)
    hvd.init(comm=turned)
    gathered = hvd.allgather(np.array([own]))
    assert gathered.tolist() == turned.ranks, gathered
    hvd.shutdown()
hvd.init()
print("place", hvd.rank(), hvd.size(), flush=True)
dist.destroy_process_group()
