# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sums the ranks, each plus one."""

import numpy as np

import farandole.numpy as hvd

hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total[0]}", flush=True)
