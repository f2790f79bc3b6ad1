# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Ranks that know how many hosts they have, and a process set of the even ones."""

import sys

import farandole.numpy as hvd

hosts, ranks = map(int, sys.argv[1:])
even = hvd.ProcessSet(range(0, ranks, 2))
hvd.init(process_sets=[even])
rank, size = hvd.rank(), hvd.size()
assert (size, hvd.local_size(), hvd.cross_size()) == (ranks, ranks // hosts, hosts)
