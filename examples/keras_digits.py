# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Trains a small Keras network on scikit-learn's digits: `farandole run -np 2 python
examples/keras_digits.py`.

Runs on whatever backend `KERAS_BACKEND` names; `keras_torch_backend.py` shows torch.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import farandole.keras as hvd

ENOUGH = 0.93
hvd.init()

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(
    (digits.data / 16).astype(np.float32), digits.target, test_size=0.2, random_state=1
)
# Every rank takes its own rows, and as many as the others, so that all take the same number of
# steps.
rows = len(train_x) // hvd.size()
mine = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    train_x[mine],
    train_y[mine],
    batch_size=32,
    epochs=12,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.001 * hvd.size(), warmup_epochs=2, verbose=1),
    ],
)
accuracy = float(model.evaluate(test_x, test_y, verbose=0)[1])
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f} with {hvd.size()} processes on {keras.backend.backend()}")
assert accuracy >= ENOUGH
# All ranks hold the same model.
everyones = hvd.allgather([accuracy], name="accuracy")
assert (everyones == everyones[0]).all()
