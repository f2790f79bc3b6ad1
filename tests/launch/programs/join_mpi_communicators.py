# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Makes worlds of communicators of mpi4py."""

import sys

import numpy as np
from mpi4py import MPI

import farandole.numpy as hvd


def total():
    return hvd.allreduce(np.array([1 << MPI.COMM_WORLD.Get_rank()]), op=hvd.Sum)[0]


everybody = MPI.COMM_WORLD
own = everybody.Get_rank()
hvd.init(comm=everybody)
assert (hvd.rank(), hvd.size(), total()) == (own, 4, 15)
hvd.shutdown()
# Sub-communicators: odd and even ranks, in the opposite order.
part = everybody.Split(own % 2, -own)
hvd.init(comm=part)
assert (hvd.rank(), hvd.size(), total()) == (part.Get_rank(), 2, 5 if own % 2 == 0 else 10)
hvd.shutdown()
# One of three ranks; the fourth has none.
three = everybody.Split(0 if own < 3 else MPI.UNDEFINED, own)
if own < 3:
    hvd.init(comm=three)
    assert (hvd.rank(), hvd.size(), total()) == (own, 3, 7)
    hvd.shutdown()
else:
    try:
        hvd.init(comm=three)
    except ValueError as error:
        assert "COMM_NULL" in str(error)
    else:
        raise AssertionError
hvd.init(comm=MPI.COMM_SELF)
assert (hvd.rank(), hvd.size()) == (0, 1)
hvd.shutdown()
# And by what mpirun has told.
hvd.init()
place = (
    hvd.rank(),
    hvd.size(),
    hvd.local_rank(),
    hvd.local_size(),
    hvd.cross_rank(),
    hvd.cross_size(),
    total(),
)
sys.stdout.write(" ".join(map(str, ("place", *place))) + "\n")
hvd.shutdown()
