# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Keras under TensorFlow: a distributed optimizer, Horovod's callbacks, and a model saved and
loaded.
"""

import os
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
random = np.random.default_rng(hvd.rank())
x = random.normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
tf.keras.utils.set_random_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(
    tf.keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9),
    backward_passes_per_step=1,
    average_aggregated_gradients=True,
)
model.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=0.02 * hvd.size(), warmup_epochs=2, steps_per_epoch=4
    ),
]
history = model.fit(x, y, batch_size=16, epochs=6, callbacks=callbacks, verbose=0).history
assert history["loss"][-1] < history["loss"][0] / 2, history["loss"]
losses = hvd.allgather(np.array([history["loss"][-1]]))
assert abs(losses[0] - losses[-1]) < 1e-6, "the metric is not averaged"
kernels = hvd.allgather(model.layers[0].kernel.numpy().reshape(1, -1))
assert (kernels[0] == kernels[-1]).all()

path = os.path.join(sys.argv[1], f"model{hvd.rank()}.keras")
model.save(path)
loaded = hvd.load_model(path)
assert type(loaded.optimizer).__name__ == "SGD"
loaded.fit(x, y, batch_size=16, epochs=1, verbose=0)
print("done", hvd.rank())
