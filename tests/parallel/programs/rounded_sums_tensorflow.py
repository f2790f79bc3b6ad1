# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Sums 16 bits over two hosts with TensorFlow, and prints whether partial sums were rounded."""

import json
import sys

import tensorflow as tf

import farandole.tensorflow as hvd

hvd.init()
assert (hvd.cross_size(), hvd.local_size()) == (2, 2)


class Exact(hvd.Compression.bf16):
    rounds_partial_sums = False


mine = tf.fill([4], [256.0, 1.0, -256.0, 0.0][hvd.rank()])
bf16 = hvd.Compression.bf16


@tf.function
def graph(value):
    return hvd.allreduce(value, op=hvd.Sum, compression=bf16, name="graph")


with hvd.DistributedGradientTape(tf.GradientTape(), compression=bf16, op=hvd.Sum) as tape:
    weight = tf.Variable(tf.zeros([4]))
    loss = tf.reduce_sum(weight * mine)
results = {
    "eager": hvd.allreduce(mine, op=hvd.Sum, compression=bf16),
    "graph": graph(mine),
    "tape": tape.gradient(loss, weight),
    "scattered": hvd.reducescatter(mine, op=hvd.Sum, compression=bf16),
    "exact": hvd.allreduce(mine, op=hvd.Sum, compression=Exact),
}
sys.stdout.write(
    json.dumps({name: sorted(set(result.numpy().tolist())) for name, result in results.items()})
)
