# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Counts rows of a `ParquetLoader` in the model of an elastic state."""

from counted_rows import EPOCHS, end, loader, loss, model, named, plain

import farandole.torch as hvd

optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, op=hvd.Sum)


@hvd.elastic.run
def train(state):
    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for batch in loader:
            optimizer.zero_grad()
            loss(epoch, batch).backward()
            optimizer.step()
            state.step += 1
            if state.step % 3 == 0:
                state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, reader=loader, step=0))
end()
