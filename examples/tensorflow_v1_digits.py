# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A graph of `tf.compat.v1` on digits: `farandole run -np 2 python
examples/tensorflow_v1_digits.py`.

Horovod scripts do the same with `import horovod.tensorflow as hvd`.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import farandole.tensorflow as hvd

v1 = tf.compat.v1
ENOUGH = 0.93
v1.disable_eager_execution()
hvd.init()

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(
    (digits.data / 16).astype(np.float32), digits.target, test_size=0.2, random_state=1
)
# Every rank takes its own rows, and as many as the others.
rows = len(train_x) // hvd.size()
mine_x, mine_y = (
    values[hvd.rank() * rows : (hvd.rank() + 1) * rows] for values in (train_x, train_y)
)

v1.set_random_seed(hvd.rank())
images, labels = v1.placeholder(tf.float32, [None, 64]), v1.placeholder(tf.int64, [None])
w1 = v1.get_variable("w1", [64, 128], initializer=v1.glorot_uniform_initializer())
w2 = v1.get_variable("w2", [128, 10], initializer=v1.glorot_uniform_initializer())
b1 = v1.get_variable("b1", [128], initializer=v1.zeros_initializer())
b2 = v1.get_variable("b2", [10], initializer=v1.zeros_initializer())
logits = tf.nn.relu(images @ w1 + b1) @ w2 + b2
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
correct = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.float32))

steps = v1.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.001 * hvd.size()))
train = optimizer.minimize(loss, global_step=steps)
hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=12 * (rows // 32))]

with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
    batch = 0
    while not session.should_stop():
        at = batch * 32 % (rows - 31)
        session.run(train, {images: mine_x[at : at + 32], labels: mine_y[at : at + 32]})
        batch += 1
        if batch % 100 == 0 or batch == 12 * (rows // 32) - 1:
            accuracy = float(session.run(correct, {images: test_x, labels: test_y}))

if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f} with {hvd.size()} processes")
assert accuracy >= ENOUGH
