# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A custom loop of TensorFlow 2 with a distributed tape, in a function, and with a local layer."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
features = tf.random.stateless_normal([64, 4], seed=[1, 2])
labels = tf.reduce_sum(features, axis=1, keepdims=True)
dataset = (
    tf.data.Dataset.from_tensor_slices((features, labels))
    .shard(hvd.size(), hvd.rank())
    .repeat()
    .batch(16)
)
tf.random.set_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.05 * hvd.size())


@tf.function
def training_step(rows, targets, first_batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(rows, training=True) - targets) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


losses = [training_step(*batch, index == 0).numpy() for index, batch in enumerate(dataset.take(20))]
assert losses[-1] < losses[0] / 4, losses
kernels = hvd.allgather(tf.reshape(model.trainable_variables[0], [1, -1])).numpy()
assert (kernels[0] == kernels[-1]).all(), "ranks have trained different models"
assert hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum).numpy().tolist() == [2.0, 4.0]

local = tf.keras.layers.Dense(1, use_bias=False)
shared = tf.keras.layers.Dense(1, use_bias=False)
rows = tf.ones([1, 2]) * (hvd.rank() + 1)
local.build(rows.shape)
shared.build(rows.shape)
variables = [local.kernel.value, shared.kernel.value]
with tf.GradientTape() as tape:
    result = tf.reduce_sum(local(rows) + shared(rows))
tape = hvd.PartialDistributedGradientTape(tape, local_layers=[local])
of_local, of_global = tape.get_local_and_global_gradients(result, variables)
assert [gradient.numpy()[0, 0] for _, gradient in of_local] == [(hvd.rank() + 1) / hvd.size()]
assert [gradient.numpy()[0, 0] for _, gradient in of_global] == [1.5]

x = tf.constant([float(hvd.rank())])
with tf.GradientTape() as tape:
    tape.watch(x)
    gathered = tf.reduce_sum(hvd.allgather(x) * (hvd.rank() + 1.0))
assert tape.gradient(gathered, x).numpy().tolist() == [1.5]
assert hvd.broadcast_object([hvd.rank()], root_rank=1) == [1]
print("done", hvd.rank())
