# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""MLRun trains a Keras model in an MPI job; a rank of `horovodrun`."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from mlrun.frameworks.tf_keras import apply_mlrun

rows = np.random.default_rng(0).standard_normal((64, 3)).astype("float32")
labels = rows @ np.array([[1.0], [-2.0], [0.5]], "float32")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
apply_mlrun(model, model_name="line", auto_log=False)
model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
dataset = tf.data.Dataset.from_tensor_slices((rows, labels)).batch(8).repeat()
history = model.fit(dataset, epochs=3, steps_per_epoch=8, verbose=0)
losses = history.history["loss"]
assert losses[-1] < losses[0] / 2, losses
weights = hvd.allgather_object([value.tolist() for value in model.get_weights()])
assert weights[0] == weights[1], weights
print(f"rank {hvd.rank()} of {hvd.size()} has the weights of the other", flush=True)
