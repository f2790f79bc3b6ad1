# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The other Keras namespace: values, a partial optimizer, elastic state and callbacks."""

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
assert hvd.allreduce(np.array([1.0, hvd.rank()]), name="values", average=False).tolist() == [
    2.0,
    1.0,
]
assert hvd.broadcast(np.array([hvd.rank()]), 1).tolist() == [1]
x = np.ones((8, 2), dtype="float32") * (hvd.rank() + 1)
y = np.ones((8, 1), dtype="float32")
keras.utils.set_random_seed(0)
local = keras.layers.Dense(1, use_bias=False, name="local")
inputs = keras.layers.Input((2,))
model = keras.Model(inputs, keras.layers.Dense(1, name="shared")(inputs) + local(inputs))
optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=[local])
model.compile(loss="mse", optimizer=optimizer)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
model.fit(
    x,
    y,
    batch_size=4,
    epochs=2,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ],
)
assert state.epoch == 2
shared = hvd.allgather(model.get_layer("shared").kernel.numpy().reshape(1, -1))
assert np.allclose(shared[0], shared[-1])
own = hvd.allgather(local.kernel.numpy().reshape(1, -1))
assert not np.allclose(own[0], own[-1])
print("done", hvd.rank())
