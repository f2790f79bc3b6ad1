# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts rows of a `ParquetLoader` in the model of a fault-tolerant optimizer."""

from counted_rows import EPOCHS, end, loader, loss, named, plain

import farandole.torch as hvd

optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum, fault_tolerant=True)
optimizer.share(reader=loader)
while loader.epoch < EPOCHS:
    epoch = loader.epoch
    for batch in loader:
        optimizer.zero_grad()
        loss(epoch, batch).backward()
        optimizer.step()
end()
