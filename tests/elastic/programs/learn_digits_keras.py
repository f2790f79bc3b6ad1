# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Learns the digits with Keras in an elastic job."""

import keras
import numpy as np
from digits_epochs import BATCH, end, goes_on, print_epoch, test_x, test_y, train_x, train_y

import farandole.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])


def everywhere(value):
    return float(hvd.allreduce(np.array([value]))[0]) > 0.0


@hvd.elastic.run
def train(state):
    while goes_on(state.epoch, hvd, everywhere):
        print_epoch(state.epoch, hvd)
        # As many rows for each rank, whatever their number.
        rows = np.random.default_rng(state.epoch).permutation(len(train_x))
        mine = rows[: len(rows) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        model.fit(
            train_x[mine].reshape(-1, 8, 8, 1),
            train_y[mine],
            batch_size=BATCH,
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, 5),
                hvd.elastic.UpdateEpochStateCallback(state),
            ],
        )


train(hvd.elastic.KerasState(model, epoch=0))
end(float(model.evaluate(test_x.reshape(-1, 8, 8, 1), test_y, verbose=0)[1]))
