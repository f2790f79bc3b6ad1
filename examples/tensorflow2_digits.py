# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A training loop of TensorFlow 2's on digits: `farandole run -np 2 python
examples/tensorflow2_digits.py`.

Horovod scripts do the same with `import horovod.tensorflow as hvd`.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import farandole.tensorflow as hvd

ENOUGH = 0.95
hvd.init()
# A GPU for each rank, or one thread: TensorFlow takes that only before it has run anything.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.random.set_seed(hvd.rank())

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(
    (digits.data / 16).astype(np.float32), digits.target, test_size=0.2, random_state=1
)
# Batches of all ranks, of which each takes its share.
dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(len(train_x), seed=1)
dataset = dataset.batch(32 * hvd.size(), drop_remainder=True)


class Network(tf.Module):
    """Two dense layers."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = (
            tf.Variable(tf.random.normal((64, 128)) * 0.1),
            tf.Variable(tf.zeros(128)),
        )
        self.w2, self.b2 = tf.Variable(tf.random.normal((128, 10)) * 0.1), tf.Variable(tf.zeros(10))

    def __call__(self, x):
        """Logits of images."""
        return tf.nn.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


network = Network()
velocities = [tf.Variable(tf.zeros_like(variable)) for variable in network.trainable_variables]


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(x)))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, network.trainable_variables)
    for variable, velocity, grad in zip(
        network.trainable_variables, velocities, grads, strict=True
    ):
        velocity.assign(0.9 * velocity - 0.05 * grad)
        variable.assign_add(velocity)
    return loss


# The ranks start with different weights, until all get those of rank 0.
hvd.broadcast_variables([*network.trainable_variables, *velocities], root_rank=0)
for _epoch in range(12):
    for x, y in dataset:
        share = slice(hvd.rank() * 32, (hvd.rank() + 1) * 32)
        loss = step(x[share], y[share])
    loss = hvd.allreduce(loss)

accuracy = float(np.mean(np.argmax(network(test_x), axis=1) == test_y))
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f} with {hvd.size()} processes, loss {float(loss):.4f}")
assert accuracy >= ENOUGH
assert len(set(hvd.allgather_object(accuracy))) == 1
